"""One worker and eight others: it calls all at once, or all call it at once."""

from __future__ import annotations

import time

import numpy as np
from torch import Tensor

from benchmarks.backends.interface import CALLERS, Backend
from benchmarks.cases.calls import elements
from benchmarks.cases.interface import CallCase, Figures, Metric, Target

_OTHERS = 8
# How many times a tensor that goes to all others lies in memory at once: as bytes of a message and
# as a tensor, at both ends.
_COPIES = {"tensorpipe": 2 * _OTHERS, "limit": _OTHERS, "grpc": 4 * _OTHERS, "ray": 4 * _OTHERS}


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


class ToAll(CallCase):
    """Worker 0 sends one tensor to all others and waits until all have it; time of that, also in
    plain copies of the tensor by one core.

    Args:
        name: on the command line.
        payload: size of the tensor, bytes.
        times: how often in a round.
        targets: of the number of copies.
        long: measured only when asked for.
    """

    size = 1 + _OTHERS

    def __init__(
        self,
        name: str,
        payload: int,
        times: int,
        *,
        targets: tuple[Target, ...] = (),
        long: bool = False,
    ) -> None:
        amount = f"{payload // 10**9} GB" if payload >= 10**9 else f"{payload // 10**6} MB"
        metrics = {
            "time": Metric(f"one tensor of {amount} to {_OTHERS} workers"),
            "copies": Metric("  in copies by memcpy", "n", targets),
        }
        super().__init__(name, metrics, 5, frozenset({"first"}))
        self.payload, self.calls, self.long = payload, times, long

    def memory(self, backend: str) -> int:
        return super().memory(backend) + _COPIES.get(backend, 1) * self.payload

    def measure(self, backend: Backend) -> Figures:
        tensor, times = elements(self.payload), []
        others = range(1, self.size)
        for _ in range(self.calls):
            start = time.perf_counter()
            for answer in backend.call_many(others, "first", tensor):
                answer.wait()
            times.append(time.perf_counter() - start)
        copy = _time_of_a_copy(tensor)
        return {"time": times, "copies": [one / copy for one in times]}


def _time_of_a_copy(tensor: Tensor) -> float:
    """The best of three copies by one core into memory that is mapped, s."""
    source = tensor.numpy()
    into, best = source.copy(), float("inf")
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(into, source)
        best = min(best, time.perf_counter() - start)
    return best


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
    ToAll("to-all-4m", 4_000_000, 10),
    ToAll("to-all-1g", 1_000_000_000, 1, targets=(Target(2.0, 1.3, "value"),), long=True),
    FanIn("fan-in", f"fan-in from {_OTHERS}, python, 4 B", 4, 40),
    FanIn("fan-in-4m", f"fan-in from {_OTHERS}, python, 4 MB", 4_000_000, 5),
]
