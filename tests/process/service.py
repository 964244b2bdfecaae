"""A service for the tests of the option allow_list, which list it as a module or function by
function."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc

#: An attribute of this module that another module defines.
run_command = os.system
neg = torch.neg


def add(a: Any, b: Any) -> Any:
    return a + b


def fail(text: str) -> None:
    raise ValueError(text)


def call_back(worker: str) -> Any:
    """Call another worker and return its answer."""
    return rpc.rpc_sync(worker, evil_answer)


class Evil:
    """An object that runs a command where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def evil_answer() -> Any:
    return Evil("/dev/null")


class Counter:
    """A class whose instance stays at the RRef's owner."""

    step = 1

    def __init__(self) -> None:
        self.value = 0

    def count(self) -> int:
        self.value += self.step
        return self.value

    def _reset(self) -> None:
        self.value = 0


class Journal:
    """Has the methods that opcodes of pickle call, and others; records each use."""

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


class Diary(Journal):
    """Has a state of its own form."""

    def __getstate__(self) -> Any:
        return [("path", self.path)]

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class Shout(ValueError):
    """An exception with a property that runs code."""

    path = ""

    @property
    def loud(self) -> bool:
        return True

    @loud.setter
    def loud(self, path: str) -> None:
        Path(path).touch()


def path_of(journal: Journal) -> str:
    return journal.path


def pick_function() -> Any:
    """Return a function that the allow-list does not name."""
    return os.system


def pick_class() -> Any:
    return type


def serve_through(function: Any, *args: Any) -> Any:
    """Call the argument: whatever a pickle may contain must be harmless when it is called."""
    return function(*args)


@dataclasses.dataclass(frozen=True)
class Point:
    """A class of plain data."""

    x: Any
    y: Any = len


@dataclasses.dataclass(frozen=True)
class Vector:
    """A class that computes a value once."""

    x: float
    y: float

    @functools.cached_property
    def length(self) -> float:
        return math.hypot(self.x, self.y)


class Names(list):  # type: ignore[type-arg]
    """A subclass of list."""


class Pair(NamedTuple):
    """A subclass of tuple."""

    a: Any
    b: Any


class Colour(enum.Enum):
    """An enum."""

    RED = 1
    BLUE = 2


@torch.jit.interface
class DoubleInterface:
    """The interface for a RemoteModule that TorchScript compiles."""

    def forward(self, x: Tensor) -> Tensor:
        pass


def call_module(module: Any, x: Tensor) -> Tensor:
    """Call a RemoteModule that this worker has been sent."""
    result: Tensor = module.forward(x)
    return result


class Double(torch.nn.Module):
    """The module of a RemoteModule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@torch.jit.script
def script_add(a: Tensor, b: Tensor) -> Tensor:
    return a + b
