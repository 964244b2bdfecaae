"""Each stage has random numbers of its own: dropout is reproducible whatever else its worker
computes; and activations that are computed again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
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


def pipeline(model: Any, **options: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.Pipeline(model, 4, mse, **options)


class Noisy(nn.Module):
    """Dropout in a layer that computes its activations again, and takes its time."""

    def __init__(self, reentrant: bool | None = None, pause: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)
        self.reentrant, self.pause = reentrant, pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return self.compute(x)
        made: torch.Tensor = checkpoint(self.compute, x, use_reentrant=self.reentrant)
        return made

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        made: torch.Tensor = self.dropout(self.linear(x)) + x
        time.sleep(self.pause)
        return self.dropout(made)


def noisy(reentrant: bool | None = None, pause: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    first, last = nn.Linear(6, 6), nn.Linear(6, 3)
    return nn.Sequential(first, *[Noisy(reentrant, pause) for _ in range(3)], last)


PARTITION = [2, 1, 2]


def local_run(local: nn.Sequential, seed: int, x: Any, y: Any) -> Any:
    """Loss and gradients of the local model, whose parts draw as the stages do: a state each."""
    states = [torch.Generator().manual_seed(seed + stage).get_state() for stage in range(3)]
    local.zero_grad()
    total = torch.zeros(())
    for xs, ys in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        value = xs
        for stage, part in enumerate((local[:2], local[2:3], local[3:])):
            torch.set_rng_state(states[stage])
            value = part(value)
            states[stage] = torch.get_rng_state()
        loss = mse(value, ys) * (len(xs) / len(x))
        loss.backward()
        total = total + loss.detach()
    return total, m.grads(local)


def both(local: nn.Module, slow: nn.Module, places: list[str]) -> list[Any]:
    return [shard(one, places, partition=PARTITION, seed=5) for one in (local, slow)]


def check_reproducible(places: list[str], reentrant: bool | None) -> None:
    x, y = m.batch_of("mlp")
    local = noisy(reentrant)
    slow = noisy(reentrant, pause=0.003)
    expected = local_run(local, 5, x, y)
    for schedule in ("gpipe", "1f1b"):
        for model in both(local, slow, places):
            pipe = pipeline(model, schedule=schedule)
            for _ in range(2):
                model.manual_seed(5)
                model.zero_grad()
                with disturbed(places):
                    found = pipe.forward_backward(x, y)
                m.same((found, m.remote_grads(model)), expected)
            # The next batch has other numbers.
            assert pipe.forward_backward(x, y) != found
            # The worker's own numbers have not been touched.
            before = rpc.rpc_sync(places[0], own_numbers)
            pipe.forward_backward(x, y)
            m.same(rpc.rpc_sync(places[0], own_numbers), before)
    # The seed is the caller's, unless it is given.
    torch.manual_seed(77)
    one, two = shard(local, places), shard(local, places, seed=77)
    m.same(one(x), two(x))
    assert (one(x) != shard(local, places)(x)).any()
    # Evaluation draws nothing, and several threads may compute at once.
    model.eval()
    m.same(model(x), slow.eval()(x).detach())


def own_numbers() -> torch.Tensor:
    return torch.get_rng_state()


class disturbed:  # noqa: N801  a block
    """Within the block the workers draw random numbers for others, all the time."""

    def __init__(self, places: list[str]) -> None:
        self.places, self.ends, self.draws = places, False, 0
        self.pool = ThreadPoolExecutor(1)

    def __enter__(self) -> None:
        self.drawing = self.pool.submit(self.run)
        deadline = time.monotonic() + 60
        while self.draws == 0:
            if self.drawing.done():
                self.drawing.result()
            assert time.monotonic() < deadline, "nothing is drawn"
            time.sleep(0.001)
        self.before = self.draws

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.ends = True
        self.pool.shutdown()
        if kind is None:
            self.drawing.result()
            assert self.draws > self.before

    def run(self) -> None:
        other = shard(noisy(), self.places[:1])
        while not self.ends:
            other(torch.ones(2, 6))
            self.draws += 1


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "again", "reentrant"])
@pytest.mark.parametrize("places", [["worker1"] * 3, ["worker1", "worker2", "worker1"]])
def test_dropout_is_reproducible(four: Group, places: list[str], reentrant: bool | None) -> None:
    four.run(check_reproducible, places, reentrant)


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
