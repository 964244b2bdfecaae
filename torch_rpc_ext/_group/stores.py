"""The rendezvous store: waiting with a time limit, and facts about a store.

Keys are polled. Store.wait() would do the waiting in C++, where Ctrl-C does not interrupt it, and a
TCPStore logs two warnings at each of its time-outs.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from torch._C import _DistNetworkError
from torch._C import _distributed_c10d as _untyped_c10d

from torch_rpc_ext import errors

T = TypeVar("T")

dist: Any = _untyped_c10d  # its stub lacks some members

# Pauses between looks, s: short at first, because the others usually come within milliseconds;
# then longer, to spare the store.
_FIRST_PAUSE = 0.001
_GROWTH = 1.25
_LONGEST_PAUSE = 0.1

# How long a store has for an answer where the time of init_rpc is over, s; and after init_rpc.
_LEAST_PATIENCE = 2.0
_LATER_PATIENCE = 10.0
# How long the end of the process waits for an operation that was given up, s.
_LAST_PATIENCE = 3.0


class Deadline:
    """A moment after which waiting ends.

    Args:
        seconds: how long from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left, 0 when over."""
        return max(0.0, self._end - time.monotonic())


def poll(ready: Callable[[], bool], deadline: Deadline) -> bool:
    """Call ready() until it returns True or the deadline is over; return its last result.

    Ctrl-C interrupts this.
    """
    pause = _FIRST_PAUSE
    while not ready():
        left = deadline.remaining()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * _GROWTH, _LONGEST_PAUSE)
    return True


class _Thread:
    """A thread that does operations one after another, as long as somebody wants their results."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._orders = queue.SimpleQueue()
        # A daemon thread, because an operation may never end.
        self._thread = threading.Thread(target=self._work, name="rpc store", daemon=True)
        self._thread.start()

    def do(self, operation: Callable[[], T], seconds: float) -> T:
        """Return what the operation returns; TimeoutError if it takes longer. Ctrl-C interrupts."""
        answer: Future[T] = Future()
        self._orders.put((operation, answer))
        try:
            return answer.result(min(seconds, threading.TIMEOUT_MAX))
        except BaseException:
            if not answer.done():
                _left_behind(self._thread)
            raise

    def end(self) -> None:
        """Let the thread end; where it is in an operation, after that."""
        self._orders.put(None)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            operation, answer = order
            try:
                answer.set_result(operation())
            except BaseException as error:  # noqa: BLE001  who waits gets it
                answer.set_exception(error)
            del order, operation, answer


_given_up: list[threading.Thread] = []


def _left_behind(thread: threading.Thread) -> None:
    """Let the end of the process wait for a thread in C++, for a moment.

    Python ends a thread that comes back from C++ while the interpreter is taken down, and the
    thread's C++ then aborts the process.
    """
    if not _given_up:
        atexit.register(_wait_for_given_up)
    _given_up.append(thread)


def _wait_for_given_up() -> None:
    deadline = Deadline(_LAST_PATIENCE)
    while _given_up:
        _given_up.pop().join(deadline.remaining())


def within(seconds: float, operation: Callable[[], T]) -> T:
    """Return what an operation of a store returns, within a time limit.

    Args:
        seconds: the limit. Ctrl-C interrupts the waiting.
        operation: what to do, on a thread of its own. It may be left behind in C++.

    Raises:
        TimeoutError: the time is over.
    """
    thread = _Thread()
    try:
        return thread.do(operation, seconds)
    finally:
        thread.end()


class Answering:
    """A store whose operations end, with an error if the store does not answer.

    torch waits inside C++ for the answer of a TCPStore, for ever and deaf to Ctrl-C: where the
    process that serves the store is stopped, or its host is cut off. So another thread does each
    operation.

    Args:
        store: a store of torch.
        seconds: how long the operations have, all of them together, in a ``with`` block, where one
            thread does them all.

    Attributes:
        store: as given.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self.store = store
        self._deadline = Deadline(seconds)
        self._thread: _Thread | None = None
        self._silent = False

    def __enter__(self) -> Answering:
        self._thread = _Thread()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()

    def of(self, store: Any) -> Answering:
        """Return another store, whose operations the thread of this ``with`` block does."""
        other = copy.copy(self)
        other.store = store
        return other

    def add(self, key: str, amount: int) -> int:
        """As Store.add(); all methods raise RpcError where the store does not answer."""
        return int(self._do(lambda: self.store.add(key, amount)))

    def check(self, keys: list[str]) -> bool:
        """As Store.check()."""
        return bool(self._do(lambda: self.store.check(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As Store.compare_set()."""
        return bytes(self._do(lambda: self.store.compare_set(key, expected, desired)))

    def get(self, key: str) -> bytes:
        """As Store.get()."""
        return bytes(self._do(lambda: self.store.get(key)))

    def set(self, key: str, value: str) -> None:
        """As Store.set()."""
        self._do(lambda: self.store.set(key, value))

    def _do(self, operation: Callable[[], T]) -> T:
        thread = self._thread
        try:
            if thread is None:
                return within(_LATER_PATIENCE, operation)
            if self._silent:
                raise TimeoutError
            return thread.do(operation, max(_LEAST_PATIENCE, self._deadline.remaining()))
        except TimeoutError:
            self._silent = True
            raise errors.RpcError(
                f"The store at {describe(self.store)} does not answer: the process that serves it "
                "(rank 0, or torchrun) is stopped, or its host cannot be reached any more."
            ) from None
        except _DistNetworkError as error:
            raise errors.RpcError(
                f"The store at {describe(self.store)} has ended ({error}): look at the output of "
                "the process that serves it (rank 0, or torchrun)."
            ) from error
        except KeyboardInterrupt:
            self._deadline = Deadline(0)  # what is still to be said to the others is said soon
            raise


@contextlib.contextmanager
def patient(store: Any, seconds: float) -> Iterator[None]:
    """Set the store's own time limit: init_rpc has set rpc_timeout, which may be tiny."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=max(1.0, seconds)))
    try:
        yield
    finally:
        # The store may be gone by now; an error about that would hide the error of the block.
        with contextlib.suppress(RuntimeError):
            store.set_timeout(before)


def describe(store: Any) -> str:
    """Return where the store is, for messages."""
    store = _innermost(store)
    if isinstance(store, dist.TCPStore):
        return f"tcp://{store.host}:{store.port}"
    if isinstance(store, dist.FileStore):
        return f"file://{store.path}"
    return type(store).__name__


def unnumbered(store: Any) -> Any:
    """Return the store without the prefix of init_rpc, the number of this process's init_rpc calls.

    A worker that comes back, or that was not in all earlier groups, has made another number of
    calls than the others: with the prefix they would never meet.
    """
    return store.underlying_store if isinstance(store, dist.PrefixStore) else store


def launcher_serves() -> bool:
    """Return whether torchrun, and not a worker, serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def serves_by_rank_0(store: Any) -> bool:
    """Return whether the store's content is kept by rank 0 of the group."""
    return isinstance(_innermost(store), dist.TCPStore) and not launcher_serves()


def _innermost(store: Any) -> Any:
    if isinstance(store, Answering):
        store = store.store
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
