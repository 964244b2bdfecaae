"""GPT, the communication by torch.distributed.rpc and torch_rpc_ext.sharding, on UCX or
TENSORPIPE."""

import contextlib
import os
import signal
import threading
import time

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor

from benchmarks.applications.gpt import model
from torch_rpc_ext import sharding

ENDS = threading.Event()
PATIENCE = 300.0  # s for a step on a busy machine; a death is noticed without it


def run(rank: int, job: model.GptJob, backend: str) -> model.Figures | None:
    """Be process ``rank`` of a run; the first drives, the others are stages."""
    rpc.init_rpc(f"worker{rank}", rpc.BackendType[backend], rank, job.processes)
    rpc._set_rpc_timeout(PATIENCE)
    if job.killed:
        figures = run_long(rank, job)
        # Not gracefully: upstream would wait 100 s for what the dead process knew of RRefs.
        rpc.shutdown(graceful=False)
        return figures
    if rank == 0:
        driver = Sharded(job)
        figures = {**model.train(driver, job), **driver.figures()}
    rpc.shutdown()
    return figures if rank == 0 else None


def run_long(rank: int, job: model.GptJob) -> model.Figures | None:
    """Be process ``rank`` of a run in which a process is killed."""
    if rank > 0:
        ENDS.wait()
        return None
    figures = model.train_long(lambda: Sharded(job), sharding.StageError, job, model.folder())
    for worker in range(1, job.processes):
        with contextlib.suppress(RuntimeError):  # it may be gone before it has answered
            rpc.rpc_sync(worker, end)
    return figures


class Part:
    """What a stage has besides its layers."""

    def __init__(self, parameters: list[rpc.RRef], job: model.GptJob, memory: rpc.RRef) -> None:
        own = [parameter.local_value() for parameter in parameters]
        self.optimizer, self.memory = model.Optimizer(own, job), memory.local_value()

    def squares(self, context: int) -> float:
        return self.optimizer.squares(dist_autograd.get_gradients(context))

    def step(self, context: int, rate: float, scale: float) -> None:
        self.optimizer.step(dist_autograd.get_gradients(context), rate, scale)

    def save(self, path: str) -> None:
        self.optimizer.save(path)

    def load(self, path: str) -> None:
        self.optimizer.load(path)

    def most(self) -> int:
        return self.memory.most()


class Sharded:
    """The model over the other processes; a model.LongDriver."""

    def __init__(self, job: model.GptJob) -> None:
        workers = [f"worker{stage + 1}" for stage in range(job.stages)]
        memories = [memory_of(worker) for worker in workers]
        self.job = job
        self.model = sharding.shard(model.gpt(job), workers, partition=job.partition)
        self.pipeline = None
        if job.schedule != "plain":
            self.pipeline = sharding.Pipeline(
                self.model, job.parts, model.token_loss, schedule=job.schedule, reduction="mean"
            )
        found = self.model.remote_parameters()
        self.parts = []
        for worker, memory in zip(workers, memories, strict=True):
            own = [parameter for parameter in found if parameter.owner_name() == worker]
            self.parts.append(rpc.remote(worker, Part, (own, job, memory)))

    def step(self, inputs: Tensor, target: Tensor, rate: float) -> float:
        with dist_autograd.context() as context:
            if self.pipeline is not None:
                loss = self.pipeline.forward_backward(inputs, target)
            else:
                loss = model.token_loss(self.model(inputs), target)
                dist_autograd.backward(context, [loss])
            squares = self.each("squares", [(context,)] * self.job.stages)
            scale = model.scale(squares, self.job)
            self.each("step", [(context, rate, scale)] * self.job.stages)
        return loss.item()

    def scores(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def save(self, folder: str) -> None:
        self.model.save_checkpoint(folder)
        self.each("save", [(f"{folder}/optimizer{i}.pt",) for i in range(self.job.stages)])

    def load(self, folder: str) -> None:
        self.model.load_checkpoint(folder)
        self.each("load", [(f"{folder}/optimizer{i}.pt",) for i in range(self.job.stages)])

    def kill(self) -> None:
        rpc.rpc_async(f"worker{self.job.stages}", die)

    def figures(self) -> model.Figures:
        memory = self.each("most", [()] * self.job.stages)
        held = [one.peak_micro_batches for one in self.pipeline.stats] if self.pipeline else [1]
        return {"memory": [max(memory)], "memory_all": [sum(memory)], "held": [held[0]]}

    def each(self, method: str, arguments: list[tuple]) -> list:
        calls = zip(self.parts, arguments, strict=True)
        futures = [getattr(part.rpc_async(), method)(*given) for part, given in calls]
        return [future.wait() for future in futures]


def end() -> None:
    ENDS.set()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def memory() -> rpc.RRef:
    return rpc.RRef(model.Memory())


def memory_of(worker: str) -> rpc.RRef:
    """Return a Memory on a worker, which may be about to come back."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return rpc.rpc_sync(worker, memory)
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
