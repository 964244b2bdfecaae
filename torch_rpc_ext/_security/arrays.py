"""NumPy's arrays, scalars and dtypes in a peer's pickle, for every allow-list.

NumPy's own functions believe what a pickle says of sizes and fields. So these stand in their place,
and NumPy gets a state only if NumPy itself would write the same state for an array of these bytes,
or for a dtype that a short text names. Arrays of Python objects, arrays with fields and subclasses
of ndarray are refused.

NumPy is imported by the first array that arrives.

Source: numpy/_core/src/multiarray/methods.c, array_reduce() and array_setstate(); descriptor.c,
arraydescr_reduce() and arraydescr_setstate(); numpy/_core/numeric.py, _frombuffer().
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch_rpc_ext._security.entries import Entry

__all__ = ["enter"]

_ARRAY = "numpy.ndarray"
# The kind of an element and, for most kinds, how many bytes or characters it has.
_ELEMENT = re.compile(r"[biufcSUVmM][0-9]{0,9}")
_UNITS = {"generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"}
_MOST_DIMENSIONS = 64
_MOST_BYTES = (1 << 63) - 1
_ADVICE = "cannot be sent to a worker with allow_list: send its parts as arrays of numbers or texts"


def enter(entries: dict[str, Entry]) -> None:
    """Add what pickles of arrays name; where the user has listed the name, it still serves."""
    builders: dict[str, tuple[Any, Any]] = {
        _ARRAY: (None, None),
        "numpy.dtype": (_dtype, _set_dtype),
    }
    for package in ("numpy._core", "numpy.core"):  # NumPy 2 and 1
        builders[f"{package}.multiarray._reconstruct"] = _reconstruct, _set_array
        builders[f"{package}.multiarray.scalar"] = _scalar, None
        builders[f"{package}.numeric._frombuffer"] = _from_buffer, None
    for name, (build, set_state) in builders.items():
        listed = entries.get(name, Entry(name))
        entries[name] = replace(listed, build=build, new=None, set_state=set_state)


def _reconstruct(cls: Any, *_: Any) -> Any:
    import numpy

    if cls is not numpy.ndarray and not (type(cls) is Entry and cls.name == _ARRAY):
        raise ValueError(f"a subclass of NumPy's ndarray {_ADVICE}")
    return numpy.ndarray((0,), "b")


def _set_array(array: Any, state: Any) -> None:
    version, shape, dtype, is_fortran, data = _of_size(5, state)
    if type(version) is not int or type(is_fortran) is not bool or type(data) is not bytes:
        raise _not_pickled("array")
    _check_size(shape, dtype, data)
    array.__setstate__(state)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    import numpy

    if type(data) not in (bytes, bytearray) or type(order) is not str:
        raise _not_pickled("array")
    _check_size(shape, dtype, data)
    array = numpy.ndarray(shape, dtype, data, order="F" if order == "F" else "C")
    return array if axes is None else array.transpose(axes)


def _scalar(dtype: Any, data: Any) -> Any:
    import numpy

    if type(data) is not bytes:
        raise _not_pickled("scalar")
    _check_size((), dtype, data)
    return numpy.ndarray((), dtype, data)[()]


def _check_size(shape: Any, dtype: Any, data: Any) -> None:
    """Raise ValueError unless the bytes are exactly those of an array of plain elements."""
    import numpy

    if (
        type(shape) is not tuple
        or len(shape) > _MOST_DIMENSIONS
        or not all(type(size) is int and size >= 0 for size in shape)
        or not issubclass(type(dtype), numpy.dtype)
    ):
        raise _not_pickled("array")
    if dtype.hasobject or dtype.fields is not None:
        raise ValueError(f"a NumPy array of objects, or with fields, {_ADVICE}")
    # Also without elements, because strides are products of sizes.
    extent = math.prod(max(size, 1) for size in shape) * max(dtype.itemsize, 1)
    if math.prod(shape) * dtype.itemsize != len(data) or extent > _MOST_BYTES:
        raise _not_pickled("array")
    if dtype.kind == "U" and data:
        code_points = numpy.frombuffer(data, numpy.dtype("u4").newbyteorder(dtype.byteorder))
        if code_points.max() > sys.maxunicode:
            raise _not_pickled("array")


def _dtype(text: Any, *_: Any) -> Any:
    import numpy

    if type(text) is str and text.startswith("O"):
        raise ValueError(f"a NumPy array of objects {_ADVICE}")
    if type(text) is not str or not _ELEMENT.fullmatch(text):
        raise _not_pickled("dtype")
    # A copy, because its state is still to be set: NumPy has each dtype of numbers once.
    made: Callable[..., Any] = numpy.dtype
    return made(text, False, True)


def _set_dtype(dtype: Any, state: Any) -> None:
    is_date = dtype.kind in "mM"
    fields = _of_size(9 if is_date else 8, state)
    if type(fields[3]) is tuple:
        raise ValueError(f"a NumPy array with fields {_ADVICE}")
    like = _dates(dtype.kind, fields[8]) if is_date else dtype
    if not any(_same(state, like.newbyteorder(order).__reduce__()[2]) for order in "<>"):
        raise _not_pickled("dtype")
    dtype.__setstate__(state)


def _dates(kind: str, metadata: Any) -> Any:
    """Return the dtype of dates (M) or of time spans (m) that the end of a state describes."""
    import numpy

    name, count, *_ = _of_size(4, _of_size(2, metadata)[1])
    unit = name.decode("ascii", "replace") if type(name) is bytes else ""
    if unit not in _UNITS or type(count) is not int or not 0 < count < 1 << 31:
        raise _not_pickled("dtype")
    return numpy.dtype(f"{kind}8" if unit == "generic" else f"{kind}8[{count}{unit}]")


def _of_size(size: int, given: Any) -> tuple[Any, ...]:
    if type(given) is not tuple or len(given) != size:
        raise _not_pickled("array or dtype")
    return given


def _same(given: Any, expected: Any) -> bool:
    """Return whether two values are equal, without a call of an == that the peer has chosen."""
    if type(given) is not type(expected):
        return False
    if type(expected) is tuple:
        return len(given) == len(expected) and all(map(_same, given, expected))
    return bool(given == expected)


def _not_pickled(what: str) -> ValueError:
    return ValueError(f"not what a NumPy {what} is pickled as")
