"""Many small tensors on a GPU in one call."""

from __future__ import annotations

import time

import torch

from benchmarks.backends.interface import CUDA, Backend
from benchmarks.cases.cuda_calls import TENSORPIPE
from benchmarks.cases.interface import CallCase, Figures, Metric, Target


class ManyGpuTensors(CallCase):
    """One call with a list of tensors, which it returns."""

    gpu = True
    calls = 20
    count, payload = 500, 4096

    def __init__(self) -> None:
        title = f"GPU, {self.count} tensors of {self.payload // 1024} KB, one call"
        metrics = {"time": Metric(title, "s", (Target(5, against=TENSORPIPE),))}
        super().__init__("gpu-many", metrics, 9, frozenset({CUDA, "identity_all"}))
        self.tensors: list[torch.Tensor] = []

    def measure(self, backend: Backend) -> Figures:
        if not self.tensors:
            self.tensors = list(torch.rand(self.count, self.payload // 4, device="cuda:0"))
            self._check(backend.call(1, "identity_all", self.tensors))
        stream = torch.cuda.current_stream()
        times = []
        for _ in range(self.calls):
            stream.synchronize()
            start = time.perf_counter()
            backend.call(1, "identity_all", self.tensors)
            stream.synchronize()
            times.append(time.perf_counter() - start)
        return {"time": times}

    def _check(self, answer: list[torch.Tensor]) -> None:
        if not torch.equal(torch.stack(answer), torch.stack(self.tensors)):
            raise RuntimeError(f"{self.name}: the answer is wrong")


CASES = [ManyGpuTensors()]
