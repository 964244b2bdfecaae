"""The functions that are called on the callee; other back ends have their own under these names.

Every worker process imports this file: a TorchScript function must be defined on both sides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.jit import _builtins
from torch.library import Library


def nothing() -> None:
    """The empty call."""


def identity(tensor: Tensor) -> Tensor:
    """Return its argument."""
    return tensor


def identity_all(tensors: list[Tensor]) -> list[Tensor]:
    """Return its argument, a list."""
    return tensors


def first(tensor: Tensor) -> Tensor:
    """Return a copy of the first element: of a large argument little comes back."""
    return tensor[:1].clone()


def operate(tensor: Tensor) -> Tensor:
    """Return its argument after 200 elementwise operations in place; all elements approach 2."""
    for _ in range(100):
        tensor.mul_(0.5).add_(1.0)
    return tensor


with warnings.catch_warnings():
    # TorchScript is deprecated, but its functions can be called remotely, so they are measured.
    warnings.simplefilter("ignore", DeprecationWarning)
    script_identity: Any = torch.jit.script(identity)
    script_operate: Any = torch.jit.script(operate)


# A builtin call names an operator of torch. torch has no operator that does 200 operations, so this
# registers one, in the library "aten" because rpc finds operators only there, and enters it in the
# table in which rpc looks up callables.
_LIBRARY: Any = Library("aten", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("rpc_benchmarks_operate(Tensor(a!) tensor) -> Tensor(a!)")
_LIBRARY.impl("rpc_benchmarks_operate", operate, "CPU")
_builtins._register_builtin(torch.ops.aten.rpc_benchmarks_operate, "aten::rpc_benchmarks_operate")

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nothing": nothing,
    "identity": identity,
    "identity_all": identity_all,
    "first": first,
    "operate": operate,
    "script_identity": script_identity,
    "script_operate": script_operate,
    "builtin_identity": torch.positive,
    "builtin_operate": torch.ops.aten.rpc_benchmarks_operate,
    "add": torch.add,
}

#: The functions that back ends other than torch's call too.
PYTHON_FUNCTIONS = frozenset({"nothing", "identity", "identity_all", "first", "operate", "add"})
