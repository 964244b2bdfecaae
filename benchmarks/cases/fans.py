"""One worker and eight others: it calls all at once, or all call it at once."""

from __future__ import annotations

import time

from benchmarks.backends.interface import CALLERS, Backend
from benchmarks.cases.calls import elements
from benchmarks.cases.interface import CallCase, Figures, Metric

_OTHERS = 8


class FanOut(CallCase):
    """Worker 0 calls identity on all others at once and waits for all answers; time of that.

    Args:
        name: on the command line.
        title: in the table.
        payload: size of the tensor for each, bytes.
        times: how often in a round.
    """

    size = 1 + _OTHERS

    def __init__(self, name: str, title: str, payload: int, times: int) -> None:
        super().__init__(name, {"time": Metric(title)}, 7, frozenset({"identity"}))
        self.payload, self.calls = payload, times

    def measure(self, backend: Backend) -> Figures:
        tensor, times = elements(self.payload), []
        for _ in range(self.calls):
            start = time.perf_counter()
            pending = [backend.call_async(rank, "identity", tensor) for rank in range(1, self.size)]
            for answer in pending:
                answer.wait()
            times.append(time.perf_counter() - start)
        return {"time": times}


class FanIn(CallCase):
    """All others call identity on worker 0, one call after the other; time of each.

    Args:
        name: on the command line.
        title: in the table.
        payload: size of the tensor, bytes.
        calls: of each caller in a round.
    """

    size = 1 + _OTHERS
    callers = tuple(range(1, 1 + _OTHERS))

    def __init__(self, name: str, title: str, payload: int, calls: int) -> None:
        super().__init__(name, {"time": Metric(title)}, 7, frozenset({"identity", CALLERS}))
        self.payload, self.calls = payload, calls

    def measure(self, backend: Backend) -> Figures:
        tensor, times = elements(self.payload), []
        for _ in range(self.calls):
            start = time.perf_counter()
            backend.call(0, "identity", tensor)
            times.append(time.perf_counter() - start)
        return {"time": times}


CASES = [
    FanOut("fan-out", f"fan-out to {_OTHERS}, python, 4 B", 4, 40),
    FanOut("fan-out-4m", f"fan-out to {_OTHERS}, python, 4 MB", 4_000_000, 5),
    FanIn("fan-in", f"fan-in from {_OTHERS}, python, 4 B", 4, 40),
    FanIn("fan-in-4m", f"fan-in from {_OTHERS}, python, 4 MB", 4_000_000, 5),
]
