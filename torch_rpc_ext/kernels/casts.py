"""Casts between floating-point formats, on bits, with integer arithmetic only.

Round to nearest, ties to even; subnormal numbers are kept; too large becomes infinity. A NaN stays
a NaN with its sign and the upper bits of its payload. torch itself promises no bits for a NaN: its
scalar code, its vectorised code and CUDA's instruction give three different results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_rpc_ext.kernels.memory import (
    device,
    load2,
    load4,
    load8,
    load16,
    store2,
    store4,
    store8,
    store16,
)

__all__ = [
    "CASTS",
    "Cast",
    "bfloat16_to_float32",
    "float16_to_float32",
    "float32_to_bfloat16",
    "float32_to_float16",
]


@device
def float32_to_bfloat16(bits: int) -> int:
    """Return the 16 bits for the 32 bits of a float."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40  # quiet, so that a payload in the lower half leaves no infinity
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@device
def bfloat16_to_float32(bits: int) -> int:
    """Return the 32 bits for the 16 bits of a bfloat16; exact."""
    return bits << 16


@device
def float32_to_float16(bits: int) -> int:
    """Return the 16 bits for the 32 bits of a float."""
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | 0x7E00 | ((magnitude >> 13) & 0x1FF)
    if magnitude >= 0x477FF000:  # 65520, half way between the largest half and the next power
        return sign | 0x7C00
    if magnitude >= 0x38800000:  # 2**-14, the smallest normal half
        return sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13)
    if magnitude <= 0x33000000:  # 2**-25, half of the smallest half
        return sign
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    shift = 126 - (magnitude >> 23)  # to units of 2**-24
    return sign | ((mantissa + (1 << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift)


@device
def float16_to_float32(bits: int) -> int:
    """Return the 32 bits for the 16 bits of a half; exact."""
    sign = (bits & 0x8000) << 16
    magnitude = bits & 0x7FFF
    if magnitude > 0x7C00:
        return sign | 0x7FC00000 | ((magnitude & 0x1FF) << 13)
    if magnitude == 0x7C00:
        return sign | 0x7F800000
    if magnitude >= 0x400:
        return sign | ((magnitude << 13) + 0x38000000)
    if magnitude == 0:
        return sign
    exponent = 113
    while magnitude < 0x400:
        magnitude <<= 1
        exponent -= 1
    return sign | (exponent << 23) | ((magnitude & 0x3FF) << 13)


@dataclass(frozen=True)
class Cast:
    """A cast with its memory accesses.

    Attributes:
        source_bytes: of one element.
        destination_bytes: of one element.
        one: function of (source, destination): casts the element at one address to the other.
        four: the same for four elements, at addresses that are divisible by the size of four.
    """

    source_bytes: int
    destination_bytes: int
    one: Callable[[int, int], None]
    four: Callable[[int, int], None]


def _narrowing(convert: Callable[[int], int]) -> Cast:
    @device
    def one(source: int, destination: int) -> None:
        store2(destination, convert(load4(source)))

    @device
    def four(source: int, destination: int) -> None:
        low, high = load16(source)
        store8(
            destination,
            convert(low & 0xFFFFFFFF)
            | (convert((low >> 32) & 0xFFFFFFFF) << 16)
            | (convert(high & 0xFFFFFFFF) << 32)
            | (convert((high >> 32) & 0xFFFFFFFF) << 48),
        )

    return Cast(4, 2, one, four)


def _widening(convert: Callable[[int], int]) -> Cast:
    @device
    def one(source: int, destination: int) -> None:
        store4(destination, convert(load2(source)))

    @device
    def four(source: int, destination: int) -> None:
        halves = load8(source)
        store16(
            destination,
            convert(halves & 0xFFFF) | (convert((halves >> 16) & 0xFFFF) << 32),
            convert((halves >> 32) & 0xFFFF) | (convert((halves >> 48) & 0xFFFF) << 32),
        )

    return Cast(2, 4, one, four)


#: By name. The name of a kernel that casts ends with an underscore and the name of its cast.
CASTS = {
    "float32_to_bfloat16": _narrowing(float32_to_bfloat16),
    "float32_to_float16": _narrowing(float32_to_float16),
    "bfloat16_to_float32": _widening(bfloat16_to_float32),
    "float16_to_float32": _widening(float16_to_float32),
}
