"""Makes tensors of many gigabytes that take memory only for the pages that are used."""

from __future__ import annotations

import mmap

import torch

_MAP_NORESERVE = 0x4000  # in Python's mmap since 3.13 only


def sparse_tensor(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a one-dimensional tensor of `size` zero bytes."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
