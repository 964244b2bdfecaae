"""Casts of every kind of number; tests/unit/test_native_kernels.py has them by the million."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernel_inputs import CASTS, random_bits, same_bits
from torch_rpc_ext import kernels
from torch_rpc_ext.kernels import reference


def special(dtype: torch.dtype) -> torch.Tensor:
    """Return the borders between kinds of numbers, and their neighbours, of both signs."""
    if dtype == torch.float32:
        # Zero, subnormal, halves' smallest and largest, bfloat16's ties, infinity, NaNs.
        near = [0, 0x33000000, 0x33800000, 0x38800000, 0x477FE000, 0x477FF000, 0x47800000]
        near += [0x3F800000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000, 0x7F7F8000]
        near += [0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FFFFFFE]
        bits = torch.tensor([n + d for n in near for d in (-1, 0, 1) if n + d >= 0])
        return torch.cat([bits, bits | 0x80000000]).to(torch.int32).view(dtype)
    near = [0, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7E00, 0x3C00, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FC0]
    bits = torch.tensor([n + d for n in near for d in (-1, 0, 1) if n + d >= 0])
    return torch.cat([bits, bits | 0x8000]).to(torch.int16).view(dtype)


@pytest.mark.parametrize(("kept", "sent"), CASTS, ids=str)
@pytest.mark.parametrize("stride", [1, 2])  # 1: four at a time; 2: one
def test_every_kind_of_number(kept: torch.dtype, sent: torch.dtype, stride: int) -> None:
    source = torch.cat([special(kept), random_bits((500,), kept)])
    spread = torch.empty(len(source) * stride, dtype=kept)[::stride]
    spread.copy_(source)
    result = torch.empty(source.shape, dtype=sent)
    kernels.copy(spread, result)
    assert same_bits(result, reference.cast(source, sent))
    number = ~source.isnan()
    assert same_bits(result[number], source[number].to(sent))
    assert result[~number].isnan().all()
    assert torch.equal(result[~number].signbit(), source[~number].signbit())
