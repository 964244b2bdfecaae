"""One training step of a model that is split over two workers, driven by a third, profiled.

    python docs/profiling_example.py [FOLDER]

writes trace.json, for https://ui.perfetto.dev, and trace.png into the folder. docs/profiling.md
shows the picture.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.optim import DistributedOptimizer

WORKERS = ("trainer", "stage1", "stage2")


class Stage:
    """A layer on the worker that makes it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.layer = torch.nn.Linear(inputs, outputs)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(batch))

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.layer.parameters()]


def train_step(stages: list[rpc.RRef], optimizer: DistributedOptimizer) -> None:
    """Forward through both stages, backward, and a step of the optimizer."""
    with dist_autograd.context() as context:
        hidden = stages[0].rpc_sync().forward(torch.rand(512, 256))
        output = stages[1].rpc_sync().forward(hidden)
        dist_autograd.backward(context, [output.square().mean()])
        optimizer.step(context)


def profile_a_step(folder: Path) -> None:
    from torch_rpc_ext.profiler import profile

    stages = [rpc.remote("stage1", Stage, (256, 512)), rpc.remote("stage2", Stage, (512, 64))]
    parameters = [parameter for stage in stages for parameter in stage.rpc_sync().parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    train_step(stages, optimizer)  # what happens only once is not of interest
    with profile() as prof:
        train_step(stages, optimizer)
    print(prof.summary())
    prof.export_chrome_trace(folder / "trace.json")
    prof.plot(folder / "trace.png")


def run(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    rpc.init_rpc(
        WORKERS[rank],
        backend=rpc.BackendType.UCX,
        rank=rank,
        world_size=len(WORKERS),
        rpc_backend_options=options(f"file://{store}"),
    )
    if rank == 0:
        profile_a_step(Path(folder))
    rpc.shutdown()


def options(init_method: str) -> rpc.RpcBackendOptions:
    import torch_rpc_ext

    return torch_rpc_ext.UcxRpcBackendOptions(init_method=init_method)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting:
        target = sys.argv[1] if len(sys.argv) > 1 else "."
        mp.spawn(run, (f"{meeting}/store", target), len(WORKERS))
