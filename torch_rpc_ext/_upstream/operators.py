"""Operators as functions: torch.ops.name.op, and torch.ops.name.op.overload."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["OPERATORS", "qualified_name"]

#: The classes of both.
OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))


def qualified_name(operator: Any) -> tuple[str, str | None]:
    """Return "name::op" and the overload: '' for the default one, None for no certain one."""
    namespace, name, *overload = str(operator).split(".")
    return f"{namespace}::{name}", overload[0].removeprefix("default") if overload else None
