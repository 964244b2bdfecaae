"""The caller's autocast reaches the stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd

from tests.process import models as m
from tests.process.group import Group

THREE = ["worker1", "worker2", "worker3"]
mse = nn.functional.mse_loss


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4) as group:
        yield group


def shard(*args: Any, **kwargs: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.shard(*args, **kwargs)


def pipeline(model: Any, loss_fn: Any = mse, **options: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.Pipeline(model, 4, loss_fn, **options)


def float_mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse(output.float(), target)


def check_autocast(dtype: torch.dtype) -> None:
    local = m.mlp()
    model = shard(local, THREE)
    x, y = m.batch_of("mlp")
    pipe = pipeline(model, float_mse, reduction="mean")
    with torch.autocast("cpu", dtype):
        expected = local(x)
        assert expected.dtype == dtype
        m.same(model(x), expected.detach())
        m.same(pipe.forward(x), expected.detach())
        loss, found = m.local_gradients(local, float_mse, x, y, 4)
        m.same(pipe.forward_backward(x, y), loss)
        m.same(m.remote_grads(model), found)
        m.same(pipe.evaluate(x, y), loss)
        with torch.autocast("cpu", enabled=False):
            m.same(model(x), local(x).detach())
            assert model(x).dtype == torch.float32
    m.same(model(x), local(x).detach())
    # Also by distributed autograd.
    with torch.autocast("cpu", dtype), dist_autograd.context() as context:
        dist_autograd.backward(context, [float_mse(model(x), y)])
        m.same(m.gradients(model, context), m.local_gradients(local, float_mse, x, y)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_the_stages(four: Group, dtype: torch.dtype) -> None:
    four.run(check_autocast, dtype)


class State(nn.Module):
    """Tells under which autocast it runs."""

    def forward(self, seen: list[Any]) -> list[Any]:
        return [
            *seen,
            (
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
            ),
        ]


def check_all_of_it() -> None:
    model = shard(nn.Sequential(State(), State(), State()), THREE)

    def compare(*expected: Any) -> None:
        here = State()([])
        assert here == list(expected) and model([]) == here * 3

    compare((False, torch.bfloat16, True))
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        compare((True, torch.float16, False))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            compare((True, torch.bfloat16, True))
        compare((True, torch.float16, False))
        with torch.autocast("cpu", enabled=False):
            assert [enabled for enabled, *_ in model([])] == [False] * 3
    compare((False, torch.bfloat16, True))


def test_dtype_enabled_and_cache(four: Group) -> None:
    four.run(check_all_of_it)
