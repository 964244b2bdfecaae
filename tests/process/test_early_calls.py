"""Calls and subscriptions of other threads while init_rpc() is at work."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.distributed import rpc
from torch.distributed.rpc import api

from tests.process import functions as f
from tests.process.group import Group, init
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("starts its agent in two steps")


def errors_before_the_start(rank: int, store: str) -> list[str]:
    """Initialise RPC. Return what watching and subscribing raise right before the agent starts."""
    from torch_rpc_ext import events

    errors = []
    start = api._set_and_start_rpc_agent

    def attempt_then_start(agent: object) -> None:
        for attempt in (
            lambda: agent.watch(1 - rank),  # type: ignore[attr-defined]
            lambda: events.on_worker_event(print),
        ):
            with pytest.raises(RuntimeError) as raised:
                attempt()
            errors.append(str(raised.value))
        start(agent)

    api._set_and_start_rpc_agent = attempt_then_start
    init(f"worker{rank}", rank, 2, f"file://{store}", {})
    rpc.shutdown()
    return errors


def test_before_the_agent_starts(tmp_path: Path) -> None:
    with Group(2, init=False) as group:
        calls = [
            worker.start(errors_before_the_start, worker.rank, str(tmp_path / "store"))
            for worker in group
        ]
        for call in calls:
            errors = call.result()
            assert len(errors) == 2
            assert all("RPC does not run yet" in error for error in errors), errors


def call_all_the_time(rank: int, folder: str) -> None:
    """Initialise RPC and shut it down, again and again, while another thread calls."""
    ended = threading.Event()

    def call() -> None:
        while not ended.wait(0.001):
            for worker in range(2):
                try:
                    future = rpc.rpc_async(f"worker{worker}", f.identity, args=(1,), timeout=1)
                    assert future.wait() == 1
                except RuntimeError:  # RPC does not run, or runs no longer
                    pass

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for cycle in range(5):
            init(f"worker{rank}", rank, 2, f"file://{folder}/{cycle}", {})
            rpc.shutdown(graceful=False)
    finally:
        ended.set()
        thread.join()


def test_a_thread_that_calls_all_the_time(tmp_path: Path) -> None:
    with Group(2, init=False) as group:
        calls = [worker.start(call_all_the_time, worker.rank, str(tmp_path)) for worker in group]
        for call in calls:
            call.result(120)
