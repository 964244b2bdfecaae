"""The state that torch keeps for each thread: grad mode, autocast, the default device and more.

For threads of Python that run the code of several calls, in turns: what the code of one call sets
does not reach the others. csrc/agent/thread_state.cpp does the same for the threads of the pool.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_rpc_ext._native import loader

# For each thread: the device that torch.set_default_device() has set in that thread.
default_device: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", threading.local())


class State(NamedTuple):
    """What take() has taken from a thread.

    Attributes:
        native: what C++ keeps; None where that is the state of a new thread.
        device: what torch.set_default_device() keeps.
    """

    native: Any
    device: Any


def take() -> State | None:
    """Give this thread the state of a new one.

    Returns:
        The state that the thread had, for give_back(). None where that was the state of a new
        thread, and in a process that does not use BackendType.UCX, where states stay as they are.
    """
    module = loader.loaded()
    if module is None:
        return None
    native = module.take_thread_state()
    # Not getattr() with a default, which would format the text of an AttributeError for nothing.
    device = default_device.__dict__.get("device_context")
    if device is not None:
        default_device.device_context = None
    return None if native is None and device is None else State(native, device)


def give_back(state: State) -> None:
    """Give this thread a state that take() has returned."""
    if state.native is not None:
        state.native.give_back()
    default_device.device_context = state.device


def task_factory(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    /,
    **options: Any,
) -> asyncio.Task[Any]:
    """Make a task whose thread state is its own; for loop.set_task_factory().

    The task begins with the state of a new thread. What it sets stays as long as the task lives,
    also over an `await`, and is hidden from the other tasks of the loop.
    """
    if not asyncio.iscoroutine(coroutine):
        return asyncio.Task(coroutine, loop=loop, **options)  # raises
    stepped = _with_own_state(coroutine)
    for name in ("__name__", "__qualname__"):  # which asyncio shows
        setattr(stepped, name, getattr(coroutine, name, type(coroutine).__name__))
    task = asyncio.Task(stepped, loop=loop, **options)
    # A task that is cancelled before its first step never begins the coroutine.
    task.add_done_callback(lambda _: coroutine.close())
    return task


async def _with_own_state(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await _Steps(coroutine)


class _Steps:
    """Awaits a coroutine, and keeps its thread state between its steps."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._state: State | None = None

    def __await__(self) -> Generator[Any, Any, Any]:
        # The next step, in a list: a variable would still hold the error of a step that throws it,
        # and the error's traceback holds this frame.
        steps: list[Callable[[], Any]] = [partial(self._coroutine.send, None)]
        while True:
            try:
                awaited = self._run(steps.pop())
            except StopIteration as end:
                return end.value
            try:
                steps.append(partial(self._coroutine.send, (yield awaited)))
            except GeneratorExit:
                self._run(self._coroutine.close)
                raise
            except BaseException as error:  # noqa: BLE001  a cancellation, for example
                steps.append(partial(self._coroutine.throw, error))

    def _run(self, step: Callable[[], Any]) -> Any:
        # A task that nobody holds any more ends within other code, on any thread, whose state it
        # must not change.
        outside = take()
        if self._state is not None:
            give_back(self._state)
        try:
            return step()
        finally:
            # An error that is thrown refers to this frame, and the step refers to the error.
            del step
            self._state = take()
            if outside is not None:
                give_back(outside)
