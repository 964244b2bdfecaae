"""The callee's side of `async def` functions: an event loop in a thread of its own.

The RPC threads only hand requests to the loop (rpc.functions.async_execution): a call that waits
occupies no RPC thread, so a cancellation does not queue behind such calls. A task is cancelled when
its caller says so, when the caller's time-out passes, and when the caller is lost. A function that
is no `async def` cannot be stopped; it can ask torch_rpc_ext.current_call().
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import rpc as _untyped_rpc
from torch.futures import Future

from torch_rpc_ext import errors
from torch_rpc_ext._calls import current_call
from torch_rpc_ext._calls.current_call import CurrentCall, Held
from torch_rpc_ext._calls.device_futures import HandedOver, new_future
from torch_rpc_ext._calls.event_loops import Mailbox
from torch_rpc_ext._upstream import thread_state
from torch_rpc_ext.aio._answers import answer, fail

rpc: Any = _untyped_rpc  # upstream's functions have no types

CallId = tuple[int, int]

# A cancellation may arrive before its call, because two RPC threads take them, so it is kept for
# the call. It may also arrive after the call's end and would be kept for ever, so only so many are
# kept, and the oldest are dropped.
_CANCELLATIONS_KEPT = 10_000


class CoroutineFunction:
    """Base of AsyncFunction; run() accepts no other class."""


class _Running(NamedTuple):
    """A call that runs.

    Attributes:
        task: runs the call.
        served: what current_call() returns in the function; None over another back end.
        undo: take back what would cancel the call: the deadline's timer, the watch for the
            caller's loss.
    """

    task: asyncio.Task[Any]
    served: CurrentCall | None
    undo: list[Callable[[], object]]


class _Host:
    """Runs coroutines for callers.

    Owns: the thread and its event loop. All methods but start() and cancel() run in the loop.
    Thread Safety: start() and cancel() from any thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(thread_state.task_factory)
        self._mailbox = Mailbox(self._loop)
        self._running: dict[CallId, _Running] = {}
        self._cancelled: OrderedDict[CallId, None] = OrderedDict()
        self._slots: dict[Any, asyncio.Semaphore] = {}
        self._calls: Counter[Any] = Counter()  # of each function: those that run or wait
        # A daemon thread, so that the process can end: rpc.shutdown() has waited for the calls.
        self.thread = threading.Thread(target=self._run, name="rpc-aio", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            # sys.exit() in a function ends run_forever(); the other calls go on with the next.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def start(self, function: Any, call: CallId, args: Any, kwargs: Any) -> Future[Any]:
        future, given = new_future(), HandedOver((args, kwargs))
        served = current_call.find()
        self._mailbox.post(partial(self._start, future, function, call, served, given))
        return future

    def cancel(self, call: CallId) -> None:
        self._mailbox.post(partial(self._cancel, call))

    def _start(
        self,
        future: Future[Any],
        function: Any,
        call: CallId,
        served: CurrentCall | None,
        given: HandedOver[tuple[Any, Any]],
    ) -> None:
        if call in self._cancelled:
            del self._cancelled[call]
            fail(future, _cancellation(function))
            return
        if served is not None and served.cancelled:
            fail(future, _cancellation(function))
            return
        if call in self._running:
            # A call's id has a random number, so no other call gets the same id by chance: a peer
            # that repeats an id means to cancel another caller's call.
            fail(future, ValueError(f"the call {call} of {function.__qualname__} runs already"))
            return
        try:
            body = self._body(function, served, *given.take())
            context = contextvars.copy_context()
            context.run(current_call.of_task.set, served)
            task = self._loop.create_task(body, context=context)
            self._running[call] = _Running(task, served, self._watch(call, served))
            self._calls[function] += 1
            task.add_done_callback(partial(self._finish, future, function, call))
        except Exception as error:  # noqa: BLE001  the arguments do not fit the function, say
            fail(future, error)

    def _watch(self, call: CallId, served: CurrentCall | None) -> list[Callable[[], object]]:
        """Have the call cancelled when its caller gives up; return the functions that undo this."""
        if served is None:
            return []
        give_up = partial(self._give_up, call)
        undo: list[Callable[[], object]] = [
            served._when_lost(partial(self._mailbox.post, give_up)),
        ]
        remaining = served.remaining
        if remaining is not None:
            undo.append(self._loop.call_later(remaining, give_up).cancel)
        return undo

    def _body(self, function: Any, served: CurrentCall | None, args: Any, kwargs: Any) -> Any:
        if function.limit is None:
            return function.function(*args, **kwargs)
        waits = self._calls[function] >= function.limit
        held = current_call.hold(served if waits else None)
        slots = self._slots.get(function)
        if slots is None:
            slots = self._slots[function] = asyncio.Semaphore(function.limit)
        return _in_turn(slots, function, held, args, kwargs)

    def _finish(
        self, future: Future[Any], function: Any, call: CallId, task: asyncio.Task[Any]
    ) -> None:
        self._calls[function] -= 1
        try:
            for undo in self._running.pop(call).undo:
                undo()
            error = _cancellation(function) if task.cancelled() else task.exception()
        except Exception as problem:  # noqa: BLE001  the caller waits for an answer in any case
            error = problem
        if error is None:
            answer(future, task.result())
        else:
            fail(future, error)

    def _give_up(self, call: CallId) -> bool:
        """Cancel a call that runs; return whether there was one."""
        running = self._running.get(call)
        if running is None:
            return False
        if running.served is not None:
            running.served._cancel()
        running.task.cancel()
        return True

    def _cancel(self, call: CallId) -> None:
        if self._give_up(call):
            return
        self._cancelled[call] = None
        if len(self._cancelled) > _CANCELLATIONS_KEPT:
            self._cancelled.popitem(last=False)


async def _in_turn(
    slots: asyncio.Semaphore, function: Any, held: Held, args: Any, kwargs: Any
) -> Any:
    async with slots:
        held.release()
        return await function.function(*args, **kwargs)


def _cancellation(function: Any) -> Exception:
    worker = rpc.get_worker_info().name
    return errors.RpcError(f"{function.__qualname__} was cancelled on {worker}", worker=worker)


_lock = threading.Lock()
_host: _Host | None = None


def _running_host() -> _Host:
    global _host
    with _lock:
        # After a fork the child has the object but not its thread.
        if _host is None or not _host.thread.is_alive():
            _host = _Host()
        return _host


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def run(function: Any, call: CallId, args: Any, kwargs: Any) -> Future[Any]:
    """Run an AsyncFunction for a caller; called remotely.

    Args:
        function: the AsyncFunction.
        call: names the call, for cancel().
        args: the function's arguments.
        kwargs: the function's keyword arguments.

    Returns:
        A future of what the function returns; of an OverloadedError if the call would have to wait
        for the function's limit, and the calls that wait take too much memory already.

    Raises:
        TypeError: `function` is no AsyncFunction.
    """
    if not isinstance(function, CoroutineFunction):
        raise TypeError(f"not an async remote function: {function!r}")
    return _running_host().start(function, call, args, kwargs)


def cancel(call: CallId) -> None:
    """Cancel a call, also one whose run() has not arrived yet; called remotely."""
    _running_host().cancel(call)
