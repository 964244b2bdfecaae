"""What kernels are written with: memory at raw addresses, and device functions.

Arrays are not used, because numba passes each as seven arguments or more, whose order is its own.
A C++ program that launches a kernel passes addresses and integers, 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba.cuda.core import config

#: Whether numba simulates a GPU here (NUMBA_ENABLE_CUDASIM, read when numba is imported).
SIMULATED = bool(config.ENABLE_CUDASIM)

_memory: Any
if SIMULATED:
    from torch_rpc_ext.kernels import memory_simulator as _memory
else:
    from torch_rpc_ext.kernels import memory_gpu as _memory

__all__ = [
    "COPY",
    "SIMULATED",
    "atomic_add8",
    "device",
    "divide",
    "load1",
    "load2",
    "load4",
    "load8",
    "load16",
    "shift_right",
    "store1",
    "store2",
    "store4",
    "store8",
    "store16",
    "wrap",
]

Load = Callable[[int], int]  # of an address
Store = Callable[[int, int], None]  # of an address and a value

load1, load2, load4, load8 = (cast(Load, getattr(_memory, f"load{n}")) for n in (1, 2, 4, 8))
store1, store2, store4, store8 = (cast(Store, getattr(_memory, f"store{n}")) for n in (1, 2, 4, 8))
load16: Callable[[int], tuple[int, int]] = _memory.load16
store16: Callable[[int, int, int], None] = _memory.store16
atomic_add8: Store = _memory.atomic_add8
divide: Callable[[int, int], int] = _memory.divide
shift_right: Callable[[int, int], int] = _memory.shift_right
wrap: Callable[[int], int] = _memory.wrap

Function = TypeVar("Function", bound=Callable[..., Any])


def device(function: Function) -> Function:
    """Make a function that kernels may call.

    Args:
        function: takes integers (int64) and tuples of them; returns int, tuple[int, int] or None,
            as its annotation says.

    Returns:
        The function itself in the simulator; else something that only kernels can call.
    """
    return _memory.device(function)  # type: ignore[no-any-return]


def _copier(load: Load, store: Store) -> Callable[[int, int], None]:
    @device
    def copy(source: int, destination: int) -> None:
        store(destination, load(source))

    return copy


@device
def _copy16(source: int, destination: int) -> None:
    low, high = load16(source)
    store16(destination, low, high)


#: Bytes -> function of (source, destination), both addresses divisible by that number of bytes.
COPY: dict[int, Callable[[int, int], None]] = {
    1: _copier(load1, store1),
    2: _copier(load2, store2),
    4: _copier(load4, store4),
    8: _copier(load8, store8),
    16: _copy16,
}
