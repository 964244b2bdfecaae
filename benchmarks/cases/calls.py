"""Synchronous calls, one after the other."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.backends.interface import Backend
from benchmarks.cases.interface import CallCase, Figures, Metric


class SyncCalls(CallCase):
    """Calls of one function with one tensor.

    Args:
        name: on the command line.
        title: in the table.
        function: name in functions.py.
        payload: size of the tensor argument, bytes; 0 for no argument.
        calls: in one round.
        rounds: by default.
        floor: the prototype's ratio.
    """

    def __init__(
        self,
        name: str,
        title: str,
        function: str,
        payload: int,
        *,
        calls: int,
        rounds: int,
        floor: float,
    ) -> None:
        super().__init__(name, {"time": Metric(title, "s", floor)}, rounds, frozenset({function}))
        self.function, self.payload, self.calls = function, payload, calls
        self.arguments: tuple[Any, ...] | None = None

    def measure(self, backend: Backend) -> Figures:
        call, clock, function = backend.call, time.perf_counter, self.function
        if self.arguments is None:  # the first round, which is not counted
            self.arguments = self._make_arguments()
            self._check(call(1, function, *self.arguments))
        arguments = self.arguments
        times = []
        for _ in range(self.calls):
            start = clock()
            call(1, function, *arguments)
            times.append(clock() - start)
        return {"time": times}

    def _make_arguments(self) -> tuple[Any, ...]:
        if not self.payload:
            return ()
        tensor = torch.arange(self.payload // 4, dtype=torch.float32)
        # Not a number as the second: torch finds the operator for that by catching an exception,
        # which takes longer than the call.
        return (tensor, tensor) if self.function == "add" else (tensor,)

    def _check(self, answer: Any) -> None:
        # A wrong answer that comes fast is not a result.
        if self.arguments:
            wanted = sum(self.arguments) if self.function == "add" else self.arguments[0]
            if not torch.equal(answer, wanted):
                raise RuntimeError(f"{self.name}: the answer is wrong")


CASES = [
    SyncCalls("empty", "empty python call", "nothing", 0, calls=200, rounds=12, floor=1.6),
    SyncCalls("builtin", "builtin add, 4 B", "add", 4, calls=200, rounds=12, floor=3.0),
    SyncCalls(
        "script", "TorchScript identity, 4 B", "script_identity", 4, calls=200, rounds=12, floor=3.5
    ),
    SyncCalls("python", "python identity, 4 B", "identity", 4, calls=200, rounds=12, floor=2.4),
    SyncCalls(
        "python-64k", "python identity, 64 KB", "identity", 65536, calls=150, rounds=12, floor=2.2
    ),
    SyncCalls(
        "python-4m", "python identity, 4 MB", "identity", 4_000_000, calls=40, rounds=12, floor=2.4
    ),
    SyncCalls(
        "python-400m",
        "python identity, 400 MB",
        "identity",
        400_000_000,
        calls=2,
        rounds=9,
        floor=10.1,
    ),
]
