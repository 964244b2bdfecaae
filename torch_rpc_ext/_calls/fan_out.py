"""The same call to several workers: large tensors are copied once for all receivers of this host,
and sent once to every other host, where one of the receivers passes them on.

rpc_async_all() is public; gather() and broadcast() of torch_rpc_ext.scripting use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import autograd as _untyped_autograd
from torch.distributed import rpc as _untyped_rpc
from torch.futures import Future

from torch_rpc_ext import errors
from torch_rpc_ext._base.call_checks import arguments, require_call_timeout, require_workers
from torch_rpc_ext._base.failed_result import as_exception
from torch_rpc_ext._base.option_checks import UNSET_RPC_TIMEOUT
from torch_rpc_ext._calls import wire_dtype
from torch_rpc_ext._calls.device_futures import new_future
from torch_rpc_ext._calls.failed_futures import fail
from torch_rpc_ext._native import loader
from torch_rpc_ext._upstream import exceptions

# Upstream's functions have no types.
dist_autograd: Any = _untyped_autograd
rpc: Any = _untyped_rpc

# Smaller tensors are sent to each worker directly, because to pass a call on adds the delay of a
# second call.
_LEAST_BYTES = 1 << 20
# The caller waits this much longer for the worker that passes a call on than that worker waits for
# the others, s: the answer of that worker says which of the others was late.
_SLACK = 1.0

_host_of: Callable[[str], str] = lambda name: ""  # noqa: E731
_dtype_of: Callable[[str], Any] = lambda name: None  # noqa: E731
_uses_maps: Callable[[str], bool] = lambda name: False  # noqa: E731


def know_workers(
    host_of: Callable[[str], str],
    dtype_of: Callable[[str], Any],
    uses_maps: Callable[[str], bool],
) -> None:
    """Set what knows the other workers.

    Args:
        host_of: name -> host of the worker, '' where that is not known.
        dtype_of: name -> dtype that the option wire_dtype of this worker has for that worker.
        uses_maps: name -> whether this worker has a device map for that worker, or that worker has
            one for whomever.
    """
    global _host_of, _dtype_of, _uses_maps
    _host_of, _dtype_of, _uses_maps = host_of, dtype_of, uses_maps


@contextlib.contextmanager
def one_copy(common: Any = None, only: Any = None) -> Iterator[Any]:
    """Let the calls that this thread begins in the block share the copies of their tensors.

    All calls send the value that a tensor had at the first call. The tensors must not be written to
    before the last of these blocks has ended.

    Args:
        common: what the block of earlier calls gave, to share their copies too.
        only: a value of tuples, lists and dictionaries: only copies of its tensors are shared. By
            default the copies of all tensors are.
    """
    if type(rpc.api._get_current_rpc_agent()).__name__ != "UcxAgent":
        yield None  # another back end
        return
    native = loader.load()
    if common is None:
        common = native.OneCopy(None if only is None else list(_tensors(only)))
    before = common.enter()
    try:
        yield common
    finally:
        common.leave(before)


def rpc_async_all(
    to: Sequence[Any],
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Future[Any]]:
    """Call a function on several workers at once, with the same arguments.

    ::

        weights = model.state_dict()
        actors = ["worker1", "worker2", "worker3"]
        for done in torch_rpc_ext.rpc_async_all(actors, load_weights, args=(weights,)):
            done.wait()

    Each call is one of rpc_async(); what differs is how its tensors travel. On this host they are
    copied once, and each receiver maps the copy: it may write to its tensors, and sees only its
    own writes. To each other host they are sent once, if two or more of the workers are there and
    the tensors have 1 MiB or more: the first of these workers passes the call on to the others.
    Then the calls to that host end together, current_call().caller is that worker's name, and with
    an allow_list that worker must allow `torch_rpc_ext._calls.fan_out.pass_on`; where it does not,
    each worker is called by itself. So is every worker within a distributed autograd context, a
    worker that has device maps, and a worker for which the options have a device map. On TENSORPIPE
    each call sends its own copy.

    The tensors must not be written to before the calls have ended.

    Args:
        to: names, ranks or WorkerInfos; a worker that is listed twice is called twice.
        func: what rpc.rpc_async() takes.
        args: the function's arguments.
        kwargs: the function's keyword arguments.
        timeout: of each call, s; 0 for none, -1 for the options' rpc_timeout.

    Returns:
        A future for each worker, in the order of `to`.

    Raises:
        ValueError: `to` is no list, or the time-out is negative or NaN.
        TypeError: `args` is one argument, not a tuple of the arguments, or the time-out is no
            number.
        Exception: what rpc.rpc_async() raises: a worker is not in the group, for example.
    """
    require_workers("rpc_async_all", to, least=0)
    require_call_timeout(timeout)
    calls = begin_all(to, func, arguments(args), dict(kwargs or {}), timeout)
    futures = []
    for call in calls:
        if isinstance(call, Exception):
            raise call
        futures.append(call)
    return futures


def begin_all(
    to: Sequence[Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
) -> list[Future[Any] | Exception]:
    """Begin the calls of rpc_async_all(); return an exception in place of each call that could not
    begin."""
    begun: dict[int, Future[Any] | Exception] = {}
    names: dict[int, str] = {}
    for at, worker in enumerate(to):
        try:
            names[at] = name_of(worker)
        except Exception as error:  # noqa: BLE001  upstream's, for a worker that is not in the group
            begun[at] = error
    size = sum(one.numel() * one.element_size() for one in _tensors((args, kwargs)))
    # A refused call would stay in the graph of an autograd context, and the calls that take its
    # place begin in a thread that is outside of the context.
    if size >= _LEAST_BYTES and not _in_autograd_context():
        for places in _elsewhere(names):
            call = _PassedOn([names[at] for at in places], func, args, kwargs, timeout)
            begun.update(zip(places, call.start(), strict=True))
    with one_copy():
        for at, name in names.items():
            if at not in begun:
                begun[at] = _begin(name, func, args, kwargs, timeout)
    return [begun[at] for at in range(len(to))]


def name_of(worker: Any) -> str:
    """Return the name of a worker that a name, a rank or a WorkerInfo names.

    Raises:
        Exception: upstream's, for a worker that is not in the group.
    """
    return str(rpc.api._to_worker_info(worker).name)


def _begin(
    name: str, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float
) -> Future[Any] | Exception:
    try:
        future: Future[Any] = rpc.rpc_async(name, func, args, kwargs, timeout)
    except Exception as error:  # noqa: BLE001  the other calls go on
        return error
    return future


def _in_autograd_context() -> bool:
    try:
        dist_autograd._current_context()
    except RuntimeError:
        return False
    return True


def _elsewhere(names: Mapping[int, str]) -> list[list[int]]:
    """Return the places of the calls to each other host that has two of the workers or more, which
    get float32 tensors as the same dtype. Not of calls in which device maps may count: a worker
    that passes a call on uses its own."""
    here = _host_of(rpc.get_worker_info().name)
    together: dict[tuple[str, Any], list[int]] = {}
    for at, name in names.items():
        host = _host_of(name)
        if host and host != here and not _uses_maps(name):
            together.setdefault((host, _dtype_of(name)), []).append(at)
    return [places for places in together.values() if len({names[at] for at in places}) > 1]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain CPU tensors in a value of tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


class _PassedOn:
    """A call to workers of another host, of which the first passes it on.

    Args:
        names: of the workers.
        func, args, kwargs, timeout: as in rpc_async_all().
    """

    def __init__(
        self,
        names: Sequence[str],
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> None:
        self.names, self.func, self.args, self.kwargs = names, func, args, kwargs
        self.timeout = timeout
        self.dtype = wire_dtype.of_block()
        self.futures: list[Future[Any]] = [new_future() for _ in names]

    def start(self) -> list[Future[Any]]:
        """Begin the call; return a future for each worker."""
        inner = rpc.get_rpc_timeout() if self.timeout == UNSET_RPC_TIMEOUT else self.timeout
        outer = inner + _SLACK if inner > 0 else 0.0
        call = (self.names, self.func, self.args, self.kwargs, inner)
        begun = _begin(self.names[0], pass_on, call, {}, outer)
        if isinstance(begun, Exception):
            self._call_each()
        else:
            begun.add_done_callback(self._answered)
        return self.futures

    def _answered(self, done: Future[Any]) -> None:
        try:
            outcomes: list[tuple[bool, Any]] = done.wait()
            if len(outcomes) != len(self.names):
                raise RuntimeError(f"{len(outcomes)} answers to {len(self.names)} calls")
        except BaseException as raised:  # noqa: BLE001  the outcome of all these calls
            error = as_exception(raised)
            if isinstance(error, errors.RefusedError) and error.worker == self.names[0]:
                # That worker does not pass calls on, so no worker has begun the call. A refusal by
                # this worker is about the answer: the workers have run the function.
                self._call_each()
                return
            error.add_note(f"The calls went to their host by way of worker {self.names[0]!r}.")
            for future in self.futures:
                fail(future, error)
            return
        for future, outcome in zip(self.futures, outcomes, strict=True):
            _take(future, outcome)

    def _call_each(self) -> None:
        for future, name in zip(self.futures, self.names, strict=True):
            with wire_dtype.as_in_block(self.dtype):  # this may be another thread
                call = _begin(name, self.func, self.args, self.kwargs, self.timeout)
            if isinstance(call, Exception):
                fail(future, call)
            else:
                call.add_done_callback(partial(_copy_end, future))


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def pass_on(
    names: Sequence[str],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
) -> Future[list[tuple[bool, Any]]]:
    """Call a function on workers of this host; runs on one of them.

    Returns:
        For each worker (True, the result), or (False, what exceptions.passed_on() makes of the
        error that the call raised). The parts of the error are pickled one by one: where the
        caller's allow-list refuses a part, the caller still reads the other outcomes.
    """
    # The tensors have the numbers that their caller wants the others to get.
    with one_copy(), wire_dtype.wire_dtype(None):
        calls = [_begin(name, func, args, kwargs, timeout) for name in names]
    outcomes = [
        _failed(call) if isinstance(call, Exception) else call.then(_outcome) for call in calls
    ]
    # collect_all() ends with the first error, so each of these has its outcome as its value.
    pending = [outcome for outcome in outcomes if not isinstance(outcome, tuple)]
    together: Future[list[tuple[bool, Any]]] = torch.futures.collect_all(pending).then(
        lambda _: [
            outcome if isinstance(outcome, tuple) else outcome.value() for outcome in outcomes
        ]
    )
    return together


def _outcome(done: Future[Any]) -> tuple[bool, Any]:
    """Return the outcome of a call as pass_on() sends it."""
    try:
        return True, done.wait()
    except Exception as error:  # noqa: BLE001  the function may raise anything
        return _failed(error)


def _failed(error: Exception) -> tuple[bool, Any]:
    try:
        return False, exceptions.passed_on(error)
    except Exception:  # noqa: BLE001  a class of a user may raise anything where it is looked at
        return False, exceptions.passed_on(RuntimeError(type(error).__name__))


def _take(future: Future[Any], outcome: tuple[bool, Any]) -> None:
    """Complete a future by what pass_on() has sent."""
    try:
        succeeded, value = outcome
        if not succeeded:
            value = exceptions.built(value)
    except BaseException as error:  # noqa: BLE001  another worker has sent it
        succeeded, value = False, as_exception(error)
    if succeeded:
        future.set_result(value)
    else:
        fail(future, value)


def _copy_end(future: Future[Any], done: Future[Any]) -> None:
    try:
        result = done.wait()
    except BaseException as error:  # noqa: BLE001  the function may raise anything
        fail(future, as_exception(error))
    else:
        future.set_result(result)
