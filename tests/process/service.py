"""A service for the tests of the option allow_list: listed as a module, or function by function."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

#: Reachable through this module, but not defined in it.
run_command = os.system


def add(a: Any, b: Any) -> Any:
    return a + b


def fail(text: str) -> None:
    raise ValueError(text)


def call_back(worker: str) -> Any:
    """Takes what another worker answers."""
    return rpc.rpc_sync(worker, evil_answer)


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def evil_answer() -> Any:
    return Evil("/dev/null")


class Counter:
    """State at its owner."""

    step = 1

    def __init__(self) -> None:
        self.value = 0

    def count(self) -> int:
        self.value += self.step
        return self.value

    def _reset(self) -> None:
        self.value = 0


class Double(torch.nn.Module):
    """For a RemoteModule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@torch.jit.script
def script_add(a: Tensor, b: Tensor) -> Tensor:
    return a + b
