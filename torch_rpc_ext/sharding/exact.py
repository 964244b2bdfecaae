"""Calls whose tensors arrive as they are, whatever option wire_dtype the workers have.

The option rounds float32 tensors, which activations and gradients bear. Weights and the state of an
optimizer do not bear it: torch counts the steps of Adam in a float32 tensor, and bfloat16 has no
257.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_rpc_ext._calls.wire_dtype import wire_dtype
from torch_rpc_ext._group import sessions

__all__ = ["exact"]


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Begin calls within the block whose tensors, and those of whose answers, are not rounded."""
    if sessions.current() is None:
        yield  # TENSORPIPE rounds nothing, and needs no extension module, which wire_dtype() loads
        return
    with wire_dtype(None):
        yield
