"""The same functions in plain torch: what the kernels are tested against, bit for bit, and what
serves where there is no numba-cuda."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_rpc_ext.kernels.table import CHECKSUM_GAMMA, CHECKSUM_MIX

__all__ = ["cast", "checksum", "copy", "gather", "scatter"]


def gather(
    tensors: Sequence[torch.Tensor],
    block: torch.Tensor,
    offsets: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """As torch_rpc_ext.kernels.gather()."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        kept = _flat(tensor)
        raw = (kept if dtype is None else cast(kept, dtype)).view(torch.uint8)
        block[offset : offset + raw.numel()].copy_(raw)


def scatter(
    block: torch.Tensor,
    offsets: Sequence[int],
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """As torch_rpc_ext.kernels.scatter()."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        sent = dtype or tensor.dtype
        # The clone's address is aligned for every dtype.
        raw = block[offset : offset + tensor.numel() * sent.itemsize].clone()
        copy(raw.view(sent).reshape(tensor.shape), tensor)


def copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    """As torch_rpc_ext.kernels.copy()."""
    with torch.no_grad():
        destination.copy_(cast(source, destination.dtype))


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast as the kernels do: as torch, but a NaN keeps its sign and its payload's upper bits.

    Args:
        tensor: any shape.
        dtype: its own, or a pair of plan.CAST_NAMES.

    Returns:
        A new tensor, or the given one if it has the dtype.
    """
    if tensor.dtype == dtype:
        return tensor
    bits = (
        tensor.detach()
        .contiguous()
        .view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    )
    if tensor.dtype == torch.float32 and dtype == torch.bfloat16:
        nan = (bits >> 16).bitwise_or(0x40)
    elif tensor.dtype == torch.float32:
        nan = (bits >> 16).bitwise_and(0x8000) | 0x7E00 | (bits >> 13).bitwise_and(0x1FF)
    elif tensor.dtype == torch.bfloat16:
        nan = bits.int() << 16
    else:
        half = bits.int()
        nan = (half & 0x8000) << 16 | 0x7FC00000 | (half & 0x1FF) << 13
    nan = nan.to(torch.int32 if dtype == torch.float32 else torch.int16)
    return torch.where(tensor.detach().isnan(), nan.view(dtype), tensor.detach().to(dtype))


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """As torch_rpc_ext.kernels.checksum()."""
    raw = _flat(tensor).view(torch.uint8)
    size = torch.full((1,), raw.numel(), dtype=torch.int64, device=raw.device)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 8)).clone().view(torch.int64)
    positions = torch.arange(1, words.numel() + 1, device=raw.device)
    return _mix(words + positions * CHECKSUM_GAMMA).sum() + _mix(size)[0]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of a contiguous tensor, shape (numel,), stride 1."""
    flat = tensor.detach().contiguous().reshape(-1)
    # contiguous() leaves one element with any stride as it is, and then view() would fail.
    return flat.as_strided(flat.shape, (1,))


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift_right(value, 30)) * CHECKSUM_MIX[0]
    value = (value ^ _shift_right(value, 27)) * CHECKSUM_MIX[1]
    return value ^ _shift_right(value, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts copies of the sign in.
    return (value >> bits) & ((1 << (64 - bits)) - 1)
