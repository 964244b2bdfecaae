"""Functions of torch_rpc_ext.aio and scripting that are called on the callee, and their plain
counterparts. Callers import this module; callees import it when they look up a function's name."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from torch_rpc_ext import aio, scripting

WIDTH = 1024


@aio.remote
async def nap(seconds: float) -> None:
    """Wait, with thousands of others."""
    await asyncio.sleep(seconds)


_WEIGHTS = [torch.full((WIDTH, WIDTH), 1.0 / WIDTH) for _ in range(2)]


def _model(inputs: Tensor) -> Tensor:
    for weight in _WEIGHTS:
        inputs = torch.relu(inputs @ weight)
    return inputs


@aio.batched(max_size=64, max_wait=0.002, max_queue=100_000)
def predict_many(inputs: list[Tensor]) -> Tensor:
    """Two layers of a network, for many inputs at once."""
    return _model(torch.stack(inputs))


@scripting.remote
def predict_one(inputs: Tensor) -> Tensor:
    """Two layers of a network."""
    return _model(inputs)


def _count(x: Tensor, steps: int) -> Tensor:
    """A loop that Python is slow at."""
    total = 0
    for step in range(steps):
        total += step % 7
    return x + total


def count_plain(x: Tensor, steps: int) -> Tensor:
    """Count, in Python."""
    return _count(x, steps)


count_script = scripting.script(_count)


def ready() -> None:
    """Do nothing: a call of this makes the callee import the module, and so define count_script."""
