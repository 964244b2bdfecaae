"""A worker that dies is noticed at once, by name, and disturbs nobody else."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group
from tests.support.backend import needs_ucx, on_ucx

QUICK = 2.0


def call_error(to: str) -> tuple[str, float]:
    """The text of the error that a long call to a dying worker ends with, and after how many
    seconds."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, f.sleep, args=(50.0,))
    return str(raised.value), time.monotonic() - start


def error_of_call_to(to: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, f.identity, args=(1,), timeout=10)
    return str(raised.value)


def check_alive(to: str) -> None:
    for i in range(20):
        assert rpc.rpc_sync(to, f.identity, args=(i,), timeout=10) == i


def named(name: str, text: str) -> bool:
    """TENSORPIPE does not say who died; we do."""
    return name in text or not on_ucx()


def test_a_running_call_fails_quickly_with_the_name() -> None:
    with Group(3) as group:
        call = group[0].start(call_error, "worker1")
        group[2].run(check_alive, "worker0")
        time.sleep(0.5)
        group[1].kill()
        text, seconds = call.result(20)
        assert seconds < 0.5 + QUICK and named("worker1", text), (text, seconds)
        group[0].run(check_alive, "worker2")
        group[2].run(check_alive, "worker0")


def test_calls_to_a_dead_worker_fail_quickly() -> None:
    with Group(3) as group:
        group.run(check_alive, "worker1")
        group[1].kill()
        start = time.monotonic()
        for _ in range(3):
            assert named("worker1", group.run(error_of_call_to, "worker1"))
        assert time.monotonic() - start < 2 * QUICK
        assert named(
            "worker1", group[2].run(error_of_call_to, "worker1")
        )  # never spoke to it before
        group[2].run(check_alive, "worker0")


def suicide_error() -> str:
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync("worker1", f.kill_self, timeout=20)
    return str(raised.value)


def test_a_function_that_kills_its_worker() -> None:
    with Group(2) as group:
        group[1].killed = True
        start = time.monotonic()
        assert named("worker1", group.run(suicide_error))
        assert time.monotonic() - start < QUICK


def stream(to: str, count: int) -> str:
    """Send large tensors until the receiver dies."""
    tensor = torch.ones(10_000_000)
    with pytest.raises(RuntimeError) as raised:
        for _ in range(count):
            rpc.rpc_sync(to, f.identity, args=(tensor,), timeout=20)
    return str(raised.value)


@pytest.mark.parametrize("after", [0.0, 0.2, 0.5])
def test_killed_in_the_middle_of_bulk(after: float) -> None:
    with Group(3) as group:
        group.run(check_alive, "worker1")
        call = group[0].start(stream, "worker1", 10_000)
        time.sleep(after)
        group[1].kill()
        assert named("worker1", call.result(20))
        group[0].run(check_alive, "worker2")


@needs_ucx("the others wait for ever")
def test_graceful_shutdown_after_a_death_is_bounded() -> None:
    with Group(3) as group:
        group[1].kill()
        start = time.monotonic()
        calls = [group[rank].start(shutdown_error) for rank in (0, 2)]
        texts = [call.result(30) for call in calls]
        assert time.monotonic() - start < 10, texts
        assert any("worker1" in text for text in texts), texts


def shutdown_error() -> str:
    try:
        rpc.shutdown(timeout=8)
    except RuntimeError as error:
        return str(error)
    return ""
