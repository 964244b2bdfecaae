"""Values that hold tensors: a tensor, or tuples, lists and dicts of them."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import rpc as _untyped_rpc
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from torch_rpc_ext._calls.device_futures import leaves

__all__ = [
    "batch_size",
    "byte_range",
    "check_gradients_are_seen",
    "copied",
    "detached",
    "for_the_wire",
    "joined",
    "leaves",
    "micro_batches",
    "moved",
    "share_memory",
]

rpc: Any = _untyped_rpc  # upstream's functions have no types

T = TypeVar("T")

# What can hold no tensor, so that nobody needs to look into it.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.Size, enum.Enum),
)


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


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _GradientFinder(pickle.Pickler):
    """Pickles an object as a call would, and notes whether it holds a tensor with gradients."""

    def __init__(self) -> None:
        # Nobody reads the pickle, so large arrays are not even written: buffers go to a callback.
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: None)
        self.found = False

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.Tensor):
            self.found = self.found or obj.requires_grad
            return "tensor"  # in place of the tensor, whose values need not be pickled
        return "rref" if isinstance(obj, rpc.PyRRef) else None  # which only calls can pickle


def _hides_gradients(leaf: Any) -> bool:
    if isinstance(leaf, (torch.Tensor, *_PLAIN)):
        return False
    finder = _GradientFinder()
    try:
        finder.dump(leaf)
    except Exception:  # noqa: BLE001  pickling a class of a user may raise anything
        return True  # nobody can look into it
    return finder.found


def check_gradients_are_seen(flat: Sequence[Any]) -> None:
    """Check that all tensors with gradients are leaves.

    Args:
        flat: the leaves of a value.

    Raises:
        TypeError: an object of a class that torch's pytree does not know holds such a tensor, or
            cannot be pickled. The object is one leaf, and no gradient would come back for it.
    """
    for leaf in flat:
        if _hides_gradients(leaf):
            name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise TypeError(
                f"the stage returned a {name}, in which a pipeline does not see the tensors, so "
                "their gradients would be lost: return tuples, lists or dicts, or register the "
                "class where it is defined, by torch.utils._pytree.register_dataclass() or, if it "
                "is no dataclass, register_pytree_node()"
            )


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have a byte in common. False for tensors without memory: on the
    meta device, empty, sparse, or not initialized yet."""
    if one.device != other.device:
        return False
    (begin, end), (begin_of_other, end_of_other) = byte_range(one), byte_range(other)
    if max(begin, begin_of_other) >= min(end, end_of_other):
        return False
    if _is_dense(one) and _is_dense(other):
        return True
    # Columns of one matrix lie between each other and have nothing in common.
    start = min(begin, begin_of_other)
    touched = torch.zeros(max(end, end_of_other) - start, dtype=torch.bool)
    _bytes_of(one, touched, begin - start).fill_(True)
    return bool(_bytes_of(other, touched, begin_of_other - start).any())


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of that after its last; both are 0 for a
    tensor without memory of its own."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    try:
        begin = tensor.data_ptr()
    except RuntimeError:  # a FakeTensor
        return 0, 0
    if begin == 0:  # a subclass whose tensors are its attributes
        return 0, 0
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return begin, begin + (steps + 1) * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has all bytes between its first and its last."""
    begin, end = byte_range(tensor)
    return tensor.numel() * tensor.element_size() == end - begin


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, begin: int) -> torch.Tensor:
    """Return a view of `memory`, one element per byte, where the tensor lies if it begins there."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return memory.as_strided((*tensor.shape, size), (*strides, 1), begin)
