"""Copies between any two layouts, casts included."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.support.kernel_inputs import CASTS, DISTINCT, DTYPES, LAYOUTS, random_bits, same_bits
from tests.support.sparse import sparse_tensor
from torch_rpc_ext import kernels
from torch_rpc_ext.kernels import launch, reference

# The kernel knows no dtypes, only sizes.
ONE_OF_EACH_SIZE = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def both_copy(source: torch.Tensor, destination: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy by the kernel and by torch; compare also what lies between: `whole` holds it."""
    expected = whole.clone()
    target = expected.as_strided(
        destination.shape,
        destination.stride(),
        destination.storage_offset() - whole.storage_offset(),
    )
    reference.copy(source, target)
    kernels.copy(source, destination)
    assert same_bits(whole, expected)


@pytest.mark.parametrize("dtype", ONE_OF_EACH_SIZE, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_to_contiguous(name: str, dtype: torch.dtype) -> None:
    source = LAYOUTS[name](random_bits((4, 3, 6), dtype))
    whole = random_bits((source.numel() + 8,), dtype)
    both_copy(source, whole[4:-4].view(source.shape), whole)


@pytest.mark.parametrize("dtype", ONE_OF_EACH_SIZE, ids=str)
@pytest.mark.parametrize("name", DISTINCT)
def test_from_contiguous(name: str, dtype: torch.dtype) -> None:
    whole = random_bits((4, 3, 6), dtype)
    destination = LAYOUTS[name](whole)
    both_copy(random_bits(tuple(destination.shape), dtype), destination, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    source = random_bits((3, 2, 4), dtype).transpose(0, 2)
    whole = random_bits((source.numel(),), dtype)
    both_copy(source, whole.view(source.shape), whole)


@pytest.mark.parametrize(("kept", "sent"), CASTS, ids=str)
@pytest.mark.parametrize("name", ["contiguous", "transposed", "every second of each", "empty"])
def test_cast_between_layouts(name: str, kept: torch.dtype, sent: torch.dtype) -> None:
    source = LAYOUTS[name](random_bits((4, 3, 6), kept))
    whole = random_bits((source.numel() * 2,), sent)
    both_copy(source, whole[::2].view(source.shape), whole)


@pytest.mark.parametrize("misaligned", [1, 2, 4, 8])
def test_misaligned(misaligned: int) -> None:
    # Elements that a GPU cannot load as such: the copy takes smaller pieces.
    source = random_bits((4, 3, 6), torch.complex128, misaligned).transpose(0, 2)
    whole = random_bits((source.numel(),), torch.complex128)
    both_copy(source, whole.view(source.shape), whole)


@pytest.mark.parametrize(("dims", "kernel"), [(8, True), (9, False)])
def test_most_dimensions(dims: int, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every second element of each dimension, so that no two can be merged.
    source = random_bits((3,) * dims, torch.int16)[(slice(None, None, 2),) * dims]
    whole = random_bits((source.numel(),), torch.int16)
    launched = []
    real = launch.strided
    monkeypatch.setattr(launch, "strided", lambda *args: launched.append(real(*args)))
    both_copy(source, whole.view(source.shape), whole)
    assert bool(launched) == kernel


def random_view(shape: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a view of that shape, its dimensions in any order and with gaps; and its base."""
    order = torch.randperm(len(shape)).tolist()
    steps = [random.choice((1, 1, 2, 3)) for _ in shape]
    base = random_bits(tuple(shape[dim] * steps[dim] for dim in order), torch.float32)
    view = base[tuple(slice(None, None, steps[dim]) for dim in order)]
    return view.permute([order.index(dim) for dim in range(len(shape))]), base


def test_shapes_at_random() -> None:
    for _ in range(40):
        shape = [random.randrange(1, 5) for _ in range(random.randrange(1, 5))]
        source, _ = random_view(shape)
        destination, whole = random_view(shape)
        both_copy(source, destination, whole)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32], ids=str)
def test_strides_beyond_four_gigabytes(dtype: torch.dtype) -> None:
    room = sparse_tensor(3 * (1 << 33), dtype)
    strides = ((1 << 33) // dtype.itemsize + 3, (1 << 31) // dtype.itemsize + 5, 2)
    far = room.as_strided((2, 3, 4), strides, 11)
    near = random_bits((2, 3, 4), dtype)
    kernels.copy(near, far)
    for index in itertools.product(range(2), range(3), range(4)):
        at = 11 + sum(i * stride for i, stride in zip(index, strides, strict=True))
        assert same_bits(room[at], near[index]), index
    back = torch.zeros_like(near)
    kernels.copy(far, back)
    assert same_bits(back, near)
