"""Tasks whose thread state is their own (_upstream/thread_state.py)."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from torch_rpc_ext._native import loader
from torch_rpc_ext._upstream import thread_state

loader.load()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    made.set_task_factory(thread_state.task_factory)
    yield made
    made.close()


def run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return loop.run_until_complete(coroutine)


def test_a_task_finds_its_state_after_an_await(loop: asyncio.AbstractEventLoop) -> None:
    async def in_inference_mode() -> tuple[bool, bool]:
        with torch.inference_mode():
            await asyncio.sleep(0.01)
            return torch.is_inference_mode_enabled(), torch.ones(1).is_inference()

    async def beside() -> list[bool]:
        seen = []
        for _ in range(20):
            seen.append(torch.is_inference_mode_enabled())
            await asyncio.sleep(0.001)
        return seen

    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(in_inference_mode(), beside())

    inside, others = run(loop, both())
    assert inside == (True, True)
    assert not any(others)


def test_autocast_over_an_await_does_not_keep_old_weights(loop: asyncio.AbstractEventLoop) -> None:
    async def train() -> list[float]:
        weight = torch.ones(1, 1, requires_grad=True)
        seen = []
        for awaits in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if awaits:
                    await asyncio.sleep(0)
                seen.append(torch.mm(torch.ones(1, 1), weight).item())
            with torch.no_grad():
                weight.mul_(10)
        return seen

    assert run(loop, train()) == [1.0, 10.0]


def test_autocasts_cache_stays_off_over_an_await(loop: asyncio.AbstractEventLoop) -> None:
    async def uncached() -> bool:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            await asyncio.sleep(0)
            return torch.is_autocast_cache_enabled()

    assert run(loop, uncached()) is False


def test_a_task_that_is_collected_leaves_the_thread_its_state(
    loop: asyncio.AbstractEventLoop, capfd: pytest.CaptureFixture[str]
) -> None:
    async def never_ends() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            await loop.create_future()

    async def begin() -> weakref.ref[Any]:
        task = asyncio.create_task(never_ends())
        await asyncio.sleep(0)
        return weakref.ref(task)

    task = run(loop, begin())
    loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending!"
    with torch.no_grad(), torch.device("meta"):
        gc.collect()
        assert task() is None
        assert not torch.is_grad_enabled()
        assert torch.empty(1).is_meta
    assert "ignored" not in capfd.readouterr().err


class Kept:
    """What a coroutine has in a local variable."""


def cancelled(coroutine: Callable[[], Coroutine[Any, Any, Any]], steps: int) -> Any:
    async def run_and_cancel() -> None:
        task = asyncio.create_task(coroutine())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return run_and_cancel()


def test_a_cancelled_task_keeps_no_frames(loop: asyncio.AbstractEventLoop) -> None:
    kept: list[weakref.ref[Kept]] = []

    async def waits() -> None:
        local = Kept()
        kept.append(weakref.ref(local))
        await asyncio.sleep(60)

    gc.collect()
    gc.disable()
    try:
        run(loop, cancelled(waits, steps=1))
        run(loop, asyncio.sleep(0))
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_task_that_is_cancelled_before_it_begins_warns_of_nothing(
    loop: asyncio.AbstractEventLoop,
) -> None:
    async def never_begins() -> None:
        raise AssertionError("it began")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(loop, cancelled(never_begins, steps=0))
        gc.collect()


def test_errors_and_results_pass(loop: asyncio.AbstractEventLoop) -> None:
    async def raises() -> None:
        await asyncio.sleep(0)
        raise ValueError("by the task")

    async def survives_a_cancellation() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "survived"

    async def all_of_them() -> None:
        with pytest.raises(ValueError, match="by the task"):
            await asyncio.create_task(raises())
        task = asyncio.create_task(survives_a_cancellation())
        assert "survives_a_cancellation" in repr(task)
        await asyncio.sleep(0)
        task.cancel()
        assert await task == "survived"

    run(loop, all_of_them())
