"""Gradients of a stage: where its autograd graph begins, where backward() leaves the gradients,
where an optimizer finds the gradients.

They are in a distributed autograd context, or, without one, in the .grad of the parameters.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed import autograd as _untyped_autograd

__all__ = [
    "collected_in",
    "context_id",
    "deliver",
    "enter",
    "find",
    "has_reentrant_checkpoint",
    "into_context",
    "norms",
    "unscale",
]

dist_autograd: Any = _untyped_autograd  # upstream's functions have no types

# Distributed autograd allows one backward at a time per context and process, and two stages of one
# worker share context and process.
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


def context_id() -> int | None:
    """Return the id of the distributed autograd context of this thread, None outside of one."""
    try:
        return int(dist_autograd._current_context()._context_id())
    except RuntimeError:
        return None


def into_context(
    context: int, parameters: list[torch.Tensor], gradients: list[torch.Tensor | None]
) -> None:
    """Add gradients of parameters of this worker to a distributed autograd context."""
    pairs = [
        (parameter, gradient)
        for parameter, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    ]
    if pairs:
        known, found = zip(*pairs, strict=True)
        with _ONE_AT_A_TIME:
            dist_autograd.backward(context, [deliver(found, *known)])


@contextlib.contextmanager
def collected_in(
    totals: list[torch.Tensor | None], parameters: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Have `totals` in place of .grad within the block: backward() adds to them, and an optimizer
    steps by them. Afterwards .grad is as it was.

    torch.autograd.grad() would return gradients and change no .grad, but a layer that computes its
    activations again by torch.utils.checkpoint with use_reentrant=True refuses it.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = total
    try:
        yield
    finally:
        for place, (parameter, own) in enumerate(zip(parameters, before, strict=True)):
            totals[place], parameter.grad = parameter.grad, own


def find(parameters: Sequence[torch.Tensor], context: int | None) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter, not copied; None where it has none.

    Args:
        parameters: of this worker.
        context: id of a distributed autograd context; None for .grad.
    """
    if context is None:
        return [parameter.grad for parameter in parameters]
    try:
        found = dist_autograd.get_gradients(context)
    except RuntimeError:  # no gradient has come to this worker
        found = {}
    return [found.get(parameter) for parameter in parameters]


def has_reentrant_checkpoint(outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether the outputs were computed with torch.utils.checkpoint, use_reentrant=True.

    Such a checkpoint runs a backward of its own within the outer backward. The inner one leaves the
    gradients of parameters in .grad, even if the outer one is of a distributed autograd context.
    """
    left = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if node.name() == "CheckpointFunctionBackward":
            return True
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)
    return False


def norms(gradients: Sequence[torch.Tensor | None], norm_type: float) -> torch.Tensor:
    """Return the norm of each gradient that there is, shape (n,), on the CPU."""
    found = [
        torch.linalg.vector_norm(gradient, norm_type)
        for gradient in gradients
        if gradient is not None
    ]
    return torch.stack([one.cpu() for one in found]) if found else torch.empty(0)


def unscale(gradients: Sequence[torch.Tensor | None], factor: float) -> bool:
    """Multiply gradients by a number in place; return whether all were finite before.

    Raises:
        ValueError: a gradient is float16, whose range is too small for unscaled gradients.
    """
    finite = []
    for gradient in gradients:
        if gradient is None:
            continue
        if gradient.dtype == torch.float16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        # A sparse gradient may have several values for one place, which add up.
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        finite.append(torch.isfinite(values).all())
        gradient.mul_(factor)
    return all(bool(one) for one in finite)
