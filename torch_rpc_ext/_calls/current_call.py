"""current_call(): a remote function asks about the call that it serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from torch_rpc_ext._native import loader

# The call that an `async def` function (torch_rpc_ext.aio) serves. All of these functions share the
# event loop's thread, so the call belongs to the task and not to the thread.
of_task: ContextVar[CurrentCall | None] = ContextVar("torch_rpc_ext_call", default=None)


class CurrentCall:
    """A call that this worker serves; returned by current_call().

    ::

        def train(steps):
            call = torch_rpc_ext.current_call()
            print(f"for {call.caller}, which waits for {call.remaining} s")
            for step in range(steps):
                if call.cancelled:
                    return
                ...

    Thread Safety: any thread may ask, also after the function has returned.
    """

    __slots__ = ("_cancelled", "_native")

    def __init__(self, native: Any) -> None:
        self._native = native
        self._cancelled = False

    @property
    def caller(self) -> str:
        """Name of the calling worker, as that worker gave it when it connected.

        The calling worker has proved that it knows the group's secret, but not that this is its
        name.
        """
        return str(self._native.caller)

    @property
    def deadline(self) -> float | None:
        """When the caller stops waiting, s, on time.monotonic(); None where it waits for ever.

        Counted from the request's arrival here, because this worker does not know how long the
        request was on its way.
        """
        deadline: float | None = self._native.deadline
        return deadline

    @property
    def remaining(self) -> float | None:
        """For how long the caller still waits, s, at least 0; None where it waits for ever."""
        deadline = self.deadline
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more. Once True it stays True.

        True when the deadline has passed, when the caller has cancelled the call (of an `async
        def`), and when the connection to the caller has ended: because the caller died, left or
        cannot be reached, or because this worker shuts down.
        """
        return self._cancelled or bool(self._native.cancelled)

    def _cancel(self) -> None:
        self._cancelled = True

    def _when_lost(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Have `callback` run on another thread when the caller is lost; at once if it is lost.

        Returns:
            A function after which the callback is not run any more.
        """
        number = self._native.when_lost(callback)
        if number == 0:
            callback()
        return lambda: self._native.forget(number)

    def __repr__(self) -> str:
        return f"<call from {self.caller}{', cancelled' if self.cancelled else ''}>"


def current_call() -> CurrentCall:
    """Return the call that the running remote function serves.

    Python functions that other workers call by rpc_sync, rpc_async, remote and the methods of an
    RRef may use it, asynchronous ones (``rpc.functions.async_execution``,
    ``torch_rpc_ext.aio.remote``) too. A function under ``torch_rpc_ext.aio.batched`` may not,
    because it serves many calls at once. Where another thread or a callback goes on with the work,
    keep the returned object for it::

        def train(steps):
            call = torch_rpc_ext.current_call()
            for step in range(steps):
                if call.cancelled:
                    return
                ...

    Raises:
        RuntimeError: no remote function runs on this thread, or RPC does not run on UCX.
    """
    call = find()
    if call is None:
        raise RuntimeError(
            "current_call() was called where no remote function runs. Call it in a function that "
            "another worker calls over BackendType.UCX, on the thread that runs that function, "
            "and pass on what it returns."
        )
    return call


class Held(Protocol):
    """Counts a call among those that wait for their functions to begin, until it is released."""

    def release(self) -> None:
        """The function begins. Also done when nobody refers to this object any more."""


class _NotCounted:
    def release(self) -> None: ...


_NOT_COUNTED = _NotCounted()


def hold(call: CurrentCall | None) -> Held:
    """Count what this worker has received for a call whose function does not begin yet.

    Args:
        call: what find() has returned; None, as over another back end, for a call that does not
            count.

    Raises:
        OverloadedError: the calls that wait so take more memory than they may.
    """
    held: Held = _NOT_COUNTED if call is None else call._native.hold()
    return held


def find() -> CurrentCall | None:
    """Return the call as current_call() does, or None where no remote function runs."""
    call = of_task.get()
    if call is not None:
        return call
    native = loader.loaded()
    found = None if native is None else native.current_call()
    return None if found is None else CurrentCall(found)
