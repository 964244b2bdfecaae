"""What a process still has after rpc.shutdown(), in which it may call init_rpc again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process.deaths import wait_until_stopped
from tests.process.group import Group, init
from tests.support.backend import needs_ucx
from tests.support.child import Child
from tests.support.ports import free_ports

pytestmark = needs_ucx("has other descriptors, and no port_range")

BY_TCP = {"use_shared_memory": False, "use_cma": False}


def use_three_ports_again(folder: str, ports: tuple[int, int]) -> None:
    for round in range(3):
        init("worker0", 0, 1, f"file://{folder}/{round}", {"port_range": ports})
        assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)) == 2
        rpc.shutdown()


def test_three_ports_serve_one_group_after_another(tmp_path: Path) -> None:
    with Group(1, init=False) as group:
        group[0].run(use_three_ports_again, str(tmp_path), free_ports(3))


def wait_in_a_group(store: str, options: dict[str, Any]) -> None:
    init("other", 1, 2, f"file://{store}", options)
    Path(f"{store}.ready").touch()
    time.sleep(1000)


def leave_stopped_peers(folder: str, options: dict[str, Any], when: str) -> list[int]:
    """Return how many descriptors this process has after each of several groups that it left while
    the other worker was stopped."""
    counts = []
    for round in range(3):
        store = f"{folder}/{round}"
        other = Child(wait_in_a_group, (store, options), name="other")
        other.start()
        try:
            init("worker0", 0, 2, f"file://{store}", options)
            while not Path(f"{store}.ready").exists():
                time.sleep(0.01)
            if when != "before the first call":
                rpc.rpc_sync("other", torch.add, args=(torch.ones(1), 1))
            other.signal(signal.SIGSTOP)
            wait_until_stopped(other.pid)
            # More than fit into the queue of shared memory of a worker that takes nothing.
            calls = 3000 if when == "in a flood" else 1
            futures = [
                rpc.rpc_async("other", torch.add, args=(torch.ones(200), 1), timeout=0.5)
                for _ in range(calls)
            ]
            for future in futures:
                with pytest.raises(RuntimeError):
                    future.wait()
            del futures, future
            rpc.shutdown(graceful=False)
        finally:
            other.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.parametrize(
    ("options", "when"),
    [
        pytest.param(BY_TCP, "before the first call", id="opening-tcp"),
        pytest.param(BY_TCP, "after a call", id="open-tcp"),
        pytest.param({}, "before the first call", id="opening-shm"),
        pytest.param({}, "in a flood", id="full-shm"),
    ],
)
def test_nothing_is_left_of_a_group_with_a_stopped_worker(
    tmp_path: Path, options: dict[str, Any], when: str
) -> None:
    with Group(1, init=False) as group:
        # Starts a server of processes and three processes, which takes a busy machine a minute.
        leaving = group[0].start(leave_stopped_peers, str(tmp_path), options, when)
        counts = leaving.result(150)
    # What is loaded at the first use, and the former group until the next begins, stay.
    assert counts[2] <= counts[1] + 1, counts
