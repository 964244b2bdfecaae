"""Tensors of many gigabytes, of which only the pages that are touched take memory."""

from __future__ import annotations

import mmap

import torch

_MAP_NORESERVE = 0x4000  # in Python's mmap since 3.13 only


def sparse_tensor(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros of `size` bytes, one dimension."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
