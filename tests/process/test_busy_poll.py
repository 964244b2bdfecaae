"""The option busy_poll: a thread that waits polls for a moment before it sleeps."""

from __future__ import annotations

import time

import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import workers
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("has no such option")

ONE = torch.ones(1)
# See csrc/base/busy_poll.h: so much of the time may be polled in vain, and so much at once.
_SHARE, _BURST_US = 50, 1100.0


def polls() -> dict[str, float]:
    metrics = rpc.api._get_current_rpc_agent().get_metrics()
    return {name: float(metrics[f"agent.busy_polls_{name}"]) for name in ("found", "missed")} | {
        "missed_us": float(metrics["agent.busy_polls_missed_us"])
    }


def call_often(to: str, times: int) -> None:
    for i in range(times):
        assert rpc.rpc_sync(to, torch.add, args=(ONE * i, 1)).item() == i + 1


@workers(2, options={"busy_poll": False})
def test_switched_off() -> None:
    call_often("worker1", 300)
    nothing = {"found": 0.0, "missed": 0.0, "missed_us": 0.0}
    assert polls() == nothing
    assert rpc.rpc_sync("worker1", polls) == nothing


@workers(2)
def test_little_time_is_polled_in_vain() -> None:
    # Answers that come soon, answers that come late, and pauses, in turns.
    before, begin = polls(), time.perf_counter()
    for _ in range(20):
        call_often("worker1", 20)
        rpc.rpc_sync("worker1", time.sleep, args=(0.002,))
        time.sleep(0.002)
    passed_us = (time.perf_counter() - begin) * 1e6
    after = polls()
    assert after["missed_us"] - before["missed_us"] <= passed_us / _SHARE + _BURST_US
    there = rpc.rpc_sync("worker1", polls)
    assert there["missed_us"] <= there["missed"] * 1e6  # each has a time


@workers(3)
def test_callers_and_callees_at_once() -> None:
    # In each worker a thread calls while threads of the pool serve: whoever polls gives way.
    names = ["worker0", "worker1", "worker2"]
    futures = [
        rpc.rpc_async(names[i], call_often, args=(names[(i + step) % 3], 200))
        for i in range(3)
        for step in (1, 2)
    ]
    call_often("worker1", 200)
    for future in futures:
        future.wait()
    assert rpc.rpc_sync("worker2", f.name_here) == "worker2"
