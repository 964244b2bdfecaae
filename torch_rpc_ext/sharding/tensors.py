"""Values that hold tensors: a tensor, or tuples, lists and dicts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "batch_size",
    "detached",
    "for_the_wire",
    "leaves",
    "micro_batches",
    "moved",
]


def moved(value: Any, device: str) -> Any:
    """Return the value with its tensors on the device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def for_the_wire(value: Any) -> Any:
    """Return the value with its tensors on the CPU, where every back end can send them."""
    return moved(value, "cpu")


def detached(value: Any) -> Any:
    """Return the value with its tensors on the CPU and without their history."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def micro_batches(value: Any, count: int) -> list[Any]:
    """Return views of the value, cut along dimension 0 of each tensor, as torch.tensor_split cuts.

    The first views hold one row more where the rows cannot be divided evenly. Values that are no
    tensors are in all views.
    """
    flat, form = pytree.tree_flatten(value)
    pieces = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) else [leaf] * count
        for leaf in flat
    ]
    return [pytree.tree_unflatten(list(one), form) for one in zip(*pieces, strict=True)]


def batch_size(value: Any, name: str) -> int:
    """Return the length of dimension 0, which all tensors must share.

    Raises:
        ValueError: lengths differ, or there is no tensor with a batch; the text names the argument.
    """
    tensors = leaves(value)
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{name} must hold tensors with a batch dimension, got {type(value)}")
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) > 1:
        raise ValueError(f"{name} holds tensors of different batch sizes: {sorted(sizes)}")
    return sizes.pop()
