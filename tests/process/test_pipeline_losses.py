"""The loss of a batch of micro-batches, and its gradients, are those of the whole batch, whatever
the loss's mean goes over; and where nobody can know, the pipeline says so."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.process import models as m
from tests.process.group import Group

F = nn.functional
THREE = ["worker1", "worker2", "worker3"]
PAD = 0
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 4.0])


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4) as group:
        yield group


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PAD)


def masked_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Is NaN, with its gradients, where nothing counts."""
    mask = target != PAD
    losses = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (losses * mask).sum() / mask.sum()


def tokens(target: torch.Tensor) -> torch.Tensor:
    return (target != PAD).sum()


def batch(classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of very different lengths, padded; one micro-batch of four is padding only."""
    torch.manual_seed(4)
    target = torch.randint(1, classes, (12, 5))
    for row, length in enumerate([5, 5, 4, 1, 1, 1, 0, 0, 0, 5, 2, 3]):
        target[row, length:] = PAD
    return torch.randint(11, (12, 5)), target


def compare(local: nn.Module, loss_fn: Any, x: Any, y: Any, **options: Any) -> None:
    """Check that the pipeline computes what the local model does with the whole batch."""
    from torch_rpc_ext import sharding

    model = sharding.shard(local, THREE)
    pipe = sharding.Pipeline(model, 4, loss_fn, **options)
    local.zero_grad()
    expected = loss_fn(local(x), y)
    expected.backward()
    loss = pipe.forward_backward(x, y)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(pipe.evaluate(x, y), expected.detach())
    found = m.remote_grads(model)
    torch.testing.assert_close({name: found[name] for name in m.grads(local)}, m.grads(local))


class Swap(nn.Module):
    """[batch, length, classes] to the order that cross_entropy() wants."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def language(classes: int = 11) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, classes))


def check_token_losses() -> None:
    x, y = batch(11)
    compare(language(), token_loss, x, y, count=tokens)
    compare(language(), masked_mean, x, y, count=tokens)
    # By the number of rows it would be another value.
    with pytest.raises(AssertionError):
        compare(language(), token_loss, x[:9], y[:9], reduction="mean")


def test_a_function_that_counts_tokens(four: Group) -> None:
    four.run(check_token_losses)


def check_known_losses() -> None:
    x, y = batch(4)
    swapped = nn.Sequential(*language(4), Swap())
    logs = nn.Sequential(*swapped, nn.LogSoftmax(1))
    for loss_fn in (
        nn.CrossEntropyLoss(ignore_index=PAD),
        nn.CrossEntropyLoss(WEIGHT, ignore_index=PAD, label_smoothing=0.1),
        nn.CrossEntropyLoss(WEIGHT),
        nn.CrossEntropyLoss(reduction="sum", ignore_index=PAD),
        functools.partial(F.cross_entropy, ignore_index=PAD),
        functools.partial(functools.partial(F.cross_entropy, weight=WEIGHT), ignore_index=PAD),
        F.cross_entropy,
    ):
        compare(swapped, loss_fn, x, y)
    for loss_fn in (nn.NLLLoss(WEIGHT, ignore_index=PAD), F.nll_loss):
        compare(logs, loss_fn, x, y)
    # Probabilities of classes as a target, and losses that count rows; micro-batches of 4, 3, 3, 3.
    torch.manual_seed(5)
    x, y = torch.randn(13, 6), torch.rand(13, 3)
    for loss_fn in (
        nn.CrossEntropyLoss(WEIGHT[:3]),
        nn.MSELoss(),
        nn.L1Loss(reduction="sum"),
        nn.BCEWithLogitsLoss(),
        nn.KLDivLoss(reduction="batchmean"),
        F.huber_loss,
        functools.partial(F.smooth_l1_loss, reduction="sum"),
    ):
        compare(m.mlp(), loss_fn, x, y)


def test_losses_of_torch_are_known(four: Group) -> None:
    four.run(check_known_losses)


def check_nothing_counts() -> None:
    from torch_rpc_ext import sharding

    model = sharding.shard(language(), THREE)
    pipe = sharding.Pipeline(model, 4, token_loss, count=tokens)
    x, y = batch(11)
    assert math.isnan(pipe.forward_backward(x, torch.zeros_like(y)).item())
    assert math.isnan(pipe.evaluate(x, torch.zeros_like(y)).item())
    assert m.remote_grads(model) == {}


def test_a_batch_in_which_nothing_counts(four: Group) -> None:
    four.run(check_nothing_counts)


def check_what_is_refused() -> None:
    from torch_rpc_ext import sharding

    model = sharding.shard(m.mlp(), THREE)
    for loss_fn, options, text in [
        (token_loss, {}, "nobody can know what token_loss is over a batch: pass reduction='sum'"),
        (functools.partial(token_loss), {}, "nobody can know what functools.partial"),
        (Own(), {}, "nobody can know what Own"),
        (nn.MSELoss(), {"reduction": "sum"}, "has reduction='mean', which is not 'sum'"),
        (nn.MSELoss(reduction="sum"), {"reduction": "mean"}, "reduction='sum', which is not 'mean"),
        (nn.MSELoss(reduction="none"), {}, "must return one number.*reduction='none'"),
        (nn.MSELoss(reduction="sum"), {"count": tokens}, "'sum', which is not what count is for"),
        (token_loss, {"reduction": "sum", "count": tokens}, "count is for a mean"),
        (token_loss, {"count": 3}, "count must be a function of the target, got 3"),
        (token_loss, {"reduction": "max"}, "reduction must be 'mean' or 'sum', got 'max'"),
    ]:
        with pytest.raises(ValueError, match=text):
            sharding.Pipeline(model, 4, loss_fn, **options)
    pipe = sharding.Pipeline(model, 4, F.mse_loss, count=lambda target: -1)
    with pytest.raises(ValueError, match="count returned -1.0 for a target"):
        pipe.forward_backward(*m.batch_of("mlp"))


class Own(nn.MSELoss):
    """A class of the user's, which may do anything."""


def test_what_nobody_can_know_is_refused(four: Group) -> None:
    four.run(check_what_is_refused)
