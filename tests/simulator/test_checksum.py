"""The checksum: the definition, the kernel, and what it notices."""

from __future__ import annotations

import time
from typing import Any

import numpy
import pytest
import torch

from tests.support.kernel_inputs import DTYPES, random_bits
from torch_rpc_ext import kernels
from torch_rpc_ext.kernels import launch, reference

MASK = (1 << 64) - 1


def by_definition(data: bytes) -> int:
    """As the text in integrity.py says, in Python's integers."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    gamma = 0x9E3779B97F4A7C15
    total = mix(len(data)) + sum(mix(word + (i + 1) * gamma & MASK) for i, word in enumerate(words))
    return total & MASK


def all_three(tensor: torch.Tensor) -> int:
    """Return the checksum, which kernel, reference and definition agree about."""
    kernel = int(kernels.checksum(tensor)) & MASK
    assert kernel == int(reference.checksum(tensor)) & MASK
    assert kernel == by_definition(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
    return kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 33])
def test_dtypes_and_sizes(dtype: torch.dtype, size: int) -> None:
    all_three(random_bits((size,), dtype))


def test_a_scalar() -> None:
    all_three(random_bits((), torch.float32))


@pytest.mark.parametrize("misaligned", range(8))
def test_misaligned(misaligned: int) -> None:
    for size in (1, 7, 8, 9, 17):
        all_three(random_bits((size,), torch.uint8, misaligned))


def test_does_not_depend_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_bits((1001,), torch.uint8)
    expected = all_three(tensor)
    for threads, blocks in ((1, 1), (2, 5), (16, 2), (32, 1)):
        monkeypatch.setattr(launch, "_THREADS", threads)
        monkeypatch.setattr(launch, "_MAX_BLOCKS", blocks)
        assert int(kernels.checksum(tensor)) & MASK == expected, (threads, blocks)


def test_notices_what_goes_wrong() -> None:
    data = random_bits((240,), torch.uint8)
    seen = {all_three(data)}
    words = data.view(torch.int64)
    changes = [
        words[[1, 0, *range(2, 30)]],  # two words swapped
        words[[*range(10), 11, 10, *range(12, 30)]],
        words.roll(1),
        words.flip(0),
        data[:-1],  # cut
        torch.cat([data, data[:0], torch.zeros(1, dtype=torch.uint8)]),  # a zero more
        torch.zeros(240, dtype=torch.uint8),
        torch.zeros(241, dtype=torch.uint8),
    ]
    for bit in range(8):
        flipped = data.clone()
        flipped[int(torch.randint(0, 240, ()))] ^= 1 << bit
        changes.append(flipped)
    for changed in changes:
        seen.add(all_three(changed.contiguous()))
    # A random word may be equal to its neighbour once in 2**64.
    assert len(seen) == 1 + len(changes)


def test_threads_that_start_at_once_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba's simulator gave each of them an array of its own, now and then on a busy machine."""
    from numba.cuda.simulator import kernelapi

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(numpy, name)

        @staticmethod
        def empty(*arguments: Any) -> Any:
            time.sleep(0.05)  # the other threads come meanwhile
            return numpy.empty(*arguments)

    monkeypatch.setattr(kernelapi, "np", Slow())
    all_three(random_bits((17,), torch.uint8))
