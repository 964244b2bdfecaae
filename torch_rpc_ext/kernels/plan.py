"""From tensors to the arguments of kernels: what the host computes before a launch. No numba."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_rpc_ext.kernels.table import MAX_DIMS

__all__ = [
    "BLOCK_ALIGNMENT",
    "CAST_NAMES",
    "Layout",
    "Segment",
    "StridedCopy",
    "block_offsets",
    "layout_of",
    "packed",
    "plan_strided",
    "segment_table",
]

#: Tensors begin in a block at multiples of so many bytes, to which every access of the kernels is
#: aligned.
BLOCK_ALIGNMENT = 16

#: (from, to) -> the name of the cast, which ends the names of its kernels.
CAST_NAMES = {
    (torch.float32, torch.bfloat16): "float32_to_bfloat16",
    (torch.float32, torch.float16): "float32_to_float16",
    (torch.bfloat16, torch.float32): "bfloat16_to_float32",
    (torch.float16, torch.float32): "float16_to_float32",
}


class Layout(NamedTuple):
    """Where the elements of a tensor are.

    Attributes:
        address: of the first element.
        dtype: of the elements.
        shape: of the tensor.
        strides: bytes.
    """

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a tensor."""
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    return Layout(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), strides)


def packed(address: int, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """Return the layout of a contiguous tensor at any address."""
    strides = []
    stride = dtype.itemsize
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return Layout(address, dtype, tuple(shape), tuple(reversed(strides)))


class Segment(NamedTuple):
    """A contiguous run to copy or cast; addresses, and a count of elements (bytes in a copy)."""

    source: int
    destination: int
    elements: int


def block_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Lay out a block.

    Args:
        sizes: of the tensors in the block, bytes.

    Returns:
        (offset of each tensor in the block, size of the block), bytes.
    """
    offsets = []
    end = 0
    for size in sizes:
        begin = -(-end // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


def segment_table(segments: Sequence[Segment], chunk_elements: int) -> tuple[torch.Tensor, int]:
    """Make the table of the kernels `segments...`; its rows are described in segments.py.

    Args:
        segments: what to copy or cast, in any order.
        chunk_elements: of one chunk; a multiple of 16, so that all chunks of a segment are
            aligned as the segment is.

    Returns:
        The table, int64, shape (segments, 4), in the host's memory; and the number of chunks.

    Raises:
        ValueError: chunk_elements is not positive, or no multiple of 16.
    """
    if chunk_elements <= 0 or chunk_elements % 16:
        raise ValueError(f"chunk_elements must be a positive multiple of 16, got {chunk_elements}")
    rows = []
    chunks = 0
    for segment in segments:
        rows.append((*segment, chunks))
        chunks += -(-segment.elements // chunk_elements)
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4), chunks


@dataclass(frozen=True)
class StridedCopy:
    """The arguments of a kernel `strided_...`, but for the cast in its name.

    Attributes:
        source: address.
        destination: address.
        elements: pieces that threads move at once.
        sizes: of each dimension, the innermost first, MAX_DIMS of them.
        source_strides: bytes.
        destination_strides: bytes.
        source_width: bytes of a piece at the source: 1 to 16 in a copy; of an element in a cast.
        destination_width: the same at the destination; differs in a cast only.
    """

    source: int
    destination: int
    elements: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]
    source_width: int
    destination_width: int

    def as_segment(self) -> Segment | None:
        """Return the same as a segment; None unless both sides are contiguous."""
        if any(size != 1 for size in self.sizes[1:]):
            return None
        steps = (self.source_strides[0], self.destination_strides[0])
        if self.sizes[0] != 1 and steps != (self.source_width, self.destination_width):
            return None
        is_copy = self.source_width == self.destination_width
        count = self.elements * (self.source_width if is_copy else 1)
        return Segment(self.source, self.destination, count)


class _Dim(NamedTuple):
    size: int
    source: int  # stride, bytes
    destination: int


def plan_strided(source: Layout, destination: Layout) -> StridedCopy | None:
    """Find the fewest dimensions, and the widest accesses, for a copy between two layouts.

    Args:
        source: any strides, also 0 (expanded).
        destination: of the same shape; its elements must not overlap. If its dtype differs, the
            elements are cast one by one.

    Returns:
        The arguments; None if more than MAX_DIMS dimensions are left.

    Raises:
        ValueError: elements to cast lie at an address that their size does not divide.
    """
    dims = _merge(
        [_Dim(*dim) for dim in zip(source.shape, source.strides, destination.strides, strict=True)]
    )
    widths = (source.dtype.itemsize, destination.dtype.itemsize)
    if source.dtype == destination.dtype:
        width, dims = _widen(source, destination, dims)
        widths = (width, width)
    elif source.address % widths[0] or destination.address % widths[1]:
        raise ValueError(
            f"cannot cast {source.dtype} at {source.address:#x} to {destination.dtype} at "
            f"{destination.address:#x}: elements must be aligned to their size"
        )
    if len(dims) > MAX_DIMS:
        return None
    dims += [_Dim(1, 0, 0)] * (MAX_DIMS - len(dims))
    return StridedCopy(
        source.address,
        destination.address,
        math.prod(dim.size for dim in dims),
        tuple(dim.size for dim in dims),
        tuple(dim.source for dim in dims),
        tuple(dim.destination for dim in dims),
        *widths,
    )


def _merge(dims: Sequence[_Dim]) -> list[_Dim]:
    """Join dimensions that follow each other in both layouts; return the innermost first."""
    merged: list[_Dim] = []
    for dim in reversed(dims):
        if dim.size == 1:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and dim.source == last.source * last.size
            and dim.destination == last.destination * last.size
        ):
            merged[-1] = last._replace(size=last.size * dim.size)
        else:
            merged.append(dim)
    return merged


def _widen(source: Layout, destination: Layout, dims: list[_Dim]) -> tuple[int, list[_Dim]]:
    """Cut a copy into pieces of the largest power of two, up to 16 bytes, that divides both
    addresses, all strides, and the length of the innermost contiguous run.

    Returns:
        The bytes of a piece, and the dimensions in such pieces.
    """
    run = source.dtype.itemsize
    if dims and dims[0].source == dims[0].destination == run:
        run *= dims[0].size
        dims = dims[1:]
    bits = 16 | run | source.address | destination.address
    for dim in dims:
        bits |= dim.source | dim.destination
    width = bits & -bits
    pieces = _Dim(run // width, width, width)
    return width, ([] if pieces.size == 1 else [pieces]) + dims
