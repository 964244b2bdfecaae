"""Large tensors between workers that share no memory: over lanes, else through UCX."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

import torch_rpc_ext
from tests.process import functions as f
from tests.process.deaths import wait_until_stopped
from tests.process.group import Call, Group
from tests.process.test_hostile import listening_ports
from tests.support.backend import needs_ucx
from tests.support.cut import bytes_received
from tests.support.ports import free_ports
from torch_rpc_ext.errors import PeerLostError

pytestmark = needs_ucx("has lanes")
APART: dict[str, Any] = {"use_shared_memory": False, "use_cma": False}
LARGE = 400_000_000  # bytes


def echo(elements: int) -> bool:
    sent = torch.arange(elements, dtype=torch.float32)
    return torch.equal(rpc.rpc_sync("worker1", f.identity, args=(sent,)), sent)


def echo_many(elements: int, count: int) -> bool:
    sent = [torch.full((elements,), float(i)) for i in range(count)]
    futures = [rpc.rpc_async("worker1", f.identity, args=(tensor,)) for tensor in sent]
    return all(map(torch.equal, torch.futures.wait_all(futures), sent))


def path_of_bulk() -> str:
    (peer,) = torch_rpc_ext.info()["agent"]["peers"]
    return str(peer["bulk"])


@pytest.mark.parametrize("encryption", ["off", "on"])
def test_tensors_of_all_sizes(encryption: str) -> None:
    with Group(2, options={**APART, "encryption": encryption}) as group:
        for elements in (1, 100_000, 131_071, 131_072, 131_073, 1_000_003, 10_000_000):
            assert group[0].run(echo, elements)
        assert group[0].run(echo_many, 300_000, 20)
        assert group[0].run(path_of_bulk).startswith("lanes: tcp")


def test_small_tensors_need_no_lane() -> None:
    """A worker listens for lanes when the first large tensor is to come."""
    with Group(2, options=APART) as group:
        group[0].run(echo, 100_000)
        before = listening_ports(group[1].child.pid)
        group[0].run(echo, 1_000_000)
        assert len(listening_ports(group[1].child.pid)) == len(before) + 1


@pytest.mark.parametrize("seconds", [1e5, 1e10])
def test_a_keepalive_longer_than_linux_allows(seconds: float) -> None:
    with Group(2, options={**APART, "keepalive": seconds}) as group:
        assert group[0].run(echo, 1_000_000)


def log_to(path: str) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)


def test_a_range_without_a_third_port(tmp_path: Path) -> None:
    with Group(2, options={**APART, "port_range": free_ports(4)}) as group:
        for worker in group:
            worker.run(log_to, str(tmp_path / worker.name))
        for _ in range(3):
            assert group[0].run(echo, 1_000_000)
        for worker in group:
            (said,) = (tmp_path / worker.name).read_text().splitlines()
            assert "come through UCX" in said and "used up" in said


def test_lanes_come_when_a_port_is_free_again() -> None:
    low, high = free_ports(6)
    with contextlib.ExitStack() as taken:
        for port in (high - 1, high):
            taken.enter_context(socket.create_server(("", port)))
        with Group(2, options={**APART, "port_range": (low, high)}) as group:
            assert group[0].run(echo, 1_000_000)
            before = listening_ports(group[1].child.pid)
            assert len(before) == 2
            taken.close()
            deadline = time.monotonic() + 60
            while listening_ports(group[1].child.pid) == before:
                assert time.monotonic() < deadline, "the lanes are not tried again"
                assert group[0].run(echo, 1_000_000)
                time.sleep(0.1)


def send_and_wait() -> bool:
    sent = torch.ones(LARGE // 4)
    return bool(rpc.rpc_sync("worker1", torch.sum, args=(sent,)) == LARGE // 4)


def stop_in_the_middle(group: Group) -> Call:
    """Begin send_and_wait(), and stop worker1 when it has got some of the tensor and not yet half
    of it."""
    pid = group[1].child.pid
    assert group[0].run(echo, 1_000_000)  # the lanes are there
    for _ in range(20):
        before, deadline = bytes_received(pid), time.monotonic() + 60
        call = group[0].start(send_and_wait)
        while bytes_received(pid) < before + LARGE // 50:
            assert time.monotonic() < deadline, "the tensor does not come"
            time.sleep(0.001)
        group[1].signal(signal.SIGSTOP)
        wait_until_stopped(pid)
        if bytes_received(pid) < before + LARGE // 2:
            return call
        group[1].signal(signal.SIGCONT)
        assert call.result()
    raise AssertionError("worker1 was stopped too late, twenty times")


def test_a_callee_dies_while_lanes_carry_its_argument() -> None:
    with Group(3, options={**APART, "rpc_timeout": 60}) as group:
        call = stop_in_the_middle(group)
        group[1].kill()
        with pytest.raises(PeerLostError, match="worker1"):
            call.result()
        assert group[0].run(echo_from_third)


def echo_from_third() -> bool:
    sent = torch.ones(1_000_000)
    return torch.equal(rpc.rpc_sync("worker2", f.identity, args=(sent,)), sent)


def test_a_callee_is_stopped_while_lanes_carry_its_argument() -> None:
    """For longer than `keepalive`: the kernels still answer each other, so nothing is lost."""
    with Group(2, options={**APART, "rpc_timeout": 60, "keepalive": 1.0}) as group:
        call = stop_in_the_middle(group)
        time.sleep(3)
        assert not call.done()
        group[1].signal(signal.SIGCONT)
        assert call.result()
