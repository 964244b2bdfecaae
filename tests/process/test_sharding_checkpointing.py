"""Layers that compute their activations again, within stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.utils.checkpoint import checkpoint

from tests.process import models as m
from tests.process.group import Group

mse = nn.functional.mse_loss


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4) as group:
        yield group


def shard(*args: Any, **kwargs: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.shard(*args, **kwargs)


def pipeline(model: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.Pipeline(model, 4, mse)


class Noisy(nn.Module):
    """Dropout in a layer that computes its activations again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.compute(x)
        made: torch.Tensor = checkpoint(self.compute, x, use_reentrant=self.reentrant)
        return made

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.dropout(self.linear(x)) + x
        return self.dropout(made)


def noisy(reentrant: bool) -> nn.Sequential:
    torch.manual_seed(3)
    first, last = nn.Linear(6, 6), nn.Linear(6, 3)
    return nn.Sequential(first, *[Noisy(reentrant) for _ in range(3)], last)


def check_reentrant() -> None:
    x, y = m.batch_of("mlp")
    local = noisy(reentrant=True).eval()
    model = shard(local, ["worker1", "worker2", "worker3"])
    expected = m.local_gradients(local, mse, x, y, 4)
    pipe = pipeline(model)
    # Without a context and within one.
    found = pipe.forward_backward(x, y)
    m.same((found, m.remote_grads(model)), expected)
    model.zero_grad()
    with dist_autograd.context() as context:
        found = pipe.forward_backward(x, y)
        m.same((found, m.gradients(model, context)), expected)
    assert m.remote_grads(model) == {}
    # Distributed autograd would not get the gradients, so the model says what to do.
    for mode in (False, True):
        model.train(mode)
        with dist_autograd.context(), pytest.raises(RuntimeError, match="use_reentrant=False"):
            model(x)
    again = noisy(reentrant=False).eval()
    model = shard(again, ["worker1", "worker2", "worker3"])
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [mse(model(x), y)])
        m.same(m.gradients(model, context), m.local_gradients(again, mse, x, y)[1])


def test_reentrant_checkpoints_within_stages(four: Group) -> None:
    four.run(check_reentrant)
