"""wire_dtype(): what the float32 tensors of some calls travel as."""

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
    """Send the float32 tensors of the calls that this thread begins inside as another dtype.

    Their answers too. It wins over the option wire_dtype, of this worker and of those that answer.
    Blocks may be nested; the innermost counts. On TENSORPIPE it does nothing.

    It belongs to the thread: in a coroutine, begin calls inside and await them outside. Calls that
    the called function makes, and the backward pass of distributed autograd, are not inside.

    Args:
        dtype: torch.bfloat16 or torch.float16; torch.float32 or None to send them as they are.

    Raises:
        TypeError: it is no dtype.
        ValueError: it is another one.
    """
    native = loader.load()
    before = native.set_call_dtype(wire_dtype_number("dtype", dtype))
    try:
        yield
    finally:
        native.set_call_dtype(before)
