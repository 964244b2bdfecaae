"""Values that hold tensors: a tensor, or tuples, lists and dicts of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from torch_rpc_ext._calls.device_futures import leaves

__all__ = [
    "batch_size",
    "copied",
    "detached",
    "for_the_wire",
    "joined",
    "leaves",
    "micro_batches",
    "moved",
]

T = TypeVar("T")


def moved(value: T, device: str) -> T:
    """Return the value with its tensors on the device."""
    result: T = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
    return result


def for_the_wire(value: T, stay: Collection[torch.device] = ()) -> T:
    """Return the value as it is sent.

    Args:
        value: holds tensors on any device.
        stay: devices that the connection carries; all other tensors go to the CPU, where every
            back end can send them.
    """
    result: T = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor if tensor.device in stay else tensor.cpu(), value
    )
    return result


def detached(value: T, stay: Collection[torch.device] = ()) -> T:
    """As for_the_wire(), and the tensors have no history."""
    plain: T = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), value)
    return for_the_wire(plain, stay)


def copied(value: T) -> T:
    """Return the value with copies of its tensors, on their devices, without their history."""
    result: T = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)
    return result


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


def joined(parts: Sequence[Any]) -> Any:
    """Return the outputs of micro-batches as those of the batch: tensors put together along
    dimension 0; of values that are no tensors the first.

    Raises:
        ValueError: the parts differ in their structure, or hold tensors without a dimension.
    """
    flat = [pytree.tree_flatten(part) for part in parts]
    forms = [form for _, form in flat]
    if any(form != forms[0] for form in forms):
        raise ValueError(f"the outputs of micro-batches differ: {forms[0]} and others")
    whole = []
    for column in zip(*(values for values, _ in flat), strict=True):
        if not isinstance(column[0], torch.Tensor):
            whole.append(column[0])
        elif column[0].dim() == 0:
            raise ValueError(
                "an output is one number for each micro-batch, which nobody can put together: "
                "compute it by evaluate(..., metric=)"
            )
        else:
            whole.append(torch.cat(column))
    return pytree.tree_unflatten(whole, forms[0])


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
