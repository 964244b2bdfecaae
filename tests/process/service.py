"""A service for the tests of the option allow_list: listed as a module, or function by function."""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc

#: Reachable through this module, but not defined in it.
run_command = os.system
neg = torch.neg


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


class Journal:
    """Has what opcodes of pickle look for, and more; it writes down that it was used."""

    def __init__(self, path: str = "") -> None:
        self.path = path

    def append(self, value: Any) -> None:
        Path(self.path).touch()

    def local_value(self) -> Any:
        self.append(None)
        return self

    extend = add = __setitem__ = step = forward = parameters = append  # type: ignore[assignment]

    def __call__(self, *_: Any) -> None:
        self.append(None)

    @classmethod
    def of(cls, path: str) -> Journal:
        return cls(path)


class Shout(ValueError):
    """An exception with a property that runs code."""

    path = ""

    @property
    def loud(self) -> bool:
        return True

    @loud.setter
    def loud(self, path: str) -> None:
        Path(path).touch()


def pick_function() -> Any:
    """Returns what nobody listed."""
    return os.system


def pick_class() -> Any:
    return type


def serve_through(function: Any, *args: Any) -> Any:
    """Calls what it is given: what a pickle can hold must be harmless here too."""
    return function(*args)


@dataclasses.dataclass(frozen=True)
class Point:
    """Plain data of a class of its own."""

    x: Any
    y: Any = len


class Names(list):  # type: ignore[type-arg]
    """A list of a class of its own."""


class Pair(NamedTuple):
    """A tuple of a class of its own."""

    a: Any
    b: Any


class Colour(enum.Enum):
    """One of two."""

    RED = 1
    BLUE = 2


@torch.jit.interface
class DoubleInterface:
    """Of a RemoteModule that is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        pass


def call_module(module: Any, x: Tensor) -> Tensor:
    """Call a RemoteModule that has been sent here."""
    result: Tensor = module.forward(x)
    return result


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
