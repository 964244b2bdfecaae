"""Memory at raw addresses, on the GPU: LLVM instructions behind numba-cuda's intrinsics.

All values are int64. Numba gives every operation of an int64 and an unsigned integer the type
float64, so nothing here is unsigned; addresses, which are below 2**63, fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import extending, types

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_PAIR = ir.VectorType(_I64, 2)
_GLOBAL = 1  # NVVM's address space: memory of a device, of a peer, or pinned memory of the host

Function = Callable[..., Any]


def intrinsic(function: Function) -> Any:
    """Make an intrinsic, of a function that returns a signature and what generates its code."""
    return extending.intrinsic(function)


def _pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(element, addrspace=_GLOBAL))


def _load(width: int) -> Any:
    element = ir.IntType(8 * width)

    def load(typing: Any, address: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(_pointer(builder, arguments[0], element), align=width)
            return builder.zext(value, _I64)

        return types.int64(types.int64), lower

    return intrinsic(load)


def _store(width: int) -> Any:
    element = ir.IntType(8 * width)

    def store(typing: Any, address: Any, value: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.trunc(arguments[1], element)
            builder.store(value, _pointer(builder, arguments[0], element), align=width)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), lower

    return intrinsic(store)


load1, load2, load4, load8 = (_load(width) for width in (1, 2, 4, 8))
store1, store2, store4, store8 = (_store(width) for width in (1, 2, 4, 8))


@intrinsic
def load16(typing: Any, address: Any) -> Any:
    """Return the two int64 at an address that is divisible by 16."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = builder.load(_pointer(builder, arguments[0], _PAIR), align=16)
        halves = [builder.extract_element(pair, ir.Constant(_I32, i)) for i in (0, 1)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.int64, 2)(types.int64), lower


@intrinsic
def store16(typing: Any, address: Any, low: Any, high: Any) -> Any:
    """Store two int64 at an address that is divisible by 16."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = ir.Constant(_PAIR, ir.Undefined)
        for i in (0, 1):
            pair = builder.insert_element(pair, arguments[1 + i], ir.Constant(_I32, i))
        builder.store(pair, _pointer(builder, arguments[0], _PAIR), align=16)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), lower


@intrinsic
def atomic_add8(typing: Any, address: Any, value: Any) -> Any:
    """Add to the 64-bit integer at an address, modulo 2**64."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(builder, arguments[0], _I64)
        builder.atomic_rmw("add", pointer, arguments[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), lower


@intrinsic
def divide(typing: Any, dividend: Any, divisor: Any) -> Any:
    """Return the quotient of two integers that are not negative; the divisor is not 0.

    Python's // would add a test for 0 and a correction for negative numbers.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.udiv(*arguments)

    return types.int64(types.int64, types.int64), lower


@intrinsic
def shift_right(typing: Any, value: Any, bits: Any) -> Any:
    """Return the 64 bits of a value, shifted right; zeros come in from the left."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(*arguments)

    return types.int64(types.int64, types.int64), lower


@intrinsic
def wrap(typing: Any, value: Any) -> Any:
    """Return the value modulo 2**64, as an int64: on the GPU it is that already."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    return types.int64(types.int64), lower


_RETURNS = {
    "int": types.int64,
    "tuple[int, int]": types.UniTuple(types.int64, 2),
    "None": types.void,
}


def device(function: Function) -> Any:
    """Make an intrinsic of a Python function, compiled for the kernel that calls it.

    numba-cuda's own device functions (cuda.jit, overload) ask for the GPU of this machine, even
    where they are compiled for another one; so they cannot be compiled without one.
    """
    returns = _RETURNS[function.__annotations__["return"]]

    def call(typing: Any, *arguments: Any) -> Any:
        taken = [a if isinstance(a, types.UniTuple) else types.int64 for a in arguments]

        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return context.compile_internal(builder, function, signature, arguments)

        return returns(*taken), lower

    call.__name__ = function.__name__
    # Numba matches the arguments of a call against this signature.
    itself = next(iter(inspect.signature(call).parameters.values()))
    own = inspect.signature(function).parameters.values()
    call.__signature__ = inspect.Signature([itself, *own])  # type: ignore[attr-defined]
    return intrinsic(call)
