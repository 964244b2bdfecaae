"""The caller's autocast reaches the stages, and a GradScaler's scale the losses there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd

from tests.process import models as m
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

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


def check_scaler() -> None:
    """The scale, the steps and the skipped steps are those of torch's scaler and the local
    model."""
    from torch_rpc_ext import sharding

    local = m.mlp()
    model = shard(local, THREE)
    x, y = m.batch_of("mlp")
    pipe = pipeline(model)
    optimizers = (
        sharding.ShardedOptimizer(torch.optim.AdamW, model, lr=0.01),
        torch.optim.AdamW(local.parameters(), lr=0.01),
    )
    options: Any = {"init_scale": 2.0**127, "growth_interval": 2}
    scalers = sharding.ShardedGradScaler(**options), torch.amp.GradScaler("cpu", **options)
    skipped = 0
    for step in range(8):
        before = dict(model.state_dict())
        optimizers[0].zero_grad()
        loss = pipe.forward_backward(x * 1e3, y, scaler=scalers[0])
        m.same(loss, local_backward(local, x * 1e3, y, scalers[1]))
        norms = []
        for scaler, optimizer, params in zip(
            scalers, optimizers, (None, local.parameters()), strict=True
        ):
            if step % 2:  # unscale_() is optional
                scaler.unscale_(optimizer)
                clip = model.clip_grad_norm_ if params is None else None
                norms.append(clip(1.0) if clip else nn.utils.clip_grad_norm_(params or [], 1.0))
            scaler.step(optimizer)
            scaler.update()
        m.same(norms[:1], norms[1:])
        m.same(dict(model.state_dict()), dict(local.state_dict()))
        assert scalers[0].state_dict() == scalers[1].state_dict()
        skipped += all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert 0 < skipped < 8
    # The state goes to a scaler of torch's and back.
    torch.amp.GradScaler("cpu").load_state_dict(scalers[0].state_dict())
    other = sharding.ShardedGradScaler()
    other.load_state_dict(scalers[1].state_dict())
    assert other.get_scale() == scalers[0].get_scale()


def local_backward(model: nn.Module, x: Any, y: Any, scaler: Any) -> torch.Tensor:
    """As the pipeline: micro-batch after micro-batch, each loss scaled."""
    model.zero_grad()
    total = torch.zeros(())
    for xs, ys in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        loss = mse(model(xs), ys) * (len(xs) / len(x))
        scaler.scale(loss).backward()
        total = total + loss.detach()
    return total


def test_scaler_does_what_torchs_does(four: Group) -> None:
    four.run(check_scaler)


def check_one_stage_is_infinite() -> None:
    from torch_rpc_ext import sharding

    model = shard(nn.Sequential(nn.Linear(6, 6), m.Infinite(6), nn.Linear(6, 3)), THREE)
    x, y = m.batch_of("mlp")
    pipe = pipeline(model)
    optimizer = sharding.ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    scaler = sharding.ShardedGradScaler(init_scale=4.0)
    before = dict(model.state_dict())
    pipe.forward_backward(x, y, scaler=scaler)
    # The gradients of stages 0 and 2 are finite, and all the same no stage steps.
    finite = {name: bool(one.isfinite().all()) for name, one in m.remote_grads(model).items()}
    assert [name for name, good in finite.items() if not good] == ["1.bias"]
    scaler.step(optimizer)
    scaler.update()
    m.same(dict(model.state_dict()), before)
    assert scaler.get_scale() == 2.0
    # The order of calls is watched over as by torch.
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()


def test_an_infinity_on_one_stage_skips_the_step_on_all(four: Group) -> None:
    four.run(check_one_stage_is_infinite)


def check_other_ways() -> None:
    from torch_rpc_ext import sharding

    local = m.mlp()
    model = shard(local, THREE)
    x, y = m.batch_of("mlp")
    pipe = pipeline(model)
    ours = sharding.ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    theirs = torch.optim.SGD(local.parameters(), lr=0.1)
    # A scaler that is off.
    with pytest.raises(TypeError, match="init_scale must be a number, got 'cpu'.* takes no device"):
        sharding.ShardedGradScaler("cpu")
    off = sharding.ShardedGradScaler(enabled=False)
    ours.zero_grad()
    pipe.forward_backward(x, y, scaler=off)
    m.same(m.remote_grads(model), m.local_gradients(local, mse, x, y, 4)[1])
    off.unscale_(ours)
    off.step(ours)
    off.update()
    theirs.step()
    m.same(dict(model.state_dict()), dict(local.state_dict()))
    # Distributed autograd, and an optimizer of the caller's own parameters by the same scaler.
    first, twin = nn.Linear(6, 6), nn.Linear(6, 6)
    twin.load_state_dict(first.state_dict())
    scaler = sharding.ShardedGradScaler(init_scale=8.0)
    own = torch.optim.SGD(first.parameters(), lr=0.1)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [scaler.scale(mse(model(first(x)), y))])
        for one, gradient in dist_autograd.get_gradients(context).items():
            one.grad = gradient
        for optimizer in (own, ours):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    both = [*local.parameters(), *twin.parameters()]
    theirs = torch.optim.SGD(both, lr=0.1)
    theirs.zero_grad()
    mse(local(twin(x)), y).backward()
    theirs.step()
    m.same(dict(model.state_dict()), dict(local.state_dict()))
    m.same(dict(first.state_dict()), dict(twin.state_dict()))


def test_other_uses_of_a_scaler(four: Group) -> None:
    four.run(check_other_ways)


@needs_ucx("the option is ours")
@workers(2, options={"wire_dtype": torch.bfloat16})
def test_weights_and_optimizer_state_are_not_narrowed() -> None:
    from torch_rpc_ext import sharding

    local = m.mlp()
    model = sharding.shard(local, ["worker1", "worker1"])
    m.same(dict(model.state_dict()), dict(local.state_dict()))
    local.load_state_dict({name: value + 0.1 for name, value in local.state_dict().items()})
    model.load_state_dict(local.state_dict())
    m.same(dict(model.state_dict()), dict(local.state_dict()))
    optimizer = sharding.ShardedOptimizer(torch.optim.Adam, model, lr=1e-3)
    x, y = m.batch_of("mlp")
    pipe = sharding.Pipeline(model, 2, mse)
    pipe.forward_backward(x, y)
    optimizer.step()
    state = optimizer.state_dict()
    for one in state["state"].values():
        one["step"].fill_(513)  # in bfloat16 it would be 512
        one["exp_avg"].fill_(0.1)
    optimizer.load_state_dict(state)
    m.same(optimizer.state_dict()["state"], state["state"])
    # Activations travel narrow, as the option says.
    assert not torch.equal(pipe.forward(x), local(x).detach())
