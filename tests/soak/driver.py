"""Mixed calls between four workers for ten minutes: `make soak`.

There are ten rounds. After each round, when all calls have ended, every worker reports what it
holds. After the first minute, memory, descriptors and threads must not grow. Every call must give
the right result.
"""

from __future__ import annotations

import time

import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.chaos import load
from tests.process import functions as f
from tests.process.group import Group

WORKERS = 4
ROUNDS = 10
#: How much may come and go between two rounds. In MB: memory (the allocator's arenas), memory in
#: use, and memory shared with other processes (blocks of 40 MB that a cache keeps). The rest are
#: counts (the pool starts a thread when it first needs one).
SLACK = {
    "memory": 40.0,
    "allocated": 10.0,
    "shared": 160.0,
    "fds": 4.0,
    "threads": 8.0,
    "pending": 0.0,
}
#: When the workers are measured for the first time: by then the caches are full.
WARM_UP_SECONDS, WARM_UP_ROUNDS = 60.0, 3
LARGE = 10_000_000  # elements


def mixed(others: list[str], seconds: float, seed: int) -> tuple[int, list[str]]:
    """Make the calls of the chaos test, all of which must succeed; then send large tensors and use
    autograd.

    Returns the number of calls and what went wrong, but not the calls themselves: pickling tens of
    thousands of calls takes blocks of several MB, and at the end of each thread's arena glibc's
    malloc() keeps twice the largest block that was freed. The test would find its own list.
    """
    report = load.run(others, 0.8 * seconds, seed)
    wrong = report.wrong + [
        f"{call.kind}: {call.outcome}" for call in report.calls if call.outcome != "right"
    ]
    end = time.monotonic() + 0.2 * seconds
    while time.monotonic() < end:
        for other in others:
            # This makes no temporary of 10 MB, which malloc() would keep as well.
            lowest, highest = torch.aminmax(
                rpc.rpc_sync(other, f.identity, args=(torch.ones(LARGE),))
            )
            if not lowest == highest == 1:
                wrong.append(f"a large tensor came back changed from {other}")
            if not backward(other):
                wrong.append(f"a wrong gradient through {other}")
    return len(report.calls), wrong


def backward(other: str) -> bool:
    """Make a distributed backward pass; return whether the gradient is right."""
    weight = torch.ones(1000, requires_grad=True)
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync(other, f.times, args=(weight, 3.0)).sum()
        dist_autograd.backward(context, [loss])
        return bool((dist_autograd.get_gradients(context)[weight] == 3).all())


def soak(seconds: float, seed: int) -> list[str]:
    """Run for about ``seconds`` and print a table; return what is wrong."""
    wrong: list[str] = []
    first: list[dict[str, float]] = []
    calls, began, warm = 0, time.monotonic(), False
    print(f"{'round':>5} {'calls':>9}   most of any worker: " + "  ".join(f"{w:>9}" for w in SLACK))
    with Group(WORKERS, timeout=seconds + 120) as group:
        names = [worker.name for worker in group.workers]
        for number in range(ROUNDS):
            running = [
                worker.start(
                    mixed, [n for n in names if n != worker.name], seconds / ROUNDS, seed + rank
                )
                for rank, worker in enumerate(group.workers)
            ]
            for call in running:
                count, problems = call.result(seconds + 120)
                calls += count
                wrong += problems
            time.sleep(1)  # acknowledgements, and threads that end
            held = [worker.run(load.footprint) for worker in group.workers]
            most = {what: max(one[what] for one in held) for what in SLACK}
            print(f"{number:>5} {calls:>9} {'':>22}" + "  ".join(f"{most[w]:9.0f}" for w in SLACK))
            warm = warm or number == WARM_UP_ROUNDS or time.monotonic() - began >= WARM_UP_SECONDS
            first = first or (held if warm else [])
        for name, before, after in zip(names, first, held, strict=True):
            wrong += [
                f"{name}: {what} grew from {before[what]:.0f} to {after[what]:.0f}"
                for what, slack in SLACK.items()
                if after[what] > before[what] + slack
            ]
    return wrong
