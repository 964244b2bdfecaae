"""wire_dtype(): the dtype with which the float32 tensors of some calls travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch_rpc_ext._base.option_checks import wire_dtype_number
from torch_rpc_ext._native import loader

if TYPE_CHECKING:
    import torch


@contextmanager
def wire_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Send the float32 tensors of calls, and of their answers, as another dtype.

    ::

        with torch_rpc_ext.wire_dtype(torch.bfloat16):
            half = rpc.rpc_sync("worker1", torch.neg, args=(x,))

    The block holds for calls that this thread begins in it. It wins over the option wire_dtype of
    this worker and of the workers that answer. Of nested blocks the innermost counts. On TENSORPIPE
    the block does nothing.

    The block belongs to the thread: in a coroutine, begin calls in the block and await them outside
    of it. It holds for all attempts of a call that RetryPolicy.rpc_async() begins in it. The block
    does not hold for calls that the called function makes, nor for the backward pass of distributed
    autograd.

    Args:
        dtype: torch.bfloat16 or torch.float16; torch.float32 or None to send tensors as they are.

    Raises:
        TypeError: `dtype` is no dtype.
        ValueError: `dtype` is another dtype.
    """
    with as_in_block(wire_dtype_number("dtype", dtype)):
        yield


@contextmanager
def as_in_block(number: int | None) -> Iterator[None]:
    """Begin calls as in a block of wire_dtype().

    Args:
        number: of the block's dtype, as of_block() returns it; None as outside of all blocks.
    """
    # Without the extension module there are no blocks, and TENSORPIPE needs no such module.
    native = loader.loaded() if number is None else loader.load()
    if native is None:
        yield
        return
    before = native.set_call_dtype(number)
    try:
        yield
    finally:
        native.set_call_dtype(before)


def of_block() -> int | None:
    """Return the number of the dtype of this thread's innermost block, None outside of blocks."""
    native = loader.loaded()
    if native is None:
        return None  # a block loads the extension module
    number: int | None = native.set_call_dtype(None)
    native.set_call_dtype(number)
    return number
