"""GPT, the communication by torch.distributed.rpc and torch_rpc_ext.sharding, on UCX or
TENSORPIPE."""

import contextlib
import os
import signal
import threading
import time

import torch
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


class Sharded:
    """The model over the other processes; a model.LongDriver."""

    def __init__(self, job: model.GptJob) -> None:
        workers = [f"worker{stage + 1}" for stage in range(job.stages)]
        self.job, self.memories = job, [memory_of(worker) for worker in workers]
        self.model = sharding.shard(model.gpt(job), workers, partition=job.partition)
        self.pipeline = None
        if job.schedule != "plain":
            self.pipeline = sharding.Pipeline(
                self.model, job.parts, model.token_loss, schedule=job.schedule, reduction="mean"
            )
        self.optimizer = sharding.ShardedOptimizer(torch.optim.AdamW, self.model, lr=job.rate)
        self.scheduler = model.scheduler(self.optimizer, job)

    def step(self, inputs: Tensor, target: Tensor) -> float:
        if self.pipeline is not None:
            self.optimizer.zero_grad()
            with model.autocast(self.job):
                loss = self.pipeline.forward_backward(inputs, target)
            self.update()
        else:
            with dist_autograd.context() as context:
                with model.autocast(self.job):
                    loss = model.token_loss(self.model(inputs), target)
                dist_autograd.backward(context, [loss])
                self.update()
        return loss.item()

    def update(self) -> None:
        self.model.clip_grad_norm_(self.job.clip)
        self.optimizer.step()
        self.scheduler.step()

    def evaluate(self, inputs: Tensor, target: Tensor) -> float:
        self.model.eval()
        with model.autocast(self.job):
            loss = self.pipeline.evaluate(inputs, target)
        self.model.train()
        return loss.item()

    def save(self, folder: str) -> None:
        sharding.save_checkpoint(self.state(), folder)

    def load(self, folder: str) -> None:
        sharding.load_checkpoint(self.state(), folder)

    def state(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def kill(self) -> None:
        rpc.rpc_async(f"worker{self.job.stages}", die)

    def figures(self) -> model.Figures:
        memory = [one.rpc_sync().most() for one in self.memories]
        held = [one.peak_micro_batches for one in self.pipeline.stats] if self.pipeline else [1]
        return {"memory": [max(memory)], "memory_each": memory, "held": [held[0]]}


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
