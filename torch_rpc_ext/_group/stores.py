"""The rendezvous store: waiting with a time limit, and facts about a store.

Keys are polled. Store.wait() would do the waiting in C++, where Ctrl-C does not interrupt it, and a
TCPStore logs two warnings at each of its time-outs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as _untyped_c10d

dist: Any = _untyped_c10d  # its stub lacks some members

# Pauses between looks, s: short at first, because the others usually come within milliseconds;
# then longer, to spare the store.
_FIRST_PAUSE = 0.001
_GROWTH = 1.25
_LONGEST_PAUSE = 0.1


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
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
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
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and not launcher_serves()
