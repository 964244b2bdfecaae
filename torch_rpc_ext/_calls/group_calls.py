"""Calls to several workers: gather, broadcast, first_of, map_reduce.

`function` is a function that rpc.rpc_async() takes, or an object with RemoteFunction's method
async_(). All calls begin in the caller's thread, so they belong to the caller's distributed
autograd context.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from torch.distributed import rpc as _untyped_rpc
from torch.futures import Future

from torch_rpc_ext import errors
from torch_rpc_ext._base.call_checks import (
    arguments,
    require_call_timeout,
    require_items,
    require_workers,
)
from torch_rpc_ext._base.option_checks import UNSET_RPC_TIMEOUT
from torch_rpc_ext._calls import fan_out

if TYPE_CHECKING:
    from torch.distributed.rpc import WorkerInfo

    To = str | int | WorkerInfo  # a worker: its name, its rank, or what get_worker_info() returns

rpc: Any = _untyped_rpc  # upstream's functions have no types

T = TypeVar("T")


class Remote(Protocol[T]):
    """A remote function of this package: a RemoteFunction or a ScriptRemoteFunction."""

    def async_(self, to: To, /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call the function on a worker; return a future of what the function returns."""


class GroupError(errors.RpcError):
    """Some or all of the calls to several workers failed.

    ::

        try:
            scripting.gather(["worker1", "worker2"], torch.add, args=(x, 1))
        except scripting.GroupError as error:
            for name, reason in error.errors.items():
                print(name, reason)
            print("answered:", error.results)

    Args:
        message: what was called, and which worker failed with what.
        errors: name of a worker that failed -> what the call raised.
        results: name of another worker -> what the call returned; empty where calls were made by
            first_of(), or by map_reduce(), which reduces the results as they come.

    Pickled, or raised by a remote function, the error keeps its text and `worker`.

    Attributes:
        worker: the name of the worker that failed, None where several failed.
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
        # The errors and results are not pickled, because pickle may refuse them.
        return type(self), (str(self),), {"worker": self.worker}


class _Calls:
    """The calls of one group call that are under way.

    Thread Safety: one thread uses the object; other threads put answers into its queue.
    """

    def __init__(self, what: str, function: Any, workers: Sequence[To], timeout: float) -> None:
        require_workers(what, workers)
        require_call_timeout(timeout)
        self.what, self.function, self.timeout = what, function, timeout
        # A set or the keys of a dictionary have no indices.
        self.workers = list(workers)
        self.names = [_name(worker) for worker in self.workers]
        self.errors: dict[str, BaseException] = {}
        self.results: dict[str, Any] = {}
        self._done: queue.SimpleQueue[tuple[int, Any, Future[Any] | Exception]] = (
            queue.SimpleQueue()
        )

    def start_all(
        self, args: tuple[object, ...], kwargs: Mapping[str, object] | None, *, apart: bool
    ) -> None:
        """Call all workers; their tensors are copied once for all of this host.

        Args:
            args: the function's arguments.
            kwargs: the function's keyword arguments.
            apart: call each worker of another host directly, so that each call ends by itself.
        """
        if apart or hasattr(self.function, "async_"):
            with fan_out.one_copy():
                for worker in range(len(self.workers)):
                    self.start(worker, args, kwargs)
            return
        calls = fan_out.begin_all(
            self.workers, self.function, args, dict(kwargs or {}), self.timeout
        )
        for worker, call in enumerate(calls):
            self._begun(worker, None, call)

    def start(
        self,
        worker: int,
        args: tuple[object, ...],
        kwargs: Mapping[str, object] | None,
        tag: Any = None,
    ) -> None:
        """Call a worker; next() returns `tag` with its answer.

        Args:
            worker: index into `workers`.
            args: the function's arguments.
            kwargs: the function's keyword arguments.
            tag: any value.
        """
        to, kwargs = self.workers[worker], dict(kwargs or {})
        try:
            if hasattr(self.function, "async_"):
                future = self.function.async_(to, *args, rpc_timeout=self.timeout, **kwargs)
            else:
                future = rpc.rpc_async(to, self.function, args, kwargs, self.timeout)
        except Exception as error:  # noqa: BLE001  the other calls go on
            self._begun(worker, tag, error)
        else:
            self._begun(worker, tag, future)

    def _begun(self, worker: int, tag: Any, call: Future[Any] | Exception) -> None:
        if isinstance(call, Exception):
            # The call could not begin: the worker is not in the group, for example.
            self._done.put((worker, tag, call))
        else:
            call.add_done_callback(lambda done: self._done.put((worker, tag, done)))

    def next(self) -> tuple[int, Any, Any, Exception | None]:
        """Wait for an answer; return (index of the worker, tag, result, error)."""
        worker, tag, answer = self._done.get()
        try:
            if isinstance(answer, Exception):
                raise answer
            return worker, tag, answer.wait(), None
        except Exception as error:  # noqa: BLE001  the function may raise anything
            self.errors.setdefault(self.names[worker], error)
            return worker, tag, None, error

    def failure(self) -> GroupError:
        """Return the error for the calls that have failed until now."""
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


def _name(worker: To) -> str:
    try:
        return fan_out.name_of(worker)
    except Exception:  # noqa: BLE001  the call will fail by the same error
        name = getattr(worker, "name", None)  # a tensor has the attribute, which is None
        return str(worker if name is None else name)


def _in_short(error: BaseException) -> str:
    """Return one line that says what an error is; its text may be a remote traceback."""
    # Not str(error), because str() of a KeyError is the repr() of its text.
    whole = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    # TENSORPIPE adds a traceback of this process behind "At:".
    lines = whole.split("\n\nAt:\n")[0].strip().splitlines() or [""]
    return lines[-1] if "Traceback" in whole else f"{type(error).__name__}: {lines[0]}"


@overload
def gather(
    workers: Sequence[To],
    function: Remote[T],
    args: Sequence[object] = ...,
    kwargs: Mapping[str, object] | None = ...,
    timeout: float = ...,
) -> list[T]: ...


@overload
def gather(
    workers: Sequence[To],
    function: Callable[..., T],
    args: Sequence[object] = ...,
    kwargs: Mapping[str, object] | None = ...,
    timeout: float = ...,
) -> list[T]: ...


def gather(
    workers: Sequence[To],
    function: Any,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Any]:
    """Call a function on all workers at once, with the same arguments.

    ::

        scripting.gather(["worker1", "worker2"], torch.add, args=(x, 1), timeout=10)

    Args:
        workers: names, ranks or WorkerInfos.
        function: what rpc.rpc_async() takes, or a remote function of this package.
        args: the function's arguments.
        kwargs: the function's keyword arguments.
        timeout: of each call, s; 0 for none, -1 for the options' rpc_timeout.

    Returns:
        What the function returned on each worker, in the order of `workers`.

    Raises:
        GroupError: some calls failed. Raised when all calls have ended; names the workers that
            failed and holds the results of the others.
        ValueError: no workers, or a time-out that is negative or NaN.
        TypeError: `args` is one argument, not a tuple of the arguments, or the time-out is no
            number.
    """
    calls = _Calls("gather", function, workers, timeout)
    calls.start_all(arguments(args), kwargs, apart=False)
    results: list[Any] = [None] * len(calls.workers)
    for _ in calls.workers:
        worker, _tag, result, error = calls.next()
        if error is None:
            results[worker] = calls.results[calls.names[worker]] = result
    if calls.errors:
        raise calls.failure()
    return results


def broadcast(
    workers: Sequence[To],
    function: Any,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> None:
    """Call a function on all workers at once, as gather() does, and wait until all have run it.

    For functions that are called for what they do: their results come back and are dropped.
    """
    gather(workers, function, args, kwargs, timeout)


@overload
def first_of(
    workers: Sequence[To],
    function: Remote[T],
    args: Sequence[object] = ...,
    kwargs: Mapping[str, object] | None = ...,
    timeout: float = ...,
) -> T: ...


@overload
def first_of(
    workers: Sequence[To],
    function: Callable[..., T],
    args: Sequence[object] = ...,
    kwargs: Mapping[str, object] | None = ...,
    timeout: float = ...,
) -> T: ...


def first_of(
    workers: Sequence[To],
    function: Any,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function on all workers at once, as gather() does, and return the first result.

    Later answers are dropped; the function still runs to its end on all workers.

    Raises:
        GroupError: all calls failed.
        ValueError: no workers, or a time-out that is negative or NaN.
        TypeError: `args` is one argument, not a tuple of the arguments, or the time-out is no
            number.
    """
    calls = _Calls("first_of", function, workers, timeout)
    calls.start_all(arguments(args), kwargs, apart=True)
    for _ in calls.workers:
        _worker, _tag, result, error = calls.next()
        if error is None:
            return result
    raise calls.failure()


@overload
def map_reduce(
    workers: Sequence[To],
    function: Remote[T],
    items: Sequence[object],
    reduce: Callable[[T, T], T],
    args: Sequence[object] = ...,
    kwargs: Mapping[str, object] | None = ...,
    timeout: float = ...,
) -> T: ...


@overload
def map_reduce(
    workers: Sequence[To],
    function: Callable[..., T],
    items: Sequence[object],
    reduce: Callable[[T, T], T],
    args: Sequence[object] = ...,
    kwargs: Mapping[str, object] | None = ...,
    timeout: float = ...,
) -> T: ...


def map_reduce(
    workers: Sequence[To],
    function: Any,
    items: Sequence[object],
    reduce: Callable[[Any, Any], Any],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function with each item, on whichever worker is free, and reduce the results to one.

    Each worker has one call at a time, and gets its next call when it has answered.

    Args:
        workers: names, ranks or WorkerInfos. A worker that is listed twice gets two calls at a
            time.
        function: called with an item and `args`.
        items: one or more, in a list or whatever else has a length and takes an index.
        reduce: makes one result of two. It runs in this process, in the order of the items
            whichever result came first: reduce(reduce(first, second), third) and so on.
        args: the function's further arguments.
        kwargs: the function's keyword arguments.
        timeout: of each call, s; 0 for none, -1 for the options' rpc_timeout.

    Returns:
        The reduced result; with one item, the result of its call.

    Raises:
        GroupError: a call failed; no further calls were started.
        ValueError: no workers, no items, or a time-out that is negative or NaN.
        TypeError: `items` is no list, `args` is one argument, not a tuple of the arguments, or the
            time-out is no number.
    """
    calls = _Calls("map_reduce", function, workers, timeout)
    require_items("map_reduce", items)
    given = arguments(args)
    started = min(len(calls.workers), len(items))
    # All calls share the copies of `args`; an item that is sent once takes a copy of its own.
    with fan_out.one_copy(only=(given, dict(kwargs or {}))) as common:
        for place in range(started):
            calls.start(place, (items[place], *given), kwargs, tag=place)
    waiting: dict[int, Any] = {}
    reduced, count = None, 0
    while count < len(items):
        worker, place, result, error = calls.next()
        if error is not None:
            error.add_note(f"items[{place}] of map_reduce, on worker {calls.names[worker]}")
            raise calls.failure()
        if started < len(items):
            with fan_out.one_copy(common):
                calls.start(worker, (items[started], *given), kwargs, tag=started)
            started += 1
        waiting[place] = result
        while count in waiting:
            following = waiting.pop(count)
            reduced = following if count == 0 else reduce(reduced, following)
            count += 1
    return reduced
