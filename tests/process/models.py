"""Modules that tests split over workers, functions that run on these workers, and the local models
to compare with."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.process.deaths import wait_for_file


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def transformer() -> nn.Sequential:
    torch.manual_seed(2)
    blocks = [
        nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
        for _ in range(3)
    ]
    return nn.Sequential(nn.Embedding(11, 16), *blocks, nn.Linear(16, 11))


def normed() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def batch_of(name: str, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and a target for the model that is called ``name``."""
    torch.manual_seed(4)
    if name == "transformer":
        return torch.randint(11, (size, 5)), torch.randint(11, (size, 5))
    return torch.randn(size, 6), torch.randn(size, 3)


def loss_of(name: str) -> Any:
    return token_loss if name == "transformer" else nn.functional.mse_loss


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Chain(nn.Module):
    """Is not an nn.Sequential, but runs its parts one after another."""

    def __init__(self, shortcut: bool = False, between: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.between = between  # probability of a dropout that is no submodule
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 3)
        if norm:
            self.layers.append(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8)))
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x = self.embed(x)
        for layer in self.layers:
            value = nn.functional.dropout(layer(value), self.between, self.training)
        result: torch.Tensor = self.head(value + x if self.shortcut else value)
        return result


class Boom(nn.Module):
    """Raises in the forward or backward of its n-th call."""

    def __init__(self, where: str, at: int = 0) -> None:
        super().__init__()
        self.where, self.at, self.calls = where, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 != self.at:
            return x
        if self.where == "forward":
            raise ValueError("boom")
        x.register_hook(boom)
        return x.clone()


def boom(_: torch.Tensor) -> None:
    raise ValueError("boom")


class Sleep(nn.Module):
    """Sleeps in forward and backward, for so many seconds each, and notes when in :data:`SLEPT`."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(self.seconds[0])
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda _: sleep(self.seconds[1]))
        return x


class Hang(nn.Module):
    """Waits in its forward until a file exists, for two minutes at most; makes the file ``begun``
    before."""

    def __init__(self, file: Path, begun: Path | None = None) -> None:
        super().__init__()
        self.file, self.begun = file, begun

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.begun is not None:
            self.begun.touch()
        wait_for_file(self.file, 120)
        return x


#: From when to when a :class:`Sleep` of this process slept, by a clock that all processes share.
SLEPT: list[tuple[float, float]] = []


def sleep(seconds: float) -> None:
    begin = time.monotonic()
    time.sleep(seconds)
    SLEPT.append((begin, time.monotonic()))


def slept_since(begin: float) -> list[tuple[float, float]]:
    return [interval for interval in SLEPT if interval[0] >= begin]


def run_until_slept_at_once(workers: Sequence[str], run: Callable[[], object]) -> None:
    """Run something until :func:`slept_at_once` is true of it. On a busy machine, a stage may get
    its first value when the stage before it has slept for all values."""
    end = time.monotonic() + 40
    while True:
        begin = time.monotonic()
        run()
        if slept_at_once(workers, begin):
            return
        assert time.monotonic() < end, "the stages do not work at once"


def slept_at_once(workers: Sequence[str], begin: float) -> bool:
    """Whether each of these workers has slept, since ``begin``, at a time when the next one did."""
    slept = [rpc.rpc_sync(worker, slept_since, args=(begin,)) for worker in workers]
    return all(
        any(a[0] < b[1] and b[0] < a[1] for a in these for b in those)
        for these, those in itertools.pairwise(slept)
    )


class Infinite(nn.Module):
    """Adds a bias whose gradient is infinite; that of the input is not."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias.clone()
        if bias.requires_grad:
            bias.register_hook(infinite)
        return x + bias


def infinite(gradient: torch.Tensor) -> torch.Tensor:
    return torch.full_like(gradient, torch.inf)


class Pair(nn.Module):
    """Makes a dict of two tensors and a text from a tensor or from a dict of two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        x = x["a"] + x["b"] if isinstance(x, dict) else x
        return {"a": self.linear(x), "b": x, "kind": "pair"}


class Join(nn.Module):
    """Makes a tensor from the output of Pair."""

    def forward(self, x: Any) -> torch.Tensor:
        assert x["kind"] == "pair"
        result: torch.Tensor = x["a"] * x["b"]
        return result


def gradients(model: Any, context: int) -> dict[str, torch.Tensor]:
    """The gradients of all stages in an autograd context, by their names in the whole model."""
    found = {}
    for handle in model.stages:
        found.update(rpc.rpc_sync(handle.place.worker, _own_gradients, args=(handle.rref, context)))
    return found


def _own_gradients(stage: Any, context: int) -> dict[str, torch.Tensor]:
    by_parameter = dist_autograd.get_gradients(context)
    return {
        name: by_parameter[parameter]
        for name, parameter in stage.local_value().module.named_parameters()
        if parameter in by_parameter
    }


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """The .grad of a local model's parameters."""
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def remote_grads(model: Any) -> dict[str, torch.Tensor]:
    """The .grad of all stages, by the names in the whole model."""
    found = {}
    for handle in model.stages:
        found.update(rpc.rpc_sync(handle.place.worker, _own_grads, args=(handle.rref,)))
    return found


def _own_grads(stage: Any) -> dict[str, torch.Tensor]:
    return grads(stage.local_value().module)


def modes(stage: Any) -> list[bool]:
    """Whether each submodule of a stage is in training mode."""
    return [module.training for module in stage.local_value().module.modules()]


def local_gradients(
    model: nn.Module, loss: Any, x: torch.Tensor, y: torch.Tensor, parts: int = 1
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of the local model, which runs the micro-batches one after
    another."""
    model.zero_grad()
    total = torch.zeros(())
    for xs, ys in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        part = loss(model(xs), ys) * (len(xs) / len(x))
        part.backward()
        total = total + part.detach()
    return total, {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def local_outputs(
    model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, parts: int
) -> torch.Tensor:
    """The outputs of the local model, which runs the micro-batches one after another. With all rows
    at once the last bits may differ: CPUs multiply matrices of other shapes in another order."""
    return torch.cat([model(part).detach() for part in x.tensor_split(parts)])


def same(found: Any, expected: Any) -> None:
    """Check that both have the same tensors, equal to the last bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
