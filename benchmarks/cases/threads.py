"""Calls from several threads of one caller at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.backends.interface import Backend
from benchmarks.cases.interface import CallCase, Figures, Metric


class Threads(CallCase):
    """Each thread makes one small builtin call after the other.

    Args:
        threads: how many.
    """

    each = 100  # calls of a thread in a round

    def __init__(self, threads: int) -> None:
        metrics = {
            "time": Metric(f"builtin from {threads} threads, per call"),
            "latency": Metric("  one call"),
        }
        super().__init__(f"threads-{threads}", metrics, 10, frozenset({"add"}))
        self.threads, self.calls = threads, threads * self.each
        self.pool: ThreadPoolExecutor | None = None

    def measure(self, backend: Backend) -> Figures:
        if self.pool is None:  # kept for all rounds, so that starting threads is not measured
            self.pool = ThreadPoolExecutor(self.threads)
        start = time.perf_counter()
        calls = [self.pool.submit(self._call, backend) for _ in range(self.threads)]
        latencies = [latency for call in calls for latency in call.result()]
        return {"time": [(time.perf_counter() - start) / self.calls], "latency": latencies}

    def _call(self, backend: Backend) -> list[float]:
        small, latencies = torch.ones(1), []
        for _ in range(self.each):
            start = time.perf_counter()
            backend.call(1, "add", small, small)
            latencies.append(time.perf_counter() - start)
        return latencies


CASES = [Threads(8)]
