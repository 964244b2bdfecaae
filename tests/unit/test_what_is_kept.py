"""What torch_rpc_ext.aio holds of calls that are over: nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import torch

from torch_rpc_ext import aio
from torch_rpc_ext.aio import _batch


def test_an_answer_that_comes_after_its_loop_has_closed() -> None:
    future: Any = torch.futures.Future()
    answer = torch.ones(1)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def give_up(future: Any) -> None:
        aio.as_asyncio(future)
        loops.append(weakref.ref(asyncio.get_running_loop()))

    asyncio.run(give_up(future))
    future.set_result(answer)
    kept = weakref.ref(answer)
    del future, answer
    gc.collect()
    assert kept() is None
    assert loops[0]() is None


@aio.batched(max_size=1)
def double(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [2 * part for part in parts]


def test_a_batch_that_is_answered() -> None:
    batcher = _batch._Batcher(double)
    futures: list[Any] = []
    # The thread waits for the next call when it waits for the condition with nothing to answer.
    waits = threading.Event()
    wait = batcher._changed.wait

    def tell(timeout: float | None = None) -> bool:
        if futures and futures[0].done():
            waits.set()
        return wait(timeout)

    batcher._changed.wait = tell  # type: ignore[method-assign]
    argument = torch.ones(1)
    with batcher._changed:
        futures.append(batcher.add((argument,)))
    kept = [weakref.ref(argument), weakref.ref(futures[0].wait())]
    assert waits.wait(60)
    futures.clear()
    del argument
    gc.collect()
    assert [one() for one in kept] == [None, None]
