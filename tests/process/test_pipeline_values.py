"""What goes from stage to stage in a pipeline: objects of classes, tensors that share memory,
tensors that a layer changes in place, and batches without rows."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

from tests.process import models as m
from tests.process.group import Group

mse = nn.functional.mse_loss
TWO = ["worker1", "worker2"]


@pytest.fixture(scope="module")
def three() -> Iterator[Group]:
    with Group(3) as group:
        yield group


def pipeline(local: nn.Module, workers: list[str] = TWO, parts: int = 2, **options: Any) -> Any:
    from torch_rpc_ext import sharding

    model = sharding.shard(local, workers, **options)
    return model, sharding.Pipeline(model, parts, mse)


def same_gradients(local: nn.Module, x: Any, workers: list[str] = TWO, **options: Any) -> None:
    """Check that loss and gradients of a batch are those of the local model. Targets have two
    columns."""
    y = torch.randn(len(x), 2)
    model, pipe = pipeline(local, workers, **options)
    loss = pipe.forward_backward(x, y)
    expected = m.local_gradients(local, mse, x.clone(), y, options.get("parts", 2))
    m.same((loss, m.remote_grads(model)), expected)


class Kind(enum.Enum):
    HIDDEN = 1


@dataclass
class Hidden:
    value: Any
    steps: int = 0


@dataclass
class Known:
    value: Any
    steps: int = 0


pytree.register_dataclass(Known)


class Wrap(nn.Module):
    def __init__(self, cls: Any, detach: bool = False) -> None:
        super().__init__()
        self.linear, self.cls, self.detach = nn.Linear(4, 4), cls, detach

    def forward(self, x: torch.Tensor) -> Any:
        made = self.linear(x)
        # The second output is always there, so that a batch has something to learn.
        return self.cls(made.detach() if self.detach else made), made, Kind.HIDDEN


class Unwrap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, given: Any) -> Any:
        wrapped, made, kind = given
        assert kind is Kind.HIDDEN
        return self.linear(wrapped.value * made)


class Pack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, x: torch.Tensor) -> Any:
        lengths = torch.full((len(x),), x.shape[1])
        return pack_padded_sequence(self.embedding(x), lengths, batch_first=True)


class Recur(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 2, batch_first=True)

    def forward(self, packed: PackedSequence) -> Any:
        assert isinstance(packed, PackedSequence)
        return self.lstm(packed)[1][0][-1]


def check_objects(workers: list[str]) -> None:
    from torch_rpc_ext.sharding import StageError

    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    local = nn.Sequential(Wrap(Hidden), Unwrap())
    model, pipe = pipeline(local, workers)
    text = "stage 0 on worker1 raised TypeError: .*test_pipeline_values.Hidden.*register_dataclass"
    with pytest.raises(StageError, match=text) as caught:
        pipe.forward_backward(x, y)
    assert isinstance(caught.value.__cause__, TypeError)
    # Where no gradient can be lost an object is as good as anything.
    model.eval()
    torch.testing.assert_close(pipe.forward(x), local(x).detach())
    torch.testing.assert_close(pipe.evaluate(x, y), mse(local(x), y).detach())
    # Classes that torch knows, and objects without gradients.
    same_gradients(nn.Sequential(Wrap(Known), Unwrap()), x, workers)
    same_gradients(nn.Sequential(Wrap(Hidden, detach=True), Unwrap()), x, workers)
    same_gradients(nn.Sequential(Pack(), Recur()), torch.randint(10, (6, 3)), workers)


@pytest.mark.parametrize("workers", [TWO, ["worker1", "worker1"]])
def test_objects_between_stages(three: Group, workers: list[str]) -> None:
    three.run(check_objects, workers)


def check_in_place() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    for workers in (TWO, ["worker1", "worker1"], ["worker0", "worker1"]):
        same_gradients(nn.Sequential(first, nn.Linear(4, 2)), torch.randn(6, 4), workers)


def test_a_first_layer_that_works_in_place(three: Group) -> None:
    three.run(check_in_place)


class Twice(nn.Module):
    """Returns its result twice, or in two halves of one memory."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.linear, self.halves = nn.Linear(4, 8), halves

    def forward(self, x: torch.Tensor) -> Any:
        made = self.linear(x)
        return made.chunk(2, dim=1) if self.halves else (made, made)


class Change(nn.Module):
    """Changes the first of its inputs in place."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 2)

    def forward(self, given: Any) -> Any:
        one, other = given
        return self.linear(one.mul_(2)) + self.linear(other)


class ChangeHalf(Change):
    def forward(self, given: Any) -> Any:
        one, other = given
        return self.linear(one * 2) + self.linear(other)


def check_shared_memory() -> None:
    from torch_rpc_ext.sharding import StageError

    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    _, pipe = pipeline(nn.Sequential(Twice(halves=False), Change(8)))
    with pytest.raises(StageError, match="stage 1 on worker2 raised.*shares the memory.*clone"):
        pipe.forward_backward(x, y)
    # Halves have nothing in common. Locally torch refuses to change one of several views.
    model, pipe = pipeline(nn.Sequential(Twice(halves=True), Change(4)))
    local = nn.Sequential(Twice(halves=True), ChangeHalf(4))
    local.load_state_dict(model.state_dict())
    m.same(
        (pipe.forward_backward(x, y), m.remote_grads(model)), m.local_gradients(local, mse, x, y, 2)
    )


def test_outputs_that_share_memory(three: Group) -> None:
    three.run(check_shared_memory)


def check_no_rows() -> None:
    local = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    _, pipe = pipeline(local)
    x, y = torch.empty(0, 4), torch.empty(0, 2)
    assert pipe.forward(x).shape == (0, 2)
    assert pipe.evaluate(x, y).isnan()  # as the mean over nothing is
    assert pipe.evaluate(x, y, rows) == [0]
    with pytest.raises(ValueError, match="batch of 0 cannot be cut into 2"):
        pipe.forward_backward(x, y)


def rows(output: torch.Tensor, target: torch.Tensor) -> int:
    assert len(output) == len(target)
    return len(output)


def test_a_batch_without_rows(three: Group) -> None:
    three.run(check_no_rows)
