"""What a pipeline and its stages tell each other about a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_rpc_ext.sharding.autocast import Autocast
from torch_rpc_ext.sharding.schedule import Action

__all__ = ["Evaluation", "Job", "Result", "Route", "StageStats", "Training"]


@dataclass(frozen=True)
class Route:
    """The stages of a pipeline, as each of them knows them.

    Attributes:
        name: of the pipeline, unique in the group.
        workers: one per stage.
        loss_fn: for the last stage; called with the output and the target of a micro-batch.
        patience: how long to wait for a neighbour, s; 0 for ever. A caller that lives gives the
            batch up earlier.
    """

    name: str
    workers: list[str]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    patience: float


@dataclass(frozen=True)
class Training:
    """Forward and backward; the result is the loss of the batch.

    Attributes:
        context: id of the distributed autograd context that gets the gradients; None for .grad.
        scale: what the loss is multiplied by before backward.
    """

    context: int | None
    scale: float


@dataclass(frozen=True)
class Evaluation:
    """Forward without autograd.

    Attributes:
        metric: for the last stage; called with the output and the target of a micro-batch. The
            result is the list of what it returns. None for the outputs, or for the loss.
        wants_loss: whether the result is the loss of the batch.
    """

    metric: Callable[[Any, Any], Any] | None
    wants_loss: bool


@dataclass(frozen=True)
class Job:
    """A batch, for one stage.

    Attributes:
        batch: its number, from 1.
        task: what is computed.
        steps: of the stage.
        weights: of the loss of each micro-batch.
        autocast: the caller's.
        inputs: of the whole batch, for the first stage; else None.
        target: of the whole batch, for the last stage; else None.
    """

    batch: int
    task: Training | Evaluation
    steps: Sequence[Action]
    weights: Sequence[float]
    autocast: tuple[Autocast, ...]
    inputs: Any
    target: Any


@dataclass(frozen=True)
class StageStats:
    """How a stage has spent a batch; see Pipeline.stats.

    Attributes:
        stage: index of the stage, from 0.
        worker: name of its worker.
        peak_micro_batches: the most micro-batches whose activations the stage held at a time.
        compute_s: time in forwards and backwards, s.
        total_s: time from its first step to its last, waiting included, s.
    """

    stage: int
    worker: str
    peak_micro_batches: int
    compute_s: float
    total_s: float


#: What the task asks for, on the last stage; how the time was spent.
Result = tuple[Any, StageStats]
