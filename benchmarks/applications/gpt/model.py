"""A GPT, the computation: the same for every way to communicate.

A driver has the data and the loop. The layers are on stages, each a process. A step is a batch
forward and backward, and a step of AdamW by the gradients, which are clipped by the norm over all
stages. In the long run torch's scheduler changes the learning rate, and layers compute in bfloat16
by autocast.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from benchmarks.applications.gpt import text
from benchmarks.applications.interface import Figures, Job

_WARM = 1  # steps that are not counted: they connect and allocate
_EVALUATED = 4  # batches
_CLOSE = 1e-4  # of losses whose sums go in another order


@dataclass(frozen=True, kw_only=True)
class GptJob(Job):
    """What a run of GPT does.

    Attributes:
        stages: over how many processes the model is; the driver is one process more.
        schedule: "gpipe" or "1f1b"; "plain" for one stage after the other.
        micro_batches: into how many a batch is cut.
        steps: that are counted.
        checked: of so many steps the loss is compared with that of the model in one process.
        batch, length: pieces of text of a step, and symbols of a piece.
        width, blocks, heads: of the model.
        rate: of learning, at most.
        clip: norm of the gradients, at most.
        bfloat16: whether layers compute in bfloat16, by the driver's autocast.
        recompute: whether a block's activations are computed again for the backward.
        saved, killed: in a long run the steps before which a checkpoint is written, and the last
            stage's process is killed; 0 and 0 in others.
    """

    stages: int = 2
    schedule: str = "1f1b"
    micro_batches: int = 8
    steps: int = 3
    checked: int = 2
    batch: int = 16
    length: int = 64
    width: int = 336
    blocks: int = 8
    heads: int = 6
    rate: float = 3e-4
    clip: float = 1.0
    bfloat16: bool = False
    recompute: bool = False
    saved: int = 0
    killed: int = 0

    @property
    def partition(self) -> list[int]:
        """Layers of each stage: blocks, with the embedding before and norm and scores after."""
        parts = [len(part) for part in torch.arange(self.blocks).tensor_split(self.stages)]
        parts[0] += 1
        parts[-1] += 2
        return parts

    @property
    def parts(self) -> int:
        """Micro-batches of a batch, 1 without a pipeline."""
        return 1 if self.schedule == "plain" else self.micro_batches


class Embedding(nn.Module):
    """Vectors of symbols and of places."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(text.SYMBOLS, width), nn.Embedding(length, width)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return [batch, length, width] for int64 [batch, length]."""
        vectors: Tensor = self.symbol(symbols) + self.place.weight[: symbols.shape[1]]
        return vectors


class Block(nn.Module):
    """Attention to what came before, and two layers for each place."""

    def __init__(self, job: GptJob) -> None:
        super().__init__()
        width, self.heads, self.recompute = job.width, job.heads, job.recompute
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, width] for the same."""
        if self.recompute and torch.is_grad_enabled():
            made: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return made
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        made: Tensor = x + self.mlp(self.norm2(x))
        return made


def gpt(job: GptJob) -> nn.Sequential:
    """Return the whole model."""
    torch.manual_seed(job.seed)
    blocks = [Block(job) for _ in range(job.blocks)]
    last = [nn.LayerNorm(job.width), nn.Linear(job.width, text.SYMBOLS)]
    return nn.Sequential(Embedding(job.width, job.length), *blocks, *last)


def part(job: GptJob, stage: int) -> nn.Sequential:
    """Return the layers of a stage, 0 the first."""
    begin = sum(job.partition[:stage])
    return gpt(job)[begin : begin + job.partition[stage]]


def token_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of a symbol, in nats."""
    return functional.cross_entropy(scores.float().flatten(0, 1), target.flatten())


def autocast(job: GptJob) -> torch.autocast:
    """Return the block for forward and loss."""
    return torch.autocast("cpu", torch.bfloat16, enabled=job.bfloat16)


def optimizer(parameters: Iterable[nn.Parameter], job: GptJob) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters of this process."""
    return torch.optim.AdamW(parameters, lr=job.rate)


def scheduler(optimizer: torch.optim.Optimizer, job: GptJob) -> LambdaLR:
    """Return torch's scheduler of the learning rate."""
    return LambdaLR(optimizer, functools.partial(_factor, job))


def _factor(job: GptJob, step: int) -> float:
    """Return the part of the learning rate that counts: up for a tenth of the steps, then down as a
    cosine to a tenth.

    Without a checkpoint in the middle, as in runs of few steps, it stays as it is.
    """
    if not job.saved:
        return 1.0
    warm = max(job.steps // 10, 1)
    if step < warm:
        return (step + 1) / warm
    progress = (step - warm) / max(job.steps - warm, 1)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


class Driver(Protocol):
    """The model, wherever it is, with its optimizer."""

    def step(self, inputs: Tensor, target: Tensor) -> float:
        """Do a step; returns the loss before it."""
        ...

    def evaluate(self, inputs: Tensor, target: Tensor) -> float:
        """Return the loss, without gradients."""
        ...


class LongDriver(Driver, Protocol):
    """A model that can be saved, and that loses a process."""

    def save(self, folder: str) -> None:
        """Write the state of model, optimizer and scheduler."""
        ...

    def load(self, folder: str) -> None: ...

    def kill(self) -> None:
        """Let the last stage's process die at once."""
        ...


class Local:
    """The model in this process: what all others are compared with."""

    def __init__(self, job: GptJob) -> None:
        self.job, self.model = job, gpt(job)
        self.optimizer = optimizer(self.model.parameters(), job)
        self.scheduler = scheduler(self.optimizer, job)

    def step(self, inputs: Tensor, target: Tensor) -> float:
        """As Driver's; the micro-batches come one after another."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        pieces = (tensor.tensor_split(self.job.parts) for tensor in (inputs, target))
        for some, wanted in zip(*pieces, strict=True):
            with autocast(self.job):
                loss = token_loss(self.model(some), wanted) * (len(some) / len(inputs))
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip)
        self.optimizer.step()
        self.scheduler.step()
        return total.item()


def train(driver: Driver, job: GptJob) -> Figures:
    """Do the steps of a run; returns tokens per second and losses.

    Raises:
        RuntimeError: the losses are not those of the model in one process.
    """
    seconds, losses = [], []
    for step in range(_WARM + job.steps):
        begin = time.perf_counter()
        losses.append(driver.step(*_batch(job, step)))
        seconds.append(time.perf_counter() - begin)
    check(losses, job, exactly=True)
    return figures(seconds, losses, job)


def figures(seconds: Sequence[float], losses: Sequence[float], job: GptJob) -> Figures:
    """Return what steps have given that took so long."""
    counted = list(seconds[_WARM:])
    tokens = [job.batch * job.length / one for one in counted]
    return {"step": counted, "tokens": tokens, "losses": list(losses), "loss": [losses[-1]]}


def check(losses: Sequence[float], job: GptJob, *, exactly: bool) -> None:
    """Compare the first losses with those of the model in one process.

    Args:
        losses: of the first steps.
        job: says how many are compared.
        exactly: bit for bit; otherwise sums may have gone in another order.

    Raises:
        RuntimeError: they differ.
    """
    local = Local(job)
    for step, found in zip(range(job.checked), losses, strict=False):
        wanted = local.step(*_batch(job, step))
        if not math.isclose(found, wanted, rel_tol=0.0 if exactly else _CLOSE):
            raise RuntimeError(f"step {step} has loss {found!r}, in one process {wanted!r}")


def batches(job: GptJob) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a run in their order."""
    return [_batch(job, step) for step in range(_WARM + job.steps)]


def evaluate(driver: Driver, job: GptJob) -> float:
    """Return the loss of text held out."""
    _, held_out = text.load()
    pieces = [text.batch(held_out, job.batch, job.length, seed) for seed in range(_EVALUATED)]
    losses = [driver.evaluate(inputs, target) for inputs, target in pieces]
    return sum(losses) / len(losses)


def train_long(
    make: Callable[[], LongDriver], lost: type[Exception], job: GptJob, folder: str
) -> Figures:
    """Train without a break; then again, with a checkpoint and a process that is killed, from which
    on the training is resumed from the checkpoint.

    Args:
        make: puts the model on the stages, as it is at the beginning; waits for the processes.
        lost: what a step raises whose stage has died.
        job: says when.
        folder: for the checkpoint.

    Raises:
        RuntimeError: the losses after the checkpoint are not the same.
    """
    driver = make()
    before = evaluate(driver, job)
    begin = time.perf_counter()
    whole = _steps(driver, job, 0, job.steps)
    took = time.perf_counter() - begin
    after = evaluate(driver, job)
    driver = make()
    first = _steps(driver, job, 0, job.saved)
    begin = time.perf_counter()
    driver.save(folder)
    saving = time.perf_counter() - begin
    _steps(driver, job, job.saved, job.killed)
    driver.kill()
    begin = time.perf_counter()
    try:
        _steps(driver, job, job.killed, job.steps)
    except lost as error:
        print(f"step {job.killed} or later: {error}", flush=True)
    else:
        raise RuntimeError("a stage was killed and nobody has noticed")
    noticed = time.perf_counter() - begin
    driver = make()
    driver.load(folder)
    back = time.perf_counter() - begin
    again = [*first, *_steps(driver, job, job.saved, job.steps)]
    evaluated = evaluate(driver, job)
    if again != whole or evaluated != after:
        raise RuntimeError(f"resumed, the losses are {again} instead of {whole}")
    return {
        "tokens": [job.steps * job.batch * job.length / took],
        "losses": whole,
        "loss": [whole[-1]],
        "before": [before],
        "after": [after],
        "save": [saving],
        "noticed": [noticed],
        "back": [back],
    }


class Memory:
    """What a process takes more than at the time at which this was made."""

    def __init__(self) -> None:
        # The code of a step, some of which torch loads at its first use.
        layer = nn.Linear(8, 8)
        layer(torch.zeros(1, 8)).sum().backward()
        torch.optim.AdamW(layer.parameters()).step()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.before = _status("VmRSS")

    def most(self) -> int:
        """Return how much that was at most, bytes."""
        return max(_status("VmHWM") - self.before, 0)


def folder() -> str:
    """Return where a run's checkpoint goes."""
    return f"{os.environ['MEETING']}.checkpoint"


def _batch(job: GptJob, step: int) -> tuple[Tensor, Tensor]:
    trained, _ = text.load()
    return text.batch(trained, job.batch, job.length, (job.seed << 20) + step)


def _steps(driver: Driver, job: GptJob, begin: int, end: int) -> list[float]:
    return [driver.step(*_batch(job, step)) for step in range(begin, end)]


def _status(name: str) -> int:
    """Return a size of this process, bytes, as /proc has it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")
