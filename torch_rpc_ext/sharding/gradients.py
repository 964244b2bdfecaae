"""The beginning of a stage's autograd graph, and the way of gradients into distributed autograd."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import autograd as _untyped_autograd

__all__ = ["deliver", "enter", "into_context"]

dist_autograd: Any = _untyped_autograd  # upstream's functions have no types

# Distributed autograd allows one backward at a time per context and process. Two stages of one
# worker have both in common.
_ONE_AT_A_TIME = threading.Lock()


class _Entry(torch.autograd.Function):
    """The input of a stage with a history, so that the first layer may change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        # .data has a version counter of its own, so the first layer may change the values in place:
        # no graph keeps the values of the leaf.
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _Delivery(torch.autograd.Function):
    """A number with given gradients: its backward puts them into the context by upstream's API."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


# Upstream's apply() has no types.
enter: Any = _Entry.apply
deliver: Any = _Delivery.apply


def into_context(
    context: int, parameters: list[torch.Tensor], gradients: list[torch.Tensor | None]
) -> None:
    pairs = [
        (parameter, gradient)
        for parameter, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    ]
    if pairs:
        known, found = zip(*pairs, strict=True)
        with _ONE_AT_A_TIME:
            dist_autograd.backward(context, [deliver(found, *known)])
