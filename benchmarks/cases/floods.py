"""Many asynchronous calls at once."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.backends.interface import Backend
from benchmarks.cases.interface import CallCase, Figures, Metric, Target


class Flood(CallCase):
    """Calls that are all started before the first answer is waited for; time per call.

    Args:
        name: on the command line.
        title: in the table.
        function: name in functions.py.
        arguments: of each call.
        target: of the time per call.
    """

    calls = 2000

    def __init__(
        self, name: str, title: str, function: str, arguments: tuple[Any, ...], target: Target
    ) -> None:
        super().__init__(name, {"time": Metric(title, "s", (target,))}, 10, frozenset({function}))
        self.function, self.arguments = function, arguments

    def measure(self, backend: Backend) -> Figures:
        start = time.perf_counter()
        pending = [backend.call_async(1, self.function, *self.arguments) for _ in range(self.calls)]
        for answer in pending:
            answer.wait()
        return {"time": [(time.perf_counter() - start) / self.calls]}


_FOUR_BYTES = torch.ones(1)

CASES = [
    Flood(
        "flood-builtin",
        "2000 async builtin, per call",
        "add",
        (_FOUR_BYTES, _FOUR_BYTES),
        Target(3, 5),
    ),
    Flood(
        "flood-python", "2000 async python, per call", "identity", (_FOUR_BYTES,), Target(2.8, 4)
    ),
]
