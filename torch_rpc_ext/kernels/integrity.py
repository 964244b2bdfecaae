"""A 64-bit checksum of bytes, the same for every grid and every order of the threads.

The bytes are read as little-endian 64-bit words, the last one filled up with zeros. mix() is the
finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
All arithmetic is modulo 2**64::

    checksum = mix(length in bytes) + sum over i of mix(word[i] + (i + 1) * 0x9E3779B97F4A7C15)

A sum may be taken in any order, so that threads need not wait for each other. Its terms depend on
the position, so that two words that changed places are noticed; mix() is a bijection, so that one
word that differs always is, and other differences are missed once in about 2**64. The length tells
a tail of zeros from no tail. The checksum does not protect against someone who forges data.
"""

from __future__ import annotations

from typing import Any

from numba import cuda as _untyped_cuda
from numba import int64

from torch_rpc_ext.kernels.memory import atomic_add8, device, load1, load8, shift_right, wrap
from torch_rpc_ext.kernels.table import CHECKSUM_GAMMA, CHECKSUM_MIX, CHECKSUM_THREADS

__all__ = ["checksum"]

cuda: Any = _untyped_cuda

_MIX1, _MIX2 = CHECKSUM_MIX


@device
def _mix(value: int) -> int:
    value = (value ^ shift_right(value, 30)) * _MIX1
    value = (value ^ shift_right(value, 27)) * _MIX2
    return value ^ shift_right(value, 31)


@device
def _word(address: int, size: int) -> int:
    """Return the word at an address where `size` bytes are left; missing bytes count as zeros."""
    if size >= 8 and address & 7 == 0:
        return load8(address)
    word = 0
    for i in range(min(size, 8)):
        word |= load1(address + i) << (8 * i)
    return word


def checksum(source: int, size: int, result: int) -> None:
    """Add the checksum of `size` bytes to the 64-bit integer at `result`, which was 0 before.

    The kernel, for any grid of one dimension; a block has a power of two of threads, up to
    CHECKSUM_THREADS.
    """
    partial = cuda.shared.array(CHECKSUM_THREADS, int64)
    index = cuda.grid(1)
    total = 0
    if index == 0:
        total = _mix(size)
    while index * 8 < size:
        total += _mix(_word(source + index * 8, size - index * 8) + (index + 1) * CHECKSUM_GAMMA)
        index += cuda.gridsize(1)

    # One addition to memory for a block: those of all threads would wait for each other.
    thread = cuda.threadIdx.x
    partial[thread] = wrap(total)
    cuda.syncthreads()
    half = cuda.blockDim.x >> 1
    while half > 0:
        if thread < half:
            partial[thread] = wrap(int(partial[thread]) + int(partial[thread + half]))
        cuda.syncthreads()
        half >>= 1
    if thread == 0:
        atomic_add8(result, int(partial[0]))
