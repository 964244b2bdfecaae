"""Input for the tests of kernels: every dtype, awkward layouts, and new random bytes in each
run."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
#: Names -> functions that make a view of a tensor of shape (4, 3, 6).
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(1, 2, 0),
    "sliced inside": lambda t: t[:, :, 1:5],
    "sliced outside": lambda t: t[1:3],
    "every second": lambda t: t[:, :, ::2],
    "every second of each": lambda t: t[::2, ::2, 1::2],
    "one column": lambda t: t[:, 1, 2],
    "one element": lambda t: t[3, 2, 5],
    "diagonal": lambda t: t.diagonal(0, 0, 2),
    "windows": lambda t: t.unfold(2, 3, 1),
    "expanded": lambda t: t[:, :1, :].expand(4, 5, 6),
    "expanded scalar": lambda t: t[0, 0, 0].expand(3, 4),
    "empty": lambda t: t[:, :0, :],
    "empty, transposed": lambda t: t[:, 1:1, :].transpose(0, 2),
}
#: The layouts that may be written to, because no two elements share memory.
DISTINCT = [name for name in LAYOUTS if "expanded" not in name and name != "windows"]


def start_random() -> None:
    """Give torch and random a new seed, which the report of a failed test shows."""
    seed = torch.seed()
    random.seed(seed)
    print(f"torch.manual_seed({seed}); random.seed({seed})")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, misaligned: int = 0) -> torch.Tensor:
    """Return a tensor of random bits, with NaNs and subnormal numbers among them.

    Args:
        shape: of the tensor.
        dtype: of the tensor; bool gets only 0 and 1.
        misaligned: how many bytes after a multiple of 64 the tensor begins.
    """
    size = dtype.itemsize
    for length in shape:
        size *= length
    room = torch.randint(0, 2 if dtype == torch.bool else 256, (size + 128,), dtype=torch.uint8)
    begin = -room.data_ptr() % 64 + misaligned
    # By frombuffer(), because view(dtype) refuses a misaligned beginning.
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(room.numpy(), dtype=dtype, count=size // dtype.itemsize, offset=begin)[
        :
    ].view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype have the same shape and bits."""
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*raw)
