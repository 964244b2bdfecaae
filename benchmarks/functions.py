"""What is called on the callee. By name, so that a back end that is not torch's can have its own.

Every worker process imports this file: a TorchScript function must be defined on both sides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def nothing() -> None:
    """The empty call."""


def identity(tensor: Tensor) -> Tensor:
    """Return its argument."""
    return tensor


with warnings.catch_warnings():
    # RPC of TorchScript functions is what upstream offers and what we measure, deprecated or not.
    warnings.simplefilter("ignore", DeprecationWarning)
    script_identity: Any = torch.jit.script(identity)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nothing": nothing,
    "identity": identity,
    "script_identity": script_identity,
    "add": torch.add,
}
