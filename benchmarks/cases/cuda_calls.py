"""Calls with one tensor on a GPU. A call's time ends when the GPU has the answer."""

from __future__ import annotations

import time

import torch

from benchmarks.backends.interface import CUDA, Backend
from benchmarks.cases.interface import CallCase, Figures, Metric, Target
from benchmarks.functions import FUNCTIONS

TENSORPIPE, COPIES = "tensorpipe-cuda", "copies"


class GpuCalls(CallCase):
    """Calls of one function with one tensor.

    Args:
        name: on the command line.
        title: in the table.
        function: name in functions.py.
        shape: of the float32 argument.
        calls: in one round.
        targets: of the time.
        transposed: send a transposed view of the tensor.
    """

    gpu = True

    def __init__(
        self,
        name: str,
        title: str,
        function: str,
        shape: tuple[int, ...],
        *,
        calls: int,
        targets: tuple[Target, ...] = (),
        transposed: bool = False,
    ) -> None:
        metrics = {"time": Metric(title, "s", targets)}
        super().__init__(name, metrics, 9, frozenset({CUDA, function}))
        self.function, self.shape, self.calls = function, shape, calls
        self.transposed = transposed
        self.argument: torch.Tensor | None = None

    def measure(self, backend: Backend) -> Figures:
        if self.argument is None:  # the first round, which is not counted
            self.argument = self._make_argument()
            self._check(backend.call(1, self.function, self.argument))
        stream = torch.cuda.current_stream()
        times = []
        for _ in range(self.calls):
            stream.synchronize()
            start = time.perf_counter()
            backend.call(1, self.function, self.argument)
            stream.synchronize()
            times.append(time.perf_counter() - start)
        return {"time": times}

    def _make_argument(self) -> torch.Tensor:
        tensor = torch.rand(self.shape, device="cuda:0")
        return tensor.t() if self.transposed else tensor

    def _check(self, answer: torch.Tensor) -> None:
        # A wrong answer that comes fast is not a result.
        assert self.argument is not None
        if not torch.equal(answer, FUNCTIONS[self.function](self.argument.clone())):
            raise RuntimeError(f"{self.name}: the answer is wrong")


CASES = [
    GpuCalls(
        "gpu-64b",
        "GPU identity, 64 B",
        "identity",
        (16,),
        calls=200,
        targets=(Target(1.5, against=TENSORPIPE),),
    ),
    GpuCalls(
        "gpu-4m",
        "GPU identity, 4 MB",
        "identity",
        (1_000_000,),
        calls=40,
        targets=(Target(2, against=TENSORPIPE),),
    ),
    GpuCalls(
        "gpu-400m",
        "GPU identity, 400 MB",
        "identity",
        (100_000_000,),
        calls=10,
        # The second target is a share of the bandwidth of the same number of plain copies.
        targets=(Target(1.5, against=TENSORPIPE), Target(0.8, against=COPIES)),
    ),
    GpuCalls("gpu-ops-4m", "GPU, 200 ops, 4 MB", "operate", (1_000_000,), calls=20),
    GpuCalls("gpu-ops-400m", "GPU, 200 ops, 400 MB", "operate", (100_000_000,), calls=3),
    GpuCalls(
        "gpu-strided",
        "GPU identity, 64 MB transposed",
        "identity",
        (4000, 4000),
        calls=20,
        transposed=True,
    ),
]
