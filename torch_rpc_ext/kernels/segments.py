"""One launch that copies, or casts, any number of segments: gather and scatter.

A segment is a run of elements that is contiguous at its source and at its destination. A gather
has segments from tensors to one block, a scatter the other way round: to the kernel they are the
same. The segments stand in a table in memory that the device can read, ROW_BYTES each::

    source, destination, elements, first chunk        (int64 each; elements are bytes in a copy)

The work is cut into chunks of up to `chunk_elements` elements, numbered through all segments. A
segment has ceil(elements / chunk_elements) chunks, none if it is empty; its first chunk is the
number of all chunks before it. A block of threads does one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda as _untyped_cuda

from torch_rpc_ext.kernels.casts import Cast
from torch_rpc_ext.kernels.memory import COPY, device, load8
from torch_rpc_ext.kernels.table import ROW_BYTES

__all__ = ["copy_segments"]

cuda: Any = _untyped_cuda

_FIRST_CHUNK = ROW_BYTES - 8  # where it is in a row


@device
def _find_row(table: int, rows: int, chunk: int) -> int:
    """Return the row to which a chunk belongs: the last whose first chunk is not after it."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) >> 1
        if load8(table + middle * ROW_BYTES + _FIRST_CHUNK) <= chunk:
            low = middle
        else:
            high = middle
    return low


def _run(width: int) -> Callable[[int, int, int, int, int], None]:
    """Make the loop in which each thread copies `width` bytes at a time."""
    copy = COPY[width]

    @device
    def run(source: int, destination: int, size: int, thread: int, threads: int) -> None:
        at = thread * width
        while at < size:
            copy(source + at, destination + at)
            at += threads * width

    return run


_run1, _run2, _run4, _run8, _run16 = (_run(width) for width in (1, 2, 4, 8, 16))


@device
def _copy_bytes(source: int, destination: int, size: int, thread: int, threads: int) -> None:
    """Copy with the widest access for which source and destination can both be aligned."""
    difference = (source ^ destination) | 16
    width = difference & -difference  # the lowest bit in which the addresses differ
    head = min(-destination & (width - 1), size)
    body = (size - head) & -width
    _run1(source, destination, head, thread, threads)
    source += head
    destination += head
    if width == 16:
        _run16(source, destination, body, thread, threads)
    elif width == 8:
        _run8(source, destination, body, thread, threads)
    elif width == 4:
        _run4(source, destination, body, thread, threads)
    elif width == 2:
        _run2(source, destination, body, thread, threads)
    else:
        _run1(source, destination, body, thread, threads)
    _run1(source + body, destination + body, size - head - body, thread, threads)


def _caster(cast: Cast) -> Callable[[int, int, int, int, int], None]:
    source_bytes, destination_bytes = cast.source_bytes, cast.destination_bytes
    one, four = cast.one, cast.four

    @device
    def convert(source: int, destination: int, count: int, thread: int, threads: int) -> None:
        fours = 0
        if source % (4 * source_bytes) == 0 and destination % (4 * destination_bytes) == 0:
            fours = count & -4
        at = thread * 4
        while at < fours:
            four(source + at * source_bytes, destination + at * destination_bytes)
            at += threads * 4
        at = fours + thread
        while at < count:
            one(source + at * source_bytes, destination + at * destination_bytes)
            at += threads

    return convert


def copy_segments(cast: Cast | None) -> Callable[[int, int, int, int], None]:
    """Make the kernel that copies bytes, or casts; see the module for its table.

    Args:
        cast: what to do with each element; None copies bytes.

    Returns:
        The kernel, for any grid of one dimension.
    """
    move = _copy_bytes if cast is None else _caster(cast)
    source_bytes = 1 if cast is None else cast.source_bytes
    destination_bytes = 1 if cast is None else cast.destination_bytes

    def kernel(table: int, rows: int, chunks: int, chunk_elements: int) -> None:
        chunk = cuda.blockIdx.x
        while chunk < chunks:
            row = table + _find_row(table, rows, chunk) * ROW_BYTES
            begin = (chunk - load8(row + _FIRST_CHUNK)) * chunk_elements
            move(
                load8(row) + begin * source_bytes,
                load8(row + 8) + begin * destination_bytes,
                min(load8(row + 16) - begin, chunk_elements),
                cuda.threadIdx.x,
                cuda.blockDim.x,
            )
            chunk += cuda.gridDim.x

    return kernel
