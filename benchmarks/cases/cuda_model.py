"""The two-stage model of torch's recipe "Direct Device-to-Device Communication with TensorPipe CUDA
RPC": by CUDA RPC, and by hand through the CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.backends.interface import CUDA, MODELS, Backend
from benchmarks.cases.cuda_calls import TENSORPIPE
from benchmarks.cases.interface import CallCase, Figures, Metric, Target

_SIZE = 1000  # rows of the input, and features of each layer, as in the recipe
_STEPS = 10


class Stage(nn.Module):
    """One layer on the GPU.

    Args:
        through_cpu: pass the result on through the CPU's memory.
    """

    def __init__(self, through_cpu: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(_SIZE, _SIZE, device="cuda:0")
        self.through_cpu = through_cpu

    def forward(self, x: Tensor) -> Tensor:
        """Return the result, on the GPU or in the CPU's memory."""
        y: Tensor = self.linear(x.to("cuda:0"))
        return y.cpu() if self.through_cpu else y


class TwoStages(CallCase):
    """Forward and backward passes, the second stage at the other worker."""

    gpu = True

    def __init__(self) -> None:
        metrics = {
            "direct": Metric("GPU, recipe's model", "s", (Target(1.0, against=TENSORPIPE),)),
            "by_hand": Metric("  by hand through the CPU"),
            "times": Metric(
                "  direct against by hand",
                "n",
                (Target(34, kind="value"),),
                more_is_better=True,
            ),
        }
        super().__init__("gpu-model", metrics, 5, frozenset({CUDA, MODELS}))
        self.stages: dict[bool, tuple[Stage, Any]] = {}

    def measure(self, backend: Backend) -> Figures:
        by_hand, direct = self._steps(through_cpu=True), self._steps(through_cpu=False)
        return {"direct": [direct], "by_hand": [by_hand], "times": [by_hand / direct]}

    def _steps(self, *, through_cpu: bool) -> float:
        """Return the time of a step, s."""
        from torch.distributed import autograd, rpc

        if through_cpu not in self.stages:
            there = rpc.remote("worker1", Stage, args=(through_cpu,))
            self.stages[through_cpu] = (Stage(through_cpu), there)
        here, there = self.stages[through_cpu]
        x = torch.rand(_SIZE, _SIZE, device="cuda:0")
        stream = torch.cuda.current_stream()
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(_STEPS):
            with autograd.context() as context:
                y = there.rpc_sync().forward(here(x))
                autograd.backward(context, [y.sum()])
        stream.synchronize()
        return (time.perf_counter() - start) / _STEPS


CASES = [TwoStages()]
