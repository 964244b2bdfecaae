"""CUDA IPC through whole calls, between two processes on one GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process.group import Group
from tests.support import netns

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MAP = {"cuda:0": "cuda:0"}
FLOATS = 4_000_000


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with Group(2, options=[{"device_maps": {"worker1": MAP}}, {}]) as group:
        yield group


def agent() -> Any:
    return rpc.api._get_current_rpc_agent()


def metric(name: str) -> int:
    return int(agent().get_metrics()[f"agent.cuda_ipc_{name}"])


def ways(worker: str) -> tuple[str, str]:
    [found] = [peer for peer in agent().describe_peers() if peer["worker"] == worker]
    return found["devices"], found["devices_why"]


def until_ipc() -> None:
    """Make calls until tensors go and come by CUDA IPC."""
    deadline = time.monotonic() + 20
    found: list[tuple[str, str]] = []
    while time.monotonic() < deadline:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(3, device="cuda:0"), 1))
        found = [ways("worker1"), rpc.rpc_sync("worker1", ways, args=("worker0",))]
        if all(way == "cuda ipc" for way, _ in found):
            return
        time.sleep(0.01)
    raise TimeoutError(f"ways of worker0 and worker1: {found}")


def released() -> None:
    deadline = time.monotonic() + 20
    while metric("held_messages") != 0:
        assert time.monotonic() < deadline, "the receiver has not let go"
        time.sleep(0.005)


def check_late_values(elements: int) -> None:
    """The work that makes a tensor of int32 is under way when the tensor is sent and freed."""
    for start in range(10):
        tensor = torch.arange(elements, dtype=torch.int32, device="cuda:0")
        torch.cuda._sleep(100_000_000)
        tensor += start
        future = rpc.rpc_async("worker1", torch.add, args=(tensor, 1))
        del tensor
        junk = torch.full((elements,), -1, dtype=torch.int32, device="cuda:0")
        want = torch.arange(start + 1, start + 1 + elements, dtype=torch.int32, device="cuda:0")
        assert torch.equal(future.wait(), want)
        del junk, want


def late_values() -> None:
    until_ipc()
    sent = metric("sent_bytes")
    check_late_values(FLOATS)
    assert metric("sent_bytes") - sent == 10 * 4 * FLOATS
    released()


def test_values_order_and_memory(pair: Group) -> None:
    pair.run(late_values)


def on_a_stream_of_the_user() -> None:
    until_ipc()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(FLOATS, device="cuda:0")
        torch.cuda._sleep(100_000_000)
        tensor += 5
        result = rpc.rpc_sync("worker1", torch.mul, args=(tensor, 2))
        total = result.sum()
    stream.synchronize()
    assert total.item() == 10 * FLOATS


def test_a_stream_of_the_user(pair: Group) -> None:
    pair.run(on_a_stream_of_the_user)


def many() -> None:
    until_ipc()
    sent = metric("sent_bytes")
    tensors = [torch.full((1000,), float(i), device="cuda:0") for i in range(500)]
    results = rpc.rpc_sync("worker1", list, args=(tensors,))
    assert all(torch.equal(a, b) for a, b in zip(tensors, results, strict=True))
    assert metric("sent_bytes") - sent == 500 * 4000


def test_500_tensors(pair: Group) -> None:
    pair.run(many)


def sends_and_dies() -> None:
    until_ipc()
    tensor = torch.zeros(FLOATS, device="cuda:0")
    tensor += 1  # loads the kernel, for which CUDA would wait for the work below
    for _ in range(100):  # minutes
        torch.cuda._sleep(10_000_000_000)
    tensor += 1
    rpc.rpc_async("worker1", torch.add, args=(tensor, 1))
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def lives_on() -> None:
    until_ipc()
    for start in range(100):  # more than torch has streams
        tensor = torch.full((FLOATS,), float(start), device="cuda:0")
        assert torch.equal(rpc.rpc_sync("worker1", torch.mul, args=(tensor, 2)), tensor * 2)


def test_a_sender_that_is_killed_before_its_tensor_is_there() -> None:
    maps = {"device_maps": {"worker1": MAP}}
    with Group(3, options=[maps, {}, maps]) as group:
        group[0].killed = True
        with pytest.raises(Exception, match="worker0 ended"):
            group.run(sends_and_dies)
        group.broken = False
        group[2].run(lives_on)


# ---- other machines: skipped where there is only one plain GPU ----------------


def across() -> None:
    until_ipc()
    for start in range(3):
        tensor = torch.arange(float(FLOATS), device="cuda:0")
        torch.cuda._sleep(100_000_000)
        tensor += start
        got = rpc.rpc_sync("worker1", on_second, args=(tensor,))
        assert torch.equal(got, torch.arange(float(FLOATS), device="cuda:0") + start + 1)


def on_second(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.device == torch.device("cuda:1")
    return tensor + 1


def test_gpus_that_cannot_access_each_other() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("cuda:0 and cuda:1 can access each other")
    with Group(2, options=[{"device_maps": {"worker1": {"cuda:0": "cuda:1"}}}, {}]) as group:
        group.run(across)


def staged_because(text: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for size in (3, FLOATS):
            tensor = torch.arange(float(size), device="cuda:0")
            assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(tensor, 1)), tensor + 1)
        way, why = ways("worker1")
        if way == "staged" and text in why:
            assert metric("sent_bytes") == 0
            return
    raise AssertionError(f"the way is {way}, since {why}")


def test_a_mig_slice() -> None:
    """CUDA_VISIBLE_DEVICES=MIG-... in the environment, as `nvidia-smi -L` names one."""
    if "MIG" not in torch.cuda.get_device_name(0):
        pytest.skip("cuda:0 is no MIG slice")
    with Group(2, options=[{"device_maps": {"worker1": MAP}}, {}]) as group:
        group.run(staged_because, "is a MIG slice")


def test_containers() -> None:
    """Workers in namespaces of their own, as two containers of one machine."""
    try:
        with netns.two_hosts() as hosts:
            address = hosts[0].ipv4
            with Group(
                2,
                hosts=hosts,
                options=[{"device_maps": {"worker1": MAP}}, {}],
                init_method=f"tcp://{address}:29512",
                env={"MASTER_ADDR": address, "MASTER_PORT": "29512"},
            ) as group:
                group.run(staged_because, "another")
    except netns.NotPossible as reason:
        pytest.skip(str(reason))


def memory_comes_and_goes() -> None:
    """The sender gives memory back to CUDA between the calls, and may get its addresses again."""
    until_ipc()
    for number in range(5):
        tensor = torch.full((FLOATS * (1 + number % 2),), float(number), device="cuda:0")
        assert rpc.rpc_sync("worker1", torch.sum, args=(tensor,)).item() == tensor.sum().item()
        del tensor
        released()
        torch.cuda.empty_cache()


def test_memory_that_is_given_back(pair: Group) -> None:
    pair.run(memory_comes_and_goes)
