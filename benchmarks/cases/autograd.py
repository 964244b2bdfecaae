"""A training step through distributed autograd."""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.backends.interface import AUTOGRAD, Backend
from benchmarks.cases.interface import CallCase, Figures, Metric

_BATCH, _WIDTH = 64, 256


@functools.cache
def _model() -> nn.Module:
    """Return this worker's stage of the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh())


def stage(tensor: Tensor) -> Tensor:
    """Apply this worker's stage."""
    result: Tensor = _model()(tensor)
    return result


def parameters() -> list[Any]:
    """Return RRefs to the parameters of this worker's stage."""
    from torch.distributed import rpc

    return [rpc.RRef(parameter) for parameter in _model().parameters()]


class AutogradStep(CallCase):
    """Worker 0 trains a model whose two stages are on workers 1 and 2."""

    size = 3
    calls = 10

    def __init__(self) -> None:
        metrics = {
            "step": Metric("autograd step of two stages"),
            "forward": Metric("  forward"),
            "backward": Metric("  backward"),
            "optimizer": Metric("  optimizer"),
        }
        super().__init__("autograd", metrics, 7, frozenset({AUTOGRAD}))
        self.optimizer: Any = None

    def measure(self, backend: Backend) -> Figures:
        from torch.distributed import autograd, rpc
        from torch.distributed.optim import DistributedOptimizer

        if self.optimizer is None:
            # DistributedOptimizer itself uses TorchScript, which warns.
            warnings.simplefilter("ignore", DeprecationWarning)
            stages = [rpc.rpc_sync(name, parameters) for name in ("worker1", "worker2")]
            self.optimizer = DistributedOptimizer(  # type: ignore[no-untyped-call]
                torch.optim.SGD, [one for each in stages for one in each], lr=1e-3
            )
        inputs, clock = torch.ones(_BATCH, _WIDTH), time.perf_counter
        figures: Figures = {key: [] for key in self.metrics}
        for _ in range(self.calls):
            start = clock()
            with autograd.context() as context:
                hidden = rpc.rpc_sync("worker1", stage, args=(inputs,))
                loss = rpc.rpc_sync("worker2", stage, args=(hidden,)).square().mean()
                forward = clock()
                autograd.backward(context, [loss])
                backward = clock()
                self.optimizer.step(context)
                optimized = clock()
            for key, seconds in (
                ("step", clock() - start),
                ("forward", forward - start),
                ("backward", backward - forward),
                ("optimizer", optimized - backward),
            ):
                figures[key].append(seconds)
        return figures


CASES = [AutogradStep()]
