"""The order in which a stage works on the micro-batches of a batch.

GPipe: all forwards, then all backwards (Huang et al., 2019). 1F1B: as few forwards as keep the
next stages busy, then one backward after each forward (Narayanan et al., 2019, without stale
weights). Both need the same time; 1F1B holds the activations of fewer micro-batches.

In both the backwards run in the order of the micro-batches. So both add up gradients in the same
order, and the results are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

__all__ = ["SCHEDULES", "Action", "Schedule", "forward_only", "gpipe", "one_forward_one_backward"]

Schedule = Literal["gpipe", "1f1b"]


class Action(NamedTuple):
    """One step: forward or backward of a micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def gpipe(stage: int, stages: int, count: int) -> list[Action]:
    """Return the steps of a stage under GPipe."""
    return _interleaved(count, count)


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[Action]:
    """Return the steps of a stage under 1F1B."""
    return _interleaved(stages - stage - 1, count)


def forward_only(count: int) -> list[Action]:
    """Return the steps of each stage in an evaluation."""
    return [Action("forward", index) for index in range(count)]


def _interleaved(ahead: int, count: int) -> list[Action]:
    """Return `ahead` forwards, then a forward and a backward in turns, then the other backwards."""
    ahead = min(ahead, count)
    steps = [Action("forward", index) for index in range(ahead)]
    for index in range(count):
        if ahead + index < count:
            steps.append(Action("forward", ahead + index))
        steps.append(Action("backward", index))
    return steps


SCHEDULES: dict[Schedule, Callable[[int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
