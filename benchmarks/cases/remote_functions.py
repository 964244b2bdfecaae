"""Remote functions of torch_rpc_ext: async def ones, batches, TorchScript ones."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import rpc as _untyped_rpc

from benchmarks.backends.interface import REMOTE_FUNCTIONS, Backend
from benchmarks.cases.interface import CallCase, Figures, Metric, Target

rpc: Any = _untyped_rpc  # upstream's functions have no types

_TO = "worker1"


def _flood(call: Callable[[], Any], count: int) -> list[Any]:
    """Start all calls, then wait for all answers."""
    pending = [call() for _ in range(count)]
    return [answer.wait() for answer in pending]


class Naps(CallCase):
    """async def calls that sleep, all at once on one callee; time of all."""

    calls = 10_000
    seconds = 0.1

    def __init__(self) -> None:
        metrics = {
            "time": Metric("10000 async def of 0.1 s, all", "s", (Target(2.0, kind="value"),)),
            "frozen": Metric("  after gc.freeze() on the callee", "s"),
        }
        super().__init__("async-naps", metrics, 3, frozenset({REMOTE_FUNCTIONS}))

    def measure(self, backend: Backend) -> Figures:
        figures = {"time": [self._seconds()]}
        rpc.rpc_sync(_TO, gc.freeze)
        figures["frozen"] = [self._seconds()]
        rpc.rpc_sync(_TO, gc.unfreeze)
        return figures

    def _seconds(self) -> float:
        from benchmarks.remote_functions import nap

        start = time.perf_counter()
        _flood(lambda: nap.async_(_TO, self.seconds), self.calls)
        return time.perf_counter() - start


class Batches(CallCase):
    """A small network behind a batcher, and called with one input after the other."""

    count = 1000

    def __init__(self) -> None:
        metrics = {
            "batched": Metric("1000 async of a network, batched"),
            "alone": Metric("  not batched"),
        }
        super().__init__("batches", metrics, 7, frozenset({REMOTE_FUNCTIONS}))

    def measure(self, backend: Backend) -> Figures:
        from benchmarks.remote_functions import WIDTH, predict_many, predict_one

        inputs, figures = torch.ones(WIDTH), {}
        for key, function in (("batched", predict_many), ("alone", predict_one)):
            start = time.perf_counter()
            answers = _flood(lambda f=function: f.async_(_TO, inputs), self.count)
            figures[key] = [(time.perf_counter() - start) / self.count]
            if not all(torch.allclose(answer, inputs) for answer in answers):
                raise AssertionError(f"{key} answered wrongly")
        return figures


class Scripts(CallCase):
    """The same loop in TorchScript and in Python."""

    count = 1000
    steps = 1000

    def __init__(self) -> None:
        metrics = {
            "script": Metric("1000 async of a loop, TorchScript"),
            "python": Metric("  in Python"),
        }
        super().__init__("script-loop", metrics, 7, frozenset({REMOTE_FUNCTIONS}))

    def measure(self, backend: Backend) -> Figures:
        from benchmarks.remote_functions import count_plain, count_script, ready

        rpc.rpc_sync(_TO, ready)
        x, figures = torch.ones(1), {}
        calls: dict[str, Callable[[], Any]] = {
            "script": lambda: count_script.async_(_TO, x, self.steps),
            "python": lambda: rpc.rpc_async(_TO, count_plain, (x, self.steps)),
        }
        for key, call in calls.items():
            start = time.perf_counter()
            _flood(call, self.count)
            figures[key] = [(time.perf_counter() - start) / self.count]
        return figures


CASES = [Naps(), Batches(), Scripts()]
