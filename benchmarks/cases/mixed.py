"""Small calls while another thread moves large tensors."""

from __future__ import annotations

import threading
import time

import torch

from benchmarks.backends.interface import Backend
from benchmarks.cases.interface import CallCase, Figures, Metric

_BULK = 200_000_000  # bytes of a large tensor
_SECONDS = 0.6  # of a round
_LEAST = 4  # small calls in a round, however long they take


class SmallDuringBulk(CallCase):
    """Latency of a builtin, and what the other thread moves meanwhile, both ways added."""

    def __init__(self) -> None:
        title = "builtin while 200 MB tensors move"
        metrics = {
            # The prototype's table has the medians, 106751 and 95 us, and GB/s.
            "time": Metric(title, "s", 1100),
            "tail": Metric("  its 99th percentile", "s", tail=True),
            "bulk": Metric("  bulk meanwhile", "B/s", 4.7, more_is_better=True),
        }
        super().__init__("small-during-bulk", metrics, 7, frozenset({"add", "identity"}))
        self.bulk: torch.Tensor | None = None

    def measure(self, backend: Backend) -> Figures:
        if self.bulk is None:
            self.bulk = torch.ones(_BULK // 4)
            backend.call(1, "identity", self.bulk)
        mover = _Mover(backend, self.bulk)
        small = torch.ones(1)
        times: list[float] = []
        with mover:
            end = time.perf_counter() + _SECONDS
            while len(times) < _LEAST or time.perf_counter() < end:
                start = time.perf_counter()
                backend.call(1, "add", small, 1)
                times.append(time.perf_counter() - start)
        return {"time": times, "tail": times, "bulk": [mover.rate]}


class _Mover(threading.Thread):
    """Sends a tensor there and back for as long as it is entered."""

    def __init__(self, backend: Backend, tensor: torch.Tensor) -> None:
        super().__init__()
        self.backend, self.tensor = backend, tensor
        self.done = threading.Event()
        self.error: Exception | None = None
        self.rate = 0.0

    def run(self) -> None:
        moved, start = 0, time.perf_counter()
        try:
            while not self.done.is_set():
                self.backend.call(1, "identity", self.tensor)
                moved += 2 * _BULK
        except Exception as error:
            self.error = error
        self.rate = moved / (time.perf_counter() - start)

    def __enter__(self) -> None:
        self.start()
        time.sleep(0.05)  # until the first tensor is on its way

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()
        if self.error is not None:
            raise self.error


CASES = [SmallDuringBulk()]
