"""GPT among the applications: what is run, and the paper's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.applications.gpt.model import GptJob
from benchmarks.applications.interface import PIPELINING, Application, Job, Metric, Plot

_STAGES = (2, 3, 4)
_NAMES = {"plain": "one stage after the other", "gpipe": "GPipe", "1f1b": "1F1B"}
_PAPER = {"plain": "1354 s in all", "gpipe": "146 s in all, at best"}
_RPC = ("tensorpipe", "ucx")
_REMARKS = """\
A decoder of 10.9 million parameters (8 blocks, 336 wide) reads the source of Python's own standard
library byte by byte. Its layers are on 2, 3 or 4 processes, put there by `torch_rpc_ext.sharding`
([sharding](sharding.md)), which runs on TENSORPIPE as well. As in the paper the question is what a
pipeline gains over one stage after the other; there is no gRPC, which has nothing like distributed
autograd, and the paper has none either. Beside it stands upstream's `torch.distributed.pipelining`
over gloo, with the same layers, micro-batches and optimizer; each of its stages has the data, and
no driver sends anything.

In each run the first losses are compared with those of the model in one process, over the same
micro-batches: bit for bit, and for upstream's, whose sums go in another order, to 1 in 10 000. A
run with others is a failure, not a figure. Memory is what the resident size of a stage's process
grows by at most, from before it has its layers: parameters, gradients, AdamW's moments, activations
and buffers.

The long run has all that such a training has, by `ShardedModule`, `Pipeline` and
`ShardedOptimizer`: a scheduler of torch's for the learning rate, gradients clipped by their norm
over all stages, bfloat16 by the driver's autocast, blocks whose activations are computed again,
evaluation over the pipeline, and a checkpoint of model, optimizer and scheduler. It is done twice:
without a break, and with the last stage's process killed; a new one comes back, and the training is
resumed from the checkpoint. All losses have to be those of the unbroken run, bit for bit.
TENSORPIPE is not in it: there a process that died does not come back.

Upstream's pipelining sends over gloo, without a driver and without autograd between processes. With
GPipe the pipeline on UCX is ahead of it by 1 to 3 %; with 1F1B it is as fast over two stages, and
3 % behind over three and four. A step over four stages takes 15 ms longer, which is 0.2 ms for each
of its 64 passes of a micro-batch through a stage: about what a call of a Python function takes.

What differs from the paper: the paper's stages are GPUs, its model is larger, and its figures are
those of a whole run, forward and backward: 538 + 798 s without and about 40 + 107 s with a
pipeline. Here the stages share the cores of one host, so a pipeline gains what its cores allow and
no more: with two cores at most a factor of 2, whatever the number of stages.
"""


class Gpt(Application):
    """The paper's GPT over several workers."""

    name = "gpt"
    title = "GPT, a decoder over several workers"
    metrics = {
        "tokens": Metric("tokens per second", "1/s"),
        "step": Metric("a step"),
        "memory": Metric("memory of the stage that takes most", "B"),
        "memory_each": Metric("memory of each stage", "B", is_list=True),
        "held": Metric("micro-batches held, first stage", ""),
        "loss": Metric("loss at the end, nats", "", is_spread=True),
        "before": Metric("loss of text held out, before", "", is_spread=True),
        "after": Metric("the same, after", "", is_spread=True),
        "save": Metric("the checkpoint is written"),
        "noticed": Metric("from the death to the error"),
        "back": Metric("from the death to all in place again"),
    }
    remarks = _REMARKS
    plots = tuple(
        Plot(
            ("tokens", "step", "memory"),
            f"stages, {_NAMES[schedule]}",
            {f"{schedule}-{stages}": stages for stages in _STAGES},
        )
        for schedule in _NAMES
    )

    def jobs(self, *, small: bool) -> Sequence[Job]:
        return list(_small() if small else _full())

    def shown(self, job: Job) -> Sequence[str]:
        assert isinstance(job, GptJob)
        if job.killed:
            return ("tokens", "loss", "before", "after", "save", "noticed", "back")
        return ("tokens", "step", "memory", "memory_each", "held", "loss")

    def paper(self, job: Job, metric: str) -> str:
        assert isinstance(job, GptJob)
        return _PAPER.get(job.schedule, "") if metric == "step" and not job.killed else ""


def _small() -> Iterator[Job]:
    size: dict[str, Any] = {"width": 32, "blocks": 3, "heads": 2, "length": 16, "batch": 8}
    few: dict[str, Any] = {"micro_batches": 4, "steps": 3, "checked": 4, "memory": 300 << 20}
    for schedule in _NAMES:
        yield _job(schedule, 2, **size, **few)
    yield _long(size["width"], blocks=3, steps=12, batch=8, length=16, heads=2)


def _full() -> Iterator[Job]:
    for stages in _STAGES:
        for schedule in _NAMES:
            yield _job(schedule, stages, rounds=2)
    yield _long(128, blocks=4, steps=200, batch=16, length=64, heads=4)


def _job(schedule: str, stages: int, **others: Any) -> GptJob:
    return GptJob(
        name=f"{schedule}-{stages}",
        title=f"{stages} stages, {_NAMES[schedule]}",
        **{"memory": 800 << 20, **others},
        processes=stages + 1,
        ways=_RPC,
        more_ways=() if schedule == "plain" else (PIPELINING,),
        stages=stages,
        schedule=schedule,
    )


def _long(width: int, *, steps: int, **others: Any) -> GptJob:
    return GptJob(
        name="long",
        title=f"a long run: {steps} steps, one process killed",
        processes=3,
        ways=("ucx",),
        comes_back=(2,),
        width=width,
        steps=steps,
        saved=steps // 2,
        killed=steps // 2 + steps // 4,
        micro_batches=4,
        rate=1e-3,
        bfloat16=True,
        recompute=True,
        **others,
    )
