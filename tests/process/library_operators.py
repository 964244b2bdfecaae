"""Operators that workers define in Python with torch.library, and how they are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

#: Kept: what it has defined goes with it.
_libraries: list[Any] = []


def define(schema: str) -> None:
    """Define an operator of the namespace tests_library here: it doubles its first argument."""
    library: Any = torch.library.Library("tests_library", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(schema)
    library.impl(schema.partition("(")[0], _double, "CompositeExplicitAutograd")
    _libraries.append(library)


def _double(x: Tensor, *_rest: Any) -> Tensor:
    return x * 2


def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it on worker1."""
    return rpc.rpc_sync("worker1", operator, args=args, kwargs=kwargs)
