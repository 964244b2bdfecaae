"""The end of a distributed autograd context, at the workers that were called in the context."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor
from torch.distributed import autograd, rpc

from tests.process import functions as f
from tests.process.group import SECONDS, Group, workers
from tests.support.backend import needs_ucx

_GATES = {"answer": threading.Event(), "next": threading.Event()}


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def double_behind_a_gate(tensor: Tensor) -> Tensor:
    wait_at_gate("answer")
    return tensor * 2


def wait_at_gate(gate: str) -> None:
    assert _GATES[gate].wait(SECONDS)


def open_gate(gate: str) -> None:
    _GATES[gate].set()


def call_and_leave_the_context() -> None:
    tensor = torch.ones(2, requires_grad=True)
    with autograd.context():
        f.HELD["answer"] = rpc.rpc_async("worker1", double_behind_a_gate, args=(tensor,))
        f.HELD["next"] = rpc.rpc_async("worker1", wait_at_gate, args=("next",))
    assert f.contexts() == 0


def test_a_context_that_a_late_answer_made_again_ends_too() -> None:
    # One thread for requests: worker1 hears of the end of the context after both calls.
    with Group(2, options=[{}, {"num_worker_threads": 1}]) as group:
        group[0].run(call_and_leave_the_context)
        group[1].run(open_gate, "answer")
        group[0].run(f.wait_for_contexts, 1)
        group[1].run(open_gate, "next")
        for worker in group:
            worker.run(f.wait_for_contexts, 0)


def metric(name: str) -> int:
    return int(rpc.api._get_current_rpc_agent().get_metrics()[f"agent.{name}"])


@needs_ucx("sends a message that changes nothing")
@workers(3)
def test_the_worker_that_ends_a_context_is_not_asked_to_end_it() -> None:
    tensor = torch.ones(2, requires_grad=True)
    for _ in range(5):
        with autograd.context():
            for worker in ("worker1", "worker2"):
                tensor = rpc.rpc_sync(worker, double, args=(tensor,))
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, f.wait_for_contexts, args=(0,))
    end = time.monotonic() + SECONDS / 2
    while metric("client_active_calls") != 0:  # the last messages have their answers
        assert time.monotonic() < end
        time.sleep(0.01)
    assert metric("calls_served") == 0
