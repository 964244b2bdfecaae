# mypy: ignore-errors
"""A parameter server as upstream's tutorials write it, without any mention of torch_rpc_ext in its
code.

``python tutorial.py`` spawns a server and a trainer; under torchrun every process takes its rank
from torchrun. The last line that rank 0 prints is the class of the agent.
"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer


class ParameterServer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)

    def parameter_rrefs(self) -> list:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def train(server: rpc.RRef, steps: int) -> float:
    optimizer = DistributedOptimizer(optim.SGD, server.rpc_sync().parameter_rrefs(), lr=0.05)
    generator = torch.Generator().manual_seed(rpc.get_worker_info().id)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        batch = torch.randn(16, 4, generator=generator)
        with dist_autograd.context() as context_id:
            output = server.rpc_sync().forward(batch)
            loss = (output - batch.sum(1, keepdim=True)).pow(2).mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return loss.item()


def run_worker(rank: int, world_size: int, how: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=300)
    name = "ps" if rank == 0 else f"trainer{rank}"
    if how == "explicit":
        rpc.init_rpc(
            name,
            backend=rpc.BackendType.TENSORPIPE,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=options,
        )
    elif how == "options":
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    else:
        rpc.init_rpc(name, rank=rank, world_size=world_size)
    if rank == 0:
        server = rpc.RRef(ParameterServer())
        futures = [
            rpc.rpc_async(f"trainer{i}", train, args=(server, 25)) for i in range(1, world_size)
        ]
        losses = [future.wait() for future in futures]
        assert max(losses) < 1.0, losses
        print(type(rpc.api._get_current_rpc_agent()).__name__, flush=True)
    rpc.shutdown()


def main(how: str) -> None:
    if "RANK" in os.environ:
        run_worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), how)
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(2, how), nprocs=2, join=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "explicit")
