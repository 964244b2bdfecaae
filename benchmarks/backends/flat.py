"""Calls as bytes, for back ends that have no format of their own; the format is as short as can be.

``function, list or not, number of tensors | their sizes | their elements``, little-endian. Tensors
are flat and float32, as in all cases.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.functions import FUNCTIONS

#: An object with Python's buffer interface; Python has a type for it from 3.12 on.
Buffer = Any

_NAMES = list(FUNCTIONS)
_HEAD = struct.Struct("<HHI")  # 8 bytes, so that what follows is aligned
# With this many tensors, or more, that are no larger than this, torch joins and splits them faster
# than a loop in Python handles them, although it copies them once more.
_MANY, _SMALL = 8, 4096  # tensors, elements


def pack(function: str, arguments: Sequence[Any]) -> list[Buffer]:
    """Return a call as buffers, large tensors uncopied; an answer is packed with any name."""
    tensors, is_list = _flat(arguments)
    sizes = [tensor.numel() for tensor in tensors]
    head = _HEAD.pack(_NAMES.index(function), is_list, len(sizes))
    head += struct.pack(f"<{len(sizes)}Q", *sizes)
    if len(sizes) >= _MANY and sum(sizes) <= _SMALL * len(sizes):
        tensors = [torch.cat(tensors)]
    return [head, *(tensor.numpy().data.cast("B") for tensor in tensors)]


def unpack(data: Buffer) -> tuple[str, list[Any]]:
    """Return name and arguments of what pack() made; the tensors lie in ``data``."""
    function, is_list, count = _HEAD.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
    offset, tensors = _HEAD.size + 8 * count, []
    if count >= _MANY:
        elements = torch.frombuffer(data, dtype=torch.float32, count=sum(sizes), offset=offset)
        tensors = list(elements.split(sizes))
    else:
        for size in sizes:
            tensors.append(torch.frombuffer(data, dtype=torch.float32, count=size, offset=offset))
            offset += 4 * size
    return _NAMES[function], [tensors] if is_list else tensors


def as_arguments(result: Any) -> tuple[Any, ...]:
    """Return a result in the form that pack() takes."""
    return () if result is None else (result,)


def as_result(arguments: list[Any]) -> Any:
    """Undo as_arguments()."""
    return arguments[0] if arguments else None


def _flat(arguments: Sequence[Any]) -> tuple[list[Tensor], bool]:
    if len(arguments) == 1 and isinstance(arguments[0], list):
        return arguments[0], True
    return list(arguments), False


# Only operate() writes to tensors that lie in bytes objects, and nothing else uses these bytes.
warnings.filterwarnings("ignore", message="The given buffer is not writable")
