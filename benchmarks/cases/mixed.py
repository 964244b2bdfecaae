"""Small calls while another thread moves large tensors."""

from __future__ import annotations

import threading
import time

import torch

from benchmarks.backends.interface import Backend
from benchmarks.cases.interface import CallCase, Figures, Metric, Target

_BULK = 200_000_000  # bytes of a large tensor
# A number of moments, not a duration: in a given time fast moments would give more samples.
_MOMENTS = 12
_PAUSE = 0.01  # s between the moments, so that they meet all phases of a bulk call
_FOLLOWING = 2  # calls directly after the first call of a moment


class SmallDuringBulk(CallCase):
    """Latency of a builtin, and bytes that the other thread moves meanwhile, both ways added."""

    def __init__(self) -> None:
        title = "builtin beside 200 MB"
        metrics = {
            # In a row: a call after a pause must first get a core from the copying threads.
            "row": Metric(f"{title}, in a row", "s", (Target(200e-6, 100e-6, "value"),)),
            "pause": Metric("  the same after a pause"),
            "tail": Metric(
                "  99th percentile of both", "s", (Target(5e-3, 2e-3, "value"),), tail=True
            ),
            "bulk": Metric("  bulk meanwhile", "B/s", (Target(4.7),), more_is_better=True),
        }
        super().__init__("small-during-bulk", metrics, 7, frozenset({"add", "identity"}))
        self.bulk: torch.Tensor | None = None

    def measure(self, backend: Backend) -> Figures:
        if self.bulk is None:
            self.bulk = torch.ones(_BULK // 4)
            backend.call(1, "identity", self.bulk)
        mover = _Mover(backend, self.bulk)
        small = torch.ones(1)
        paused: list[float] = []
        in_a_row: list[float] = []
        with mover:
            for _ in range(_MOMENTS):
                time.sleep(_PAUSE)
                for index in range(1 + _FOLLOWING):
                    start = time.perf_counter()
                    backend.call(1, "add", small, small)
                    (in_a_row if index else paused).append(time.perf_counter() - start)
        both = paused + in_a_row
        return {"row": in_a_row, "pause": paused, "tail": both, "bulk": [mover.rate]}


class _Mover(threading.Thread):
    """Sends a tensor there and back within a ``with`` block."""

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
