"""Pipelined evaluation: outputs, losses and metrics of micro-batches over all stages, without
autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

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


def pipeline(model: Any, loss_fn: Any = None, parts: int = 4, **options: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.Pipeline(model, parts, loss_fn, **options)


def correct(output: torch.Tensor, target: torch.Tensor) -> tuple[int, torch.Tensor]:
    assert not torch.is_grad_enabled() and not output.requires_grad
    assert rpc.get_worker_info().name == "worker3"
    return len(target), (output.argmax(1) == target).sum()


def check_outputs() -> None:
    local = m.normed()
    model = shard(local, THREE)
    x, y = m.batch_of("normed", 13)
    local.eval()
    model.eval()
    pipe = pipeline(model, mse)
    m.same(pipe.forward(x), m.local_outputs(local, x, 4))
    torch.testing.assert_close(pipe.evaluate(x, y), mse(local(x), y).detach())
    classes = y.argmax(1)
    counted = pipe.evaluate(x, classes, correct)
    assert [size for size, _ in counted] == [4, 3, 3, 3]
    assert sum(right for _, right in counted) == (local(x).argmax(1) == classes).sum()
    # The last batch of a data set has fewer rows than micro-batches.
    torch.testing.assert_close(pipe.forward(x[:3]), local(x[:3]).detach())
    torch.testing.assert_close(pipe.evaluate(x[:1], y[:1]), mse(local(x[:1]), y[:1]).detach())
    # Nothing is recorded, also within a context; and what a stage holds is nothing.
    with dist_autograd.context() as context:
        assert not pipe.forward(x).requires_grad
        assert m.gradients(model, context) == {}
    assert [stats.peak_micro_batches for stats in pipe.stats] == [0, 0, 0]
    assert m.remote_grads(model) == {}
    # Evaluation and training may take turns.
    model.train()
    pipe.forward_backward(x, y)
    assert m.remote_grads(model)


def test_outputs_loss_and_metric(four: Group) -> None:
    four.run(check_outputs)


def check_values() -> None:
    torch.manual_seed(6)
    local = nn.Sequential(m.Pair(), m.Pair(), m.Pair())
    model = shard(local, ["worker1", "worker1", "worker2"])
    x = torch.rand(8, 6)
    found = pipeline(model).forward(x)
    expected = local(x)
    assert found["kind"] == expected["kind"] and found.keys() == expected.keys()
    m.same(found["a"], m.local_outputs(lambda rows: local(rows)["a"], x, 4))
    numbers = shard(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Total()), THREE)
    with pytest.raises(ValueError, match="one number for each micro-batch.*metric="):
        pipeline(numbers).forward(torch.ones(8, 6))


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def test_values_that_are_no_tensors(four: Group) -> None:
    four.run(check_values)


def check_stages_work_at_once() -> None:
    sleeps = nn.Sequential(*[m.Sleep(0.02, 0) for _ in range(3)])
    pipe = pipeline(shard(sleeps, THREE), parts=6)
    pipe.forward(torch.ones(6, 2))
    m.run_until_slept_at_once(THREE, lambda: pipe.forward(torch.ones(6, 2)))


def test_stages_work_at_once(four: Group) -> None:
    four.run(check_stages_work_at_once)


def check_errors() -> None:
    from torch_rpc_ext.sharding import StageError

    x, y = m.batch_of("mlp")
    model = shard(nn.Sequential(nn.ReLU(), m.Boom("forward", 2), nn.ReLU()), THREE)
    pipe = pipeline(model)
    with pytest.raises(StageError, match="stage 1 on worker2 raised ValueError: boom"):
        pipe.forward(x)
    m.same(pipe.forward(x), x.relu())
    with pytest.raises(StageError, match="stage 2 on worker3 raised TypeError"):
        pipe.evaluate(x, y, len)
    with pytest.raises(ValueError, match="evaluate.* needs a metric, or a loss"):
        pipe.evaluate(x, y)
    with pytest.raises(ValueError, match="forward_backward.* needs a loss"):
        pipe.forward_backward(x, y)
    with pytest.raises(ValueError, match="metric .*lambda.* cannot be sent to the last stage"):
        pipe.evaluate(x, y, lambda output, target: 0)
    with pytest.raises(ValueError, match="batch of 12 and target one of 8"):
        pipe.evaluate(x, y[:8], correct)
    with pytest.raises(ValueError, match="inputs must hold tensors"):
        pipe.forward("x")


def test_errors(four: Group) -> None:
    four.run(check_errors)


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("not even this")


class Shy(Exception):
    """Cannot be described, and not be pickled."""

    @property
    def __notes__(self) -> list[str]:
        raise ValueError("not even this")

    def __reduce__(self) -> Any:
        raise SystemExit


def raise_mute(output: torch.Tensor, target: torch.Tensor) -> None:
    raise Mute


def raise_shy(output: torch.Tensor, target: torch.Tensor) -> None:
    raise Shy


def check_errors_without_words() -> None:
    from torch_rpc_ext.sharding import StageError

    x, y = m.batch_of("mlp")
    pipe = pipeline(shard(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), THREE), timeout=0)
    with pytest.raises(StageError, match="stage 2 on worker3 raised Mute") as caught:
        pipe.evaluate(x, y, raise_mute)
    assert isinstance(caught.value.__cause__, Mute)
    with pytest.raises(StageError, match="stage 2 on worker3 raised Shy") as caught:
        pipe.evaluate(x, y, raise_shy)
    assert caught.value.__cause__ is None
    assert pipe.evaluate(x, y.argmax(1), correct)


def test_errors_without_words(four: Group) -> None:
    four.run(check_errors_without_words)
