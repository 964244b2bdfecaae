"""Gather and scatter: many tensors, one launch."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.kernel_inputs import CASTS, DTYPES, LAYOUTS, random_bits, same_bits
from torch_rpc_ext import kernels
from torch_rpc_ext.kernels import reference

GUARD = 64  # bytes before and after what may be written


def both_gather(
    tensors: list[torch.Tensor], offsets: list[int], end: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gather by kernels and by torch into blocks of the same random bytes; return the block."""
    block = random_bits((end + GUARD,), torch.uint8)
    expected = block.clone()
    kernels.gather(tensors, block, offsets, dtype)
    reference.gather(tensors, expected, offsets, dtype)
    assert torch.equal(block, expected)
    return block


def both_scatter(
    block: torch.Tensor,
    offsets: list[int],
    tensors: list[torch.Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Scatter by kernels, and by torch into copies; compare."""
    expected = [tensor.clone() for tensor in tensors]
    before = block.clone()
    kernels.scatter(block, offsets, tensors, dtype)
    reference.scatter(block, offsets, expected, dtype)
    assert all(map(same_bits, tensors, expected))
    assert torch.equal(block, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype) -> None:
    shapes = [(), (1,), (0,), (3, 0, 2), (5,), (16,), (3, 7), (129,)]
    tensors = [random_bits(shape, dtype) for shape in shapes]
    offsets, end = kernels.block_offsets(tensor.nbytes for tensor in tensors)
    assert all(offset % kernels.BLOCK_ALIGNMENT == 0 for offset in offsets)
    block = both_gather(tensors, offsets, end)
    back = [random_bits(shape, dtype) for shape in shapes]
    both_scatter(block, offsets, back)
    assert all(map(same_bits, back, tensors))


def test_hundreds_of_tensors_of_all_sizes_and_dtypes() -> None:
    tensors = [
        random_bits((random.choice((0, 1, 2, random.randrange(60))),), random.choice(DTYPES))
        for _ in range(400)
    ]
    offsets, end = kernels.block_offsets(tensor.nbytes for tensor in tensors)
    block = both_gather(tensors, offsets, end)
    both_scatter(block, offsets, [random_bits(tuple(t.shape), t.dtype) for t in tensors])


def test_hundreds_of_tensors_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_rpc_ext.kernels import launch

    launched = []
    real = launch._launch

    def count(device: torch.device, name: str, *arguments: int) -> None:
        launched.append(name)
        real(device, name, *arguments)

    monkeypatch.setattr(launch, "_launch", count)
    tensors = [random_bits((3,), torch.float32) for _ in range(300)]
    offsets, end = kernels.block_offsets(tensor.nbytes for tensor in tensors)
    both_gather(tensors, offsets, end)
    assert launched == ["segments"]


@pytest.mark.parametrize("difference", [0, 1, 2, 3, 4, 8, 12, 16])
def test_every_alignment(difference: int) -> None:
    # From byte 0 to 16, to a place whose distance allows accesses of 16, 8, 4, 2 or 1 bytes.
    for misaligned in range(17):
        tensor = random_bits((random.randrange(1, 100),), torch.uint8, misaligned)
        block = random_bits((200,), torch.uint8)
        offset = (tensor.data_ptr() - block.data_ptr() + difference) % 16 + 16
        expected = block.clone()
        kernels.gather([tensor], block, [offset])
        reference.gather([tensor], expected, [offset])
        assert torch.equal(block, expected), (misaligned, difference)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_are_not_contiguous(name: str) -> None:
    tensors = [LAYOUTS[name](random_bits((4, 3, 6), dtype)) for dtype in DTYPES[3:9]]
    tensors.append(random_bits((9,), torch.int8))
    offsets, end = kernels.block_offsets(tensor.numel() * tensor.itemsize for tensor in tensors)
    both_gather(tensors, offsets, end)


@pytest.mark.parametrize(("kept", "sent"), CASTS[:2], ids=str)
def test_cast_there_and_back(kept: torch.dtype, sent: torch.dtype) -> None:
    tensors = [random_bits((n,), kept) for n in (0, 1, 3, 4, 5, 64, 200)]
    tensors.append(random_bits((6, 5), kept).t())
    tensors.append(random_bits((9,), kept, misaligned=4))  # no access of 16 bytes
    offsets, end = kernels.block_offsets(t.numel() * sent.itemsize for t in tensors)
    block = both_gather(tensors, offsets, end, sent)
    back = [torch.empty_like(tensor) for tensor in tensors]
    both_scatter(block, offsets, back, sent)
    for tensor, result in zip(tensors, back, strict=True):
        assert same_bits(result, reference.cast(reference.cast(tensor, sent), kept))


@pytest.mark.parametrize(("kept", "sent"), CASTS, ids=str)
def test_cast_at_every_alignment(kept: torch.dtype, sent: torch.dtype) -> None:
    # Four elements at a time only where both sides are aligned for that.
    for misaligned in range(0, 4 * kept.itemsize, kept.itemsize):
        for offset in range(0, 4 * sent.itemsize, sent.itemsize):
            both_gather([random_bits((37,), kept, misaligned)], [offset], 200, sent)
