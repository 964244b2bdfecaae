"""Calls to several workers: gather, broadcast, first_of, map_reduce.

`function` is whatever rpc.rpc_async() takes, or has a method async_() as a RemoteFunction.
All calls are made in the caller's thread, so a distributed autograd context holds for them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

from torch.distributed import rpc as _untyped_rpc
from torch.futures import Future

from torch_rpc_ext import errors

rpc: Any = _untyped_rpc  # upstream's functions have no types

T = TypeVar("T")

# As upstream has it: the time-out of the back end's options.
_DEFAULT_TIMEOUT = -1.0


class Remote(Protocol[T]):
    """A remote function of this package: RemoteFunction and what is made of it."""

    def async_(self, to: Any, /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call it there; return a future of what it returns."""


class GroupError(errors.RpcError):
    """Calls to several workers, of which some failed, or all.

    Args:
        message: what was called, and which worker failed with what.
        errors: what each worker that failed raised, by its name.
        results: what the others returned, by name.

    Attributes:
        worker: the name of the one that failed, None where several did.
    """

    def __init__(
        self,
        message: str = "",
        errors: Mapping[str, BaseException] | None = None,
        results: Mapping[str, Any] | None = None,
    ) -> None:
        self.errors = dict(errors or {})
        self.results = dict(results or {})
        super().__init__(message, worker=next(iter(self.errors)) if len(self.errors) == 1 else None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what it holds, which need not be able to travel.
        return type(self), (str(self),)


class _Calls:
    """Calls under way. Used by one thread; answers are noted by others."""

    def __init__(self, what: str, function: Any, workers: Sequence[Any], timeout: float) -> None:
        if isinstance(workers, str) or not workers:
            raise ValueError(f"{what} needs a list of one worker or more, got {workers!r}")
        self.what, self.function, self.timeout = what, function, timeout
        self.names = [str(getattr(worker, "name", worker)) for worker in workers]
        self.workers = workers
        self.errors: dict[str, BaseException] = {}
        self.results: dict[str, Any] = {}
        self._done: queue.SimpleQueue[tuple[int, Any, Future[Any] | Exception]] = (
            queue.SimpleQueue()
        )

    def start(
        self, worker: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None, tag: Any = None
    ) -> None:
        """Call a worker, by its place in the list; `tag` comes back with its answer."""
        to, kwargs = self.workers[worker], dict(kwargs or {})
        try:
            if hasattr(self.function, "async_"):
                future = self.function.async_(to, *args, rpc_timeout=self.timeout, **kwargs)
            else:
                future = rpc.rpc_async(to, self.function, tuple(args), kwargs, self.timeout)
        except RuntimeError as error:
            # Such as a worker that is not in the group.
            self._done.put((worker, tag, error))
            return
        future.add_done_callback(lambda done: self._done.put((worker, tag, done)))

    def next(self) -> tuple[int, Any, Any, Exception | None]:
        """Wait for an answer: worker, tag, result, error."""
        worker, tag, answer = self._done.get()
        try:
            if isinstance(answer, Exception):
                raise answer
            return worker, tag, answer.wait(), None
        except Exception as error:  # noqa: BLE001  whatever the function raises
            self.errors.setdefault(self.names[worker], error)
            return worker, tag, None, error

    def failure(self) -> GroupError:
        """Make the error of what has failed until now."""
        function = getattr(self.function, "__name__", repr(self.function))
        failed = {name: self.errors[name] for name in self.names if name in self.errors}
        each = "; ".join(f"{name}: {_in_short(error)}" for name, error in failed.items())
        error = GroupError(
            f"{self.what} of {function}: {len(failed)} of {len(set(self.names))} workers failed: "
            f"{each}",
            failed,
            self.results,
        )
        error.__cause__ = next(iter(failed.values()))
        return error


def _in_short(error: BaseException) -> str:
    """Return one line of an error, whose text may be a remote traceback."""
    # str() of a KeyError is the repr() of its text.
    whole = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    # TENSORPIPE adds where it was raised here.
    lines = whole.split("\n\nAt:\n")[0].strip().splitlines() or [""]
    return lines[-1] if "Traceback" in whole else f"{type(error).__name__}: {lines[0]}"


@overload
def gather(
    workers: Sequence[Any],
    function: Remote[T],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float = ...,
) -> list[T]: ...


@overload
def gather(
    workers: Sequence[Any],
    function: Callable[..., T],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float = ...,
) -> list[T]: ...


def gather(
    workers: Sequence[Any],
    function: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = _DEFAULT_TIMEOUT,
) -> list[Any]:
    """Call a function on all workers at once, with the same arguments.

    Args:
        workers: names, ranks or WorkerInfos.
        function: what rpc.rpc_async() takes, or a remote function of this package.
        args: its arguments.
        kwargs: its keyword arguments.
        timeout: of each call, s; 0 for none, -1 for the back end's default.

    Returns:
        What it returned on each worker, in the order of `workers`.

    Raises:
        GroupError: some failed, when all have answered; it names them and holds the results of the
            others.
        ValueError: no workers.
    """
    calls = _Calls("gather", function, workers, timeout)
    for worker in range(len(workers)):
        calls.start(worker, args, kwargs)
    results: list[Any] = [None] * len(workers)
    for _ in workers:
        worker, _tag, result, error = calls.next()
        if error is None:
            results[worker] = calls.results[calls.names[worker]] = result
    if calls.errors:
        raise calls.failure()
    return results


def broadcast(
    workers: Sequence[Any],
    function: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = _DEFAULT_TIMEOUT,
) -> None:
    """Call a function on all workers at once, as gather(), and wait until all have run it.

    For functions that are called for what they do: what they return comes back and is dropped.
    """
    gather(workers, function, args, kwargs, timeout)


@overload
def first_of(
    workers: Sequence[Any],
    function: Remote[T],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float = ...,
) -> T: ...


@overload
def first_of(
    workers: Sequence[Any],
    function: Callable[..., T],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float = ...,
) -> T: ...


def first_of(
    workers: Sequence[Any],
    function: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = _DEFAULT_TIMEOUT,
) -> Any:
    """Call a function on all workers at once, as gather(), and return the first result.

    Later answers are dropped; the function still runs to its end on all workers.

    Raises:
        GroupError: all failed.
        ValueError: no workers.
    """
    calls = _Calls("first_of", function, workers, timeout)
    for worker in range(len(workers)):
        calls.start(worker, args, kwargs)
    for _ in workers:
        _worker, _tag, result, error = calls.next()
        if error is None:
            return result
    raise calls.failure()


@overload
def map_reduce(
    workers: Sequence[Any],
    function: Remote[T],
    items: Sequence[Any],
    reduce: Callable[[T, T], T],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float = ...,
) -> T: ...


@overload
def map_reduce(
    workers: Sequence[Any],
    function: Callable[..., T],
    items: Sequence[Any],
    reduce: Callable[[T, T], T],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    timeout: float = ...,
) -> T: ...


def map_reduce(
    workers: Sequence[Any],
    function: Any,
    items: Sequence[Any],
    reduce: Callable[[Any, Any], Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = _DEFAULT_TIMEOUT,
) -> Any:
    """Call a function with each item, on whichever worker is free, and make one of the results.

    Each worker has one call at a time, and gets its next when it has answered.

    Args:
        workers: names, ranks or WorkerInfos. One that stands there twice gets two calls at a time.
        function: called with an item and `args`.
        items: one or more.
        reduce: run here: reduce(reduce(result of items[0], of items[1]), of items[2]) and so on,
            in this order whatever came first.
        args: the function's further arguments.
        kwargs: its keyword arguments.
        timeout: of each call, s; 0 for none, -1 for the back end's default.

    Returns:
        The reduced result; with one item, its result.

    Raises:
        GroupError: a call failed; no further ones were started.
        ValueError: no workers, or no items.
    """
    calls = _Calls("map_reduce", function, workers, timeout)
    if not len(items):
        raise ValueError("map_reduce needs one item or more, got none")
    started = min(len(workers), len(items))
    for place in range(started):
        calls.start(place, (items[place], *args), kwargs, tag=place)
    waiting: dict[int, Any] = {}
    reduced, count = None, 0
    while count < len(items):
        worker, place, result, error = calls.next()
        if error is not None:
            error.add_note(f"items[{place}] of map_reduce, on worker {calls.names[worker]}")
            raise calls.failure()
        if started < len(items):
            calls.start(worker, (items[started], *args), kwargs, tag=started)
            started += 1
        waiting[place] = result
        while count in waiting:
            following = waiting.pop(count)
            reduced = following if count == 0 else reduce(reduced, following)
            count += 1
    return reduced
