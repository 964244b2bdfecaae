"""Memory at raw addresses, in numba's CUDA simulator: the host's memory, through ctypes.

The same functions as memory_gpu.py. A misaligned address is an error here as on a GPU.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_BITS = (1 << 64) - 1
_adding = threading.Lock()


def _check(address: int, width: int) -> None:
    if address % width:
        raise ValueError(f"access of {width} bytes at misaligned address {address:#x}")


def _load(width: int) -> Callable[[int], int]:
    def load(address: int) -> int:
        _check(address, width)
        # 8 bytes fill the int64, sign included; fewer are extended by zeros.
        return int.from_bytes(ctypes.string_at(address, width), "little", signed=width == 8)

    return load


def _store(width: int) -> Callable[[int, int], None]:
    def store(address: int, value: int) -> None:
        _check(address, width)
        kept = value & ((1 << 8 * width) - 1)
        ctypes.memmove(address, kept.to_bytes(width, "little"), width)

    return store


load1, load2, load4, load8 = (_load(width) for width in (1, 2, 4, 8))
store1, store2, store4, store8 = (_store(width) for width in (1, 2, 4, 8))


def load16(address: int) -> tuple[int, int]:
    """Return the two int64 at an address that is divisible by 16."""
    _check(address, 16)
    return load8(address), load8(address + 8)


def store16(address: int, low: int, high: int) -> None:
    """Store two int64 at an address that is divisible by 16."""
    _check(address, 16)
    store8(address, low)
    store8(address + 8, high)


def atomic_add8(address: int, value: int) -> None:
    """Add to the 64-bit integer at an address, modulo 2**64."""
    with _adding:
        store8(address, load8(address) + value)


def divide(dividend: int, divisor: int) -> int:
    """Return the quotient of two integers that are not negative; the divisor is not 0."""
    return dividend // divisor


def shift_right(value: int, bits: int) -> int:
    """Return the 64 bits of a value, shifted right; zeros come in from the left."""
    return wrap((value & _BITS) >> bits)


def wrap(value: int) -> int:
    """Return the value modulo 2**64, as an int64."""
    value = int(value) & _BITS
    return value - (1 << 64) if value >> 63 else value


def device(function: Function) -> Function:
    """Return the function: threads of the simulator are Python's, and call it as it is."""
    return function
