"""The life of an RRef: made, fetched, passed on, deleted."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.backends.interface import RREFS, Backend
from benchmarks.cases.interface import CallCase, Figures, Metric

_BYTES = 4096


def fetch(rref: Any) -> int:
    """Fetch the tensor of an RRef from its owner; return the number of its elements."""
    return int(rref.to_here().numel())


def owned() -> int:
    """Return how many RRefs this worker owns."""
    from torch.distributed import rpc

    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


class RRefs(CallCase):
    """Worker 0 makes RRefs on worker 1, worker 2 fetches them."""

    size = 3
    calls = 40

    def __init__(self) -> None:
        metrics = {
            "create": Metric("RRef: create, first to_here"),
            "fetch": Metric("  to_here again"),
            "pass": Metric("  pass on, to_here there"),
            "delete": Metric("  delete until the owner knows"),
        }
        super().__init__("rref", metrics, 7, frozenset({RREFS}))

    def measure(self, backend: Backend) -> Figures:
        from torch.distributed import rpc

        figures: Figures = {key: [] for key in self.metrics}
        tensor, clock = torch.ones(_BYTES // 4), time.perf_counter
        before = rpc.rpc_sync("worker1", owned)
        for _ in range(self.calls):
            start = clock()
            rref = rpc.remote("worker1", torch.add, args=(tensor, tensor))
            rref.to_here()
            made = clock()
            rref.to_here()
            fetched = clock()
            rpc.rpc_sync("worker2", fetch, args=(rref,))
            passed = clock()
            del rref
            # Each look is a call, so the measured time includes one.
            while rpc.rpc_sync("worker1", owned) > before:
                pass
            moments = (start, made, fetched, passed, clock())
            for key, begin, end in zip(figures, moments, moments[1:], strict=False):
                figures[key].append(end - begin)
        return figures


CASES = [RRefs()]
