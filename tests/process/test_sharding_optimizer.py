"""ShardedOptimizer updates as the local optimizer does, with torch's schedulers, parameter groups
and clipped gradients; and its state is that of the local one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.optim import lr_scheduler

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


def pipeline(model: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.Pipeline(model, 4, mse)


def optimizer_of(model: Any, cls: Any = torch.optim.AdamW, **options: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.ShardedOptimizer(cls, model, **options)


def one_cycle(optimizer: Any) -> Any:
    # Changes betas as well.
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
    "one cycle": one_cycle,
    "plateau": plateau,
}


class Slowing(torch.optim.SGD):
    """Keeps its number of steps among the options, as Schedule-Free optimizers do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group.setdefault("k", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


OPTIMIZERS: dict[str, Any] = {
    "slowing": (Slowing, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def train_both(optimizer: str, scheduler: str, *, clip: bool = False, steps: int = 4) -> None:
    """Train the local model and the pipeline, without a distributed autograd context, and compare
    them bit for bit."""
    local = m.mlp()
    model = shard(local, THREE)
    x, y = m.batch_of("mlp")
    pipe = pipeline(model)
    cls, options = OPTIMIZERS[optimizer]
    ours, theirs = optimizer_of(model, cls, **options), cls(local.parameters(), **options)
    schedules = [SCHEDULERS[scheduler](one) for one in (ours, theirs)]
    for _ in range(steps):
        ours.zero_grad()
        loss = pipe.forward_backward(x, y)
        m.same(loss, m.local_gradients(local, mse, x, y, 4)[0])
        if clip:
            norm = nn.utils.clip_grad_norm_(local.parameters(), 0.05)
            assert norm > 0.05
            m.same(model.clip_grad_norm_(0.05), norm)
        for one, schedule in zip((ours, theirs), schedules, strict=True):
            one.step()
            schedule.step(*([1.0] if scheduler == "plateau" else []))
        assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
        m.same(dict(model.state_dict()), dict(local.state_dict()))
    same_state(ours.state_dict(), theirs.state_dict())
    assert ours.param_groups[0]["lr"] != options["lr"]


def same_state(found: Any, expected: Any) -> None:
    assert found["param_groups"] == expected["param_groups"]
    m.same(found["state"], expected["state"])
    assert list(found["state"]) == list(expected["state"])


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ("adamw", "one cycle"),
        ("sgd", "lambda"),
        ("adagrad", "cosine"),
        ("sgd", "plateau"),
        ("slowing", "lambda"),
    ],
)
def test_updates_are_the_local_ones(four: Group, optimizer: str, scheduler: str) -> None:
    four.run(train_both, optimizer, scheduler)


def test_with_clipped_gradients(four: Group) -> None:
    four.run(train_both, "adamw", "cosine", clip=True)


def check_within_a_context() -> None:
    local = m.mlp()
    model = shard(local, THREE)
    x, y = m.batch_of("mlp")
    pipe = pipeline(model)
    ours, theirs = optimizer_of(model), torch.optim.AdamW(local.parameters())
    for parts in (4, 1, 4):
        expected = m.local_gradients(local, mse, x, y, parts)
        norm = nn.utils.clip_grad_norm_(local.parameters(), 0.05)
        theirs.step()
        with dist_autograd.context() as context:
            if parts == 4:
                m.same(pipe.forward_backward(x, y), expected[0])
            else:
                dist_autograd.backward(context, [mse(model(x), y)])
            m.same(m.gradients(model, context), expected[1])
            m.same(model.clip_grad_norm_(0.05), norm)
            m.same(m.gradients(model, context), m.grads(local))
            ours.step() if parts == 4 else ours.step(context)
        m.same(dict(model.state_dict()), dict(local.state_dict()))
    with pytest.raises(RuntimeError, match="(?i)autograd context"):
        ours.step(context)
    # No .grad has been left.
    assert m.remote_grads(model) == {}


def test_within_a_distributed_autograd_context(four: Group) -> None:
    four.run(check_within_a_context)


def check_grad_adds_up() -> None:
    local = m.mlp()
    model = shard(local, THREE)
    x, y = m.batch_of("mlp")
    pipe, optimizer = pipeline(model), optimizer_of(model)
    expected = m.local_gradients(local, mse, x, y, 4)[1]
    pipe.forward_backward(x, y)
    m.same(m.remote_grads(model), expected)
    pipe.forward_backward(x, y)
    for xs, ys in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        (mse(local(xs), ys) * (len(xs) / len(x))).backward()
    m.same(m.remote_grads(model), m.grads(local))
    optimizer.zero_grad(set_to_none=False)
    assert not any(gradient.any() for gradient in m.remote_grads(model).values())
    optimizer.zero_grad()
    assert m.remote_grads(model) == {}
    optimizer.step()  # without gradients nothing changes
    m.same(dict(model.state_dict()), dict(local.state_dict()))


def test_gradients_add_up_until_zero_grad(four: Group) -> None:
    four.run(check_grad_adds_up)


def check_groups() -> None:
    # As is usual: no weight decay for biases.
    local = m.mlp()
    model = shard(local, ["worker1", "worker1", "worker2"])
    named = dict(local.named_parameters())
    weights = [name for name, one in named.items() if one.dim() > 1]
    biases = [name for name, one in named.items() if one.dim() == 1]
    x, y = m.batch_of("mlp")
    pipe = pipeline(model)
    ours = optimizer_of(
        model,
        param_groups=[
            {"params": weights, "weight_decay": 0.5},
            {"params": biases, "lr": 0.1, "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    theirs = torch.optim.AdamW(
        [
            {"params": [named[name] for name in weights], "weight_decay": 0.5},
            {"params": [named[name] for name in biases], "lr": 0.1, "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    for _ in range(3):
        ours.zero_grad()
        pipe.forward_backward(x, y)
        m.local_gradients(local, mse, x, y, 4)
        for one in (ours, theirs):
            one.step()
            one.param_groups[1]["lr"] /= 2
    m.same(dict(model.state_dict()), dict(local.state_dict()))
    same_state(ours.state_dict(), theirs.state_dict())
    with pytest.raises(RuntimeError, match="to the constructor, as param_groups="):
        ours.add_param_group({"params": ["0.weight"]})
    for groups, text in [
        ([{"params": ["0.weight", "9.bias"]}], "names '9.bias', which is no parameter.*0.weight"),
        (
            [{"params": "0.bias"}, {"params": ["0.bias"]}],
            r"groups\[1\] names '0.bias', which is na",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            optimizer_of(model, param_groups=groups)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        optimizer_of(model, lr=-1)
    # A stage may have no parameter of any group.
    few = optimizer_of(model, torch.optim.SGD, param_groups=[{"params": "0.bias"}], lr=1.0)
    before = model.state_dict()
    few.zero_grad()
    pipe.forward_backward(x, y)
    few.step()
    changed = [name for name, one in model.state_dict().items() if (one != before[name]).any()]
    assert changed == ["0.bias"]


def test_parameter_groups(four: Group) -> None:
    four.run(check_groups)


def check_state_dict() -> None:
    local = m.mlp()
    x, y = m.batch_of("mlp")
    theirs = torch.optim.AdamW(local.parameters(), lr=0.01)
    theirs_schedule = one_cycle(theirs)

    def step_both(model: Any, ours: Any) -> None:
        ours.zero_grad()
        pipeline(model).forward_backward(x, y)
        m.local_gradients(local, mse, x, y, 4)
        ours.step()
        theirs.step()
        theirs_schedule.step()
        m.same(dict(model.state_dict()), dict(local.state_dict()))

    model = shard(local, THREE)
    ours = optimizer_of(model, lr=0.01)
    schedule = one_cycle(ours)
    step_both(model, ours)
    schedule.step()
    # Taken over by a model with another partition, and by a local optimizer.
    state = ours.state_dict()
    other = shard(m.mlp(), ["worker2", "worker0"])
    other.load_state_dict(model.state_dict())
    again = optimizer_of(other, lr=0.5)
    again.load_state_dict(state)
    same_state(again.state_dict(), theirs.state_dict())
    step_both(other, again)
    fresh = torch.optim.AdamW(m.mlp().parameters())
    fresh.load_state_dict(state)
    same_state(fresh.state_dict(), state)
    # Taken from a local optimizer.
    third = shard(local, THREE)
    ours = optimizer_of(third)
    ours.load_state_dict(theirs.state_dict())
    step_both(third, ours)
    # A state without moments clears those that there are.
    ours.load_state_dict(torch.optim.AdamW(local.parameters()).state_dict())
    assert ours.state_dict()["state"] == {}
    with pytest.raises(ValueError, match="size of optimizer's group"):
        ours.load_state_dict(torch.optim.AdamW([torch.ones(1)]).state_dict())


class Adapting(Slowing):
    """Writes to its options what differs from stage to stage, as Prodigy's estimates do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1 + float(group["params"][0].grad.abs().mean())
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


def check_options_of_each_stage() -> None:
    from torch_rpc_ext import sharding

    x, y = m.batch_of("mlp")
    both = []
    for _ in range(2):
        model = shard(m.mlp(), THREE)
        both.append((model, optimizer_of(model, Adapting, lr=0.1)))
    for step in range(4):
        for model, ours in both[: None if step > 1 else 1]:
            ours.zero_grad()
            pipeline(model).forward_backward(x, y)
            ours.step()
        if step == 1:
            with tempfile.TemporaryDirectory() as folder:
                (model, ours), (other, again) = both
                sharding.save_checkpoint({"model": model, "optimizer": ours}, folder)
                sharding.load_checkpoint({"model": other, "optimizer": again}, folder)
    m.same(*(dict(model.state_dict()) for model, _ in both))
    assert both[0][1].state_dict()["param_groups"][0]["k"] == 0


def test_options_of_each_stage(four: Group) -> None:
    """They come back from a checkpoint; a state_dict() has one value for all stages."""
    four.run(check_options_of_each_stage)


def check_state_among_the_options() -> None:
    """What the optimizer itself writes to its options stays on the stages, and is in its state."""
    from torch_rpc_ext import sharding

    local = m.mlp()
    x, y = m.batch_of("mlp")
    theirs = Slowing(local.parameters(), lr=0.1)
    start = theirs.state_dict()

    def step_both(model: Any, ours: Any) -> None:
        ours.zero_grad()
        pipeline(model).forward_backward(x, y)
        m.local_gradients(local, mse, x, y, 4)
        ours.step()
        theirs.step()
        m.same(dict(model.state_dict()), dict(local.state_dict()))
        same_state(ours.state_dict(), theirs.state_dict())

    model = shard(local, THREE)
    ours = optimizer_of(model, Slowing, lr=0.1)
    for lr in (0.1, 0.2, 0.2):
        for one in (ours, theirs):
            one.param_groups[0]["lr"] = lr
        step_both(model, ours)
    other = shard(m.mlp(), ["worker2", "worker0"])
    other.load_state_dict(model.state_dict())
    again = optimizer_of(other, Slowing, lr=0.5)
    again.load_state_dict(ours.state_dict())
    same_state(again.state_dict(), theirs.state_dict())
    step_both(other, again)
    with tempfile.TemporaryDirectory() as folder:
        sharding.save_checkpoint({"model": other, "optimizer": again}, folder)
        ours = optimizer_of(model, Slowing, lr=0.5)
        sharding.load_checkpoint({"model": model, "optimizer": ours}, folder)
        same_state(ours.state_dict(), theirs.state_dict())
    for one in (again, theirs):  # back to a value that the stages were given before
        one.load_state_dict(start)
    step_both(other, again)


def test_state_among_the_options(four: Group) -> None:
    four.run(check_state_among_the_options)


def test_state_dict_round_trip(four: Group) -> None:
    four.run(check_state_dict)


def check_norms() -> None:
    local = m.normed().eval()
    model = shard(local, THREE)
    x, y = m.batch_of("normed")
    pipe = pipeline(model)
    assert model.clip_grad_norm_(1.0) == 0  # there are no gradients
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        for bound in (1e9, 0.01):
            model.zero_grad()
            pipe.forward_backward(x, y)
            m.local_gradients(local, mse, x, y, 4)
            expected = nn.utils.clip_grad_norm_(local.parameters(), bound, norm_type)
            m.same(model.clip_grad_norm_(bound, norm_type=norm_type), expected)
            m.same(m.remote_grads(model), m.grads(local))
    # An infinity on one stage.
    infinite = shard(nn.Sequential(nn.Linear(6, 6), m.Infinite(6), nn.Linear(6, 3)), THREE)
    pipeline(infinite).forward_backward(x, y)
    before = m.remote_grads(infinite)
    with pytest.raises(RuntimeError, match="order 2.0 for gradients of all stages is non-finite"):
        infinite.clip_grad_norm_(1.0, error_if_nonfinite=True)
    m.same(m.remote_grads(infinite), before)
    assert infinite.clip_grad_norm_(1.0) == math.inf


def test_norms_are_the_local_ones(four: Group) -> None:
    four.run(check_norms)


def check_errors() -> None:
    from torch_rpc_ext.sharding import StageError

    model = shard(m.mlp(), THREE)
    x, y = m.batch_of("mlp")
    pipe = pipeline(model)
    with pytest.raises(TypeError, match="takes no closure.*forward and backward before step"):
        optimizer_of(model, lr=0.1).step(lambda: 1.0)
    with pytest.raises(TypeError, match="takes the model that shard.. has returned.*got list"):
        optimizer_of([], torch.optim.SGD)
    with pytest.raises(ValueError, match="step.. of LBFGS needs a closure.*choose another"):
        optimizer_of(model, torch.optim.LBFGS)
    with pytest.raises(StageError, match="stage 1 on worker2 raised ValueError: not here"):
        optimizer_of(model, Picky)
    # Zeros before the first step, as of the local optimizer.
    hooked: list[str] = []
    optimizer = optimizer_of(model)
    optimizer.register_step_post_hook(lambda *_: hooked.append("step"))
    pipe.forward_backward(x, y)
    optimizer.step()
    assert hooked == ["step"]


class Picky(torch.optim.SGD):
    """Cannot be made on worker2."""

    def __init__(self, params: Any, **options: Any) -> None:
        from torch.distributed import rpc

        if rpc.get_worker_info().name == "worker2":
            raise ValueError("not here")
        super().__init__(params, **options)


def test_errors_and_hooks(four: Group) -> None:
    four.run(check_errors)
