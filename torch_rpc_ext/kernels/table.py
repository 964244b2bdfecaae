"""What the kernels and those who launch them agree on. Needs no numba."""

from __future__ import annotations

__all__ = ["CHECKSUM_GAMMA", "CHECKSUM_MIX", "CHECKSUM_THREADS", "MAX_DIMS", "ROW_BYTES"]

#: Row of the table of segments: source, destination, elements, first chunk; int64 each.
ROW_BYTES = 32

#: Dimensions that copy_strided takes, after those that can be merged have been.
MAX_DIMS = 8

#: The most threads that a block of the kernel `checksum` has: each has a place in shared memory.
CHECKSUM_THREADS = 256


def _signed(value: int) -> int:
    # Numba gives a value above 2**63 an unsigned type, and a sum of that and an int64 type float64.
    return value - (1 << 64) if value >> 63 else value


#: SplitMix64's constants, as int64.
CHECKSUM_GAMMA = _signed(0x9E3779B97F4A7C15)
CHECKSUM_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
