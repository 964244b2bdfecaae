"""Copies, casts and checksums on the GPU, in kernels that numba-cuda compiles.

::

    from torch_rpc_ext import kernels

    tensors = [torch.ones(3), torch.zeros(5, 2)]
    offsets, size = kernels.block_offsets(x.nbytes for x in tensors)
    block = torch.empty(size, dtype=torch.uint8)
    kernels.gather(tensors, block, offsets)  # both into one block
    kernels.scatter(block, offsets, [torch.empty_like(x) for x in tensors])
    kernels.checksum(block)

The functions run a kernel where they can: with tensors on a GPU where numba-cuda is installed, and
with tensors on the CPU where numba's simulator is on (NUMBA_ENABLE_CUDASIM=1). Elsewhere they run
plain torch (reference.py), with the same results bit for bit. compile_kernel() in ptx.py returns
the kernels as PTX, for programs that launch them themselves.

Autograd records nothing of what happens here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch

from torch_rpc_ext.kernels import reference
from torch_rpc_ext.kernels.plan import (
    BLOCK_ALIGNMENT,
    CAST_NAMES,
    Layout,
    Segment,
    block_offsets,
    layout_of,
    packed,
    plan_strided,
)

__all__ = ["BLOCK_ALIGNMENT", "block_offsets", "checksum", "copy", "gather", "scatter"]


def gather(
    tensors: Sequence[torch.Tensor],
    block: torch.Tensor,
    offsets: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Copy tensors into one block, the contiguous ones by one launch.

    Args:
        tensors: any shapes, dtypes and strides, on the block's device.
        block: uint8, one dimension, contiguous.
        offsets: where each tensor begins in the block, bytes; see block_offsets().
        dtype: cast all to this dtype; None to copy.

    Raises:
        ValueError: a tensor on another device, beyond the block's end, or of a kind that has no
            such copy or cast; named by its index.
    """
    _check_block(tensors, block, offsets, dtype)
    if not _use_kernels(block):
        return reference.gather(tensors, block, offsets, dtype)
    runs = _Runs(block.device)
    for tensor, offset in zip(tensors, offsets, strict=True):
        target = packed(block.data_ptr() + offset, tensor.shape, dtype or tensor.dtype)
        if not runs.copy(layout_of(tensor), target):
            reference.gather([tensor], block, [offset], dtype)
    runs.launch()


def scatter(
    block: torch.Tensor,
    offsets: Sequence[int],
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Copy out of a block into tensors, the contiguous ones by one launch: undo gather().

    Args:
        block: uint8, one dimension, contiguous.
        offsets: where each tensor begins in the block, bytes.
        tensors: any shapes, dtypes and strides, on the block's device; none expanded.
        dtype: the dtype that the tensors have in the block; None if it is their own.

    Raises:
        ValueError: as gather().
    """
    _check_block(tensors, block, offsets, dtype, out=True)
    if not _use_kernels(block):
        return reference.scatter(block, offsets, tensors, dtype)
    runs = _Runs(block.device)
    for tensor, offset in zip(tensors, offsets, strict=True):
        source = packed(block.data_ptr() + offset, tensor.shape, dtype or tensor.dtype)
        if not runs.copy(source, layout_of(tensor)):
            reference.scatter(block, [offset], [tensor], dtype)
    runs.launch()


def copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy between any two layouts, and cast if the dtypes differ, without a temporary.

    torch makes the copy where a layout has more than table.MAX_DIMS dimensions after merging those
    that can be merged.

    Args:
        source: any strides.
        destination: the same shape and device; its elements must not overlap.

    Raises:
        ValueError: shapes or devices differ, there is no such cast, or the destination overlaps.
    """
    if source.shape != destination.shape or source.device != destination.device:
        raise ValueError(
            f"cannot copy {tuple(source.shape)} on {source.device} to "
            f"{tuple(destination.shape)} on {destination.device}: both must be the same"
        )
    _check_cast(source.dtype, destination.dtype, "source")
    _check_bits(source, "source")
    _check_bits(destination, "destination")
    _check_overlap(destination, "destination")
    if not _use_kernels(destination):
        return reference.copy(source, destination)
    runs = _Runs(destination.device)
    if not runs.copy(layout_of(source), layout_of(destination)):
        reference.copy(source, destination)
    runs.launch()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a tensor's bytes, as integrity.py defines it.

    Args:
        tensor: any dtype; contiguous, because the bytes are taken as they lie in memory.

    Returns:
        int64, 0-dim, on the tensor's device.

    Raises:
        ValueError: it is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"checksum needs a contiguous tensor, got strides {tensor.stride()}")
    _check_bits(tensor, "tensor")
    if not _use_kernels(tensor):
        return reference.checksum(tensor)
    from torch_rpc_ext.kernels import launch

    return launch.checksum(tensor)


def _use_kernels(tensor: torch.Tensor) -> bool:
    if importlib.util.find_spec("numba_cuda") is None:
        return False
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "") not in ("", "0")
    return tensor.is_cuda != simulated


class _Runs:
    """Launches strided copies at once, and contiguous ones all together at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_cast: dict[str | None, list[Segment]] = {}

    def copy(self, source: Layout, destination: Layout) -> bool:
        """Begin a copy; return whether the kernels can do it."""
        from torch_rpc_ext.kernels import launch

        plan = plan_strided(source, destination)
        if plan is None:
            return False
        cast = CAST_NAMES.get((source.dtype, destination.dtype))
        segment = plan.as_segment()
        if segment is None:
            launch.strided(self._device, plan, cast)
        else:
            self._by_cast.setdefault(cast, []).append(segment)
        return True

    def launch(self) -> None:
        from torch_rpc_ext.kernels import launch

        for cast, segments in self._by_cast.items():
            launch.segments(self._device, segments, cast)


def _check_block(
    tensors: Sequence[torch.Tensor],
    block: torch.Tensor,
    offsets: Sequence[int],
    dtype: torch.dtype | None,
    out: bool = False,
) -> None:
    if block.dtype != torch.uint8 or block.dim() != 1 or not block.is_contiguous():
        raise ValueError(
            f"block must be uint8, one-dimensional and contiguous, got {block.dtype}, "
            f"shape {tuple(block.shape)}, strides {block.stride()}"
        )
    if len(tensors) != len(offsets):
        raise ValueError(f"{len(tensors)} tensors need as many offsets, got {len(offsets)}")
    for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        what = f"tensors[{i}]"
        kept = dtype or tensor.dtype
        end = offset + tensor.numel() * kept.itemsize
        if tensor.device != block.device:
            raise ValueError(f"{what} is on {tensor.device}, the block on {block.device}")
        if offset < 0 or end > block.numel():
            raise ValueError(f"{what} at {offset} to {end} is beyond the block's {block.numel()}")
        if out:
            _check_cast(kept, tensor.dtype, what)
            _check_overlap(tensor, what)
        else:
            _check_cast(tensor.dtype, kept, what)
        _check_bits(tensor, what)


def _check_cast(source: torch.dtype, destination: torch.dtype, what: str) -> None:
    if source != destination and (source, destination) not in CAST_NAMES:
        raise ValueError(
            f"{what}: there is no cast from {source} to {destination}; only between float32 and "
            "bfloat16 or float16"
        )


def _check_bits(tensor: torch.Tensor, what: str) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"{what} has layout {tensor.layout}: send its parts, which are dense")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} is a lazy view: call resolve_conj().resolve_neg() before")


def _check_overlap(tensor: torch.Tensor, what: str) -> None:
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            raise ValueError(f"{what} is expanded: its elements overlap and cannot be written to")
