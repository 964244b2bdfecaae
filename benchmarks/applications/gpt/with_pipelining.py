"""GPT, the communication by upstream's torch.distributed.pipelining, over gloo."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from benchmarks.applications.gpt import model

SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


def run(rank: int, job: model.GptJob, backend: str) -> model.Figures | None:
    """Be process ``rank`` of a run; the first has nothing to do, for each stage has the loop."""
    if rank == 0:
        return None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{os.environ['MEETING']}.stages", job.stages)
    dist.init_process_group("gloo", store=store, rank=rank - 1, world_size=job.stages)
    memory, last = model.Memory(), rank == job.stages
    layers = model.part(job, rank - 1)
    stage = pipelining.PipelineStage(layers, rank - 1, job.stages, torch.device("cpu"))
    schedule = SCHEDULES[job.schedule](stage, job.micro_batches, loss_fn=model.token_loss)
    parameters = list(layers.parameters())
    optimizer = model.optimizer(parameters, job)
    scheduler = model.scheduler(optimizer, job)
    seconds, losses = [], []
    for inputs, target in model.batches(job):
        begin, parts = time.perf_counter(), []
        given = (inputs,) if rank == 1 else ()
        optimizer.zero_grad()
        with model.autocast(job):
            schedule.step(*given, **({"target": target, "losses": parts} if last else {}))
        squares = nn.utils.get_total_norm([one.grad for one in parameters]).square()
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(parameters, job.clip, squares.sqrt())
        optimizer.step()
        scheduler.step()
        dist.barrier()  # a step ends when all stages have ended it, as with a driver
        seconds.append(time.perf_counter() - begin)
        losses.append(torch.stack(parts).mean().item() if last else 0.0)
    most = [None] * job.stages
    dist.all_gather_object(most, memory.most())
    dist.destroy_process_group()
    if not last:
        return None
    model.check(losses, job, exactly=False)
    return {**model.figures(seconds, losses, job), "memory": [max(most)], "memory_each": most}
