"""All kernels, by name. Imports numba."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_rpc_ext.kernels.casts import CASTS
from torch_rpc_ext.kernels.integrity import checksum
from torch_rpc_ext.kernels.memory import COPY
from torch_rpc_ext.kernels.segments import copy_segments
from torch_rpc_ext.kernels.strided import copy_strided
from torch_rpc_ext.kernels.table import MAX_DIMS

__all__ = ["KERNELS", "Kernel"]


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: the key in KERNELS.
        function: the Python function that numba compiles or simulates.
        arguments: (name, count) of each, in order: an argument is `count` int64.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[str, int], ...]


_SEGMENTS = (("table", 1), ("rows", 1), ("chunks", 1), ("chunk_elements", 1))
_STRIDED = (
    ("source", 1),
    ("destination", 1),
    ("elements", 1),
    ("sizes", MAX_DIMS),
    ("source_strides", MAX_DIMS),
    ("destination_strides", MAX_DIMS),
)
_CHECKSUM = (("source", 1), ("size", 1), ("result", 1))

_ALL = (
    Kernel("segments", copy_segments(None), _SEGMENTS),
    *(Kernel(f"segments_{name}", copy_segments(cast), _SEGMENTS) for name, cast in CASTS.items()),
    *(Kernel(f"strided_{width}", copy_strided(copy), _STRIDED) for width, copy in COPY.items()),
    *(Kernel(f"strided_{name}", copy_strided(cast.one), _STRIDED) for name, cast in CASTS.items()),
    Kernel("checksum", checksum, _CHECKSUM),
)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ALL}
