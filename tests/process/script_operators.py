"""TorchScript functions that ask a worker about itself with torch_rpc_ext.scripting.operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_rpc_ext.scripting import operators

from torch_rpc_ext import scripting


@scripting.script
def who() -> tuple[list[str], list[int], str, int]:
    return (
        operators.worker_names(),
        operators.worker_ids(),
        operators.own_name(),
        operators.own_id(),
    )


@scripting.script
def alive(worker: str) -> bool:
    return torch.ops.torch_rpc_ext.is_alive(worker)


@scripting.script
def numbers() -> dict[str, float]:
    return operators.metrics()


@scripting.script
def half(x: Tensor) -> Tensor:
    return x / 2


@scripting.script
def sent_by_a_call(worker: str) -> float:
    """How much a call adds to the counter of sent calls, which is read before and after the
    call."""
    before = operators.metrics()["agent.calls_sent"]
    half.sync(worker, torch.ones(1))
    return operators.metrics()["agent.calls_sent"] - before


def loaded() -> None:
    """A call of this function makes the callee import this module, with its TorchScript
    functions."""
