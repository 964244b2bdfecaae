"""Where the graph of a stage begins, and how its gradients get into distributed autograd."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import autograd as _untyped_autograd

dist_autograd: Any = _untyped_autograd  # upstream's functions have no types

# Distributed autograd bears one backward per context and process, and two stages may share both.
_ONE_AT_A_TIME = threading.Lock()


class _Entry(torch.autograd.Function):
    """The input of a stage with a history, so that the first layer may change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        # Without the leaf's version counter: nothing that is kept of the leaf is its values.
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _Delivery(torch.autograd.Function):
    """A number whose gradients are given: brings them into the context, through upstream's API."""

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
