"""Pipeline schedules against the ideal, and against one micro-batch after another.

Stages sleep a known time, so the figures are those of the schedule on any number of cores. Prints
the table of docs/sharding.md: python -m benchmarks.pipelines
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import autograd as _untyped_autograd

from tests.process.group import Group
from tests.process.models import Sleep

dist_autograd: Any = _untyped_autograd  # upstream's functions have no types

STAGES = 3
FORWARD, BACKWARD = 0.02, 0.04  # s
ROUNDS = 5
SIZES = (4, 8, 16)


def main() -> None:
    """Print the table."""
    print("| micro-batches | one after another | GPipe | 1F1B | held, GPipe | held, 1F1B |")
    print("|---|---|---|---|---|---|")
    with Group(STAGES + 1, timeout=300) as group:
        for count in SIZES:
            sequential, gpipe, one, held_gpipe, held_one = group.run(measure, count)
            print(
                f"| {count} | {sequential:.2f} | {gpipe:.2f} | {one:.2f} "
                f"| {held_gpipe} | {held_one} |"
            )


def measure(count: int) -> tuple[float, float, float, str, str]:
    """Return the times as multiples of the ideal, and what the stages held; on worker0."""
    from torch_rpc_ext import sharding

    layers = [nn.Linear(64, 64), *[Sleep(FORWARD, BACKWARD) for _ in range(STAGES)]]
    workers = [f"worker{stage + 1}" for stage in range(STAGES)]
    model = sharding.shard(nn.Sequential(*layers), workers, partition=[2, 1, 1])
    x, y = torch.randn(4 * count, 64), torch.randn(4 * count, 64)
    ideal = (count + STAGES - 1) * (FORWARD + BACKWARD)
    times = [_median(lambda: _one_after_another(model, x, y, count)) / ideal]
    held = []
    for schedule in ("gpipe", "1f1b"):
        pipeline = sharding.Pipeline(
            model, n_microbatches=count, loss_fn=nn.functional.mse_loss, schedule=schedule
        )
        times.append(_median(lambda: _batch(pipeline, x, y)) / ideal)  # noqa: B023  runs at once
        held.append(", ".join(str(stats.peak_micro_batches) for stats in pipeline.stats))
    return times[0], times[1], times[2], held[0], held[1]


def _one_after_another(model: Any, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
    for part, target in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [nn.functional.mse_loss(model(part), target)])


def _batch(pipeline: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    with dist_autograd.context():
        pipeline.forward_backward(x, y)


def _median(action: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[ROUNDS // 2]


if __name__ == "__main__":
    main()
