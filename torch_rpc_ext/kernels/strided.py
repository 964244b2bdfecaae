"""Copies between any two strided layouts, casts included, without a temporary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda as _untyped_cuda

from torch_rpc_ext.kernels.memory import device, divide
from torch_rpc_ext.kernels.table import MAX_DIMS

__all__ = ["copy_strided"]

cuda: Any = _untyped_cuda

Dims = tuple[int, int, int, int, int, int, int, int]  # MAX_DIMS of them, the innermost first


@device
def _offsets(
    index: int, sizes: Dims, source_strides: Dims, destination_strides: Dims
) -> tuple[int, int]:
    """Return how far element `index` is from the first one, at source and destination, bytes."""
    source = 0
    destination = 0
    for dim in range(MAX_DIMS):
        # Unused dimensions come last: index is 0 when the loop reaches them.
        if index != 0:
            outer = divide(index, sizes[dim])
            position = index - outer * sizes[dim]
            source += position * source_strides[dim]
            destination += position * destination_strides[dim]
            index = outer
    return source, destination


def copy_strided(
    one: Callable[[int, int], None],
) -> Callable[[int, int, int, Dims, Dims, Dims], None]:
    """Make the kernel whose threads go through all elements, in the order of the sizes.

    Args:
        one: function of (source, destination), the addresses of one element: copies or casts it.

    Returns:
        The kernel, for any grid of one dimension. The innermost dimension comes first; sizes of
        dimensions that are not in use are 1. Strides are in bytes.
    """

    def kernel(
        source: int,
        destination: int,
        elements: int,
        sizes: Dims,
        source_strides: Dims,
        destination_strides: Dims,
    ) -> None:
        index = cuda.grid(1)
        while index < elements:
            from_source, from_destination = _offsets(
                index, sizes, source_strides, destination_strides
            )
            one(source + from_source, destination + from_destination)
            index += cuda.gridsize(1)

    return kernel
