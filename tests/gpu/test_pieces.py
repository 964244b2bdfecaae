"""Large tensors that leave a GPU, and are copied to it, piece by piece, between two processes that
use no memory of each other's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import rpc

from tests.gpu.test_ipc_calls import check_late_values
from tests.process.group import Group
from tests.process.test_network import group_on
from tests.support import netns

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MAP = {"cuda:0": "cuda:0"}
ELEMENTS = 25_000_000  # of 4 bytes


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    apart = {"use_cma": False, "use_cuda_ipc": False}
    with Group(2, options=[{"device_maps": {"worker1": MAP}, **apart}, apart]) as group:
        yield group


def late_values() -> None:
    rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(1),))  # the connection is open
    check_late_values(ELEMENTS)


def test_values_are_those_of_the_stream(pair: Group) -> None:
    pair.run(late_values)


def many() -> None:
    tensors = [torch.randn(ELEMENTS // 4, device="cuda:0") for _ in range(12)]
    futures = [rpc.rpc_async("worker1", torch.neg, args=(tensor,)) for tensor in tensors]
    for tensor, future in zip(tensors, futures, strict=True):
        assert torch.equal(future.wait(), -tensor)


def test_many_at_once(pair: Group) -> None:
    pair.run(many)


def echoes() -> float:
    """GB/s of 400 MB there and back, both ways added, the best of ten."""
    tensor = torch.arange(100_000_000, dtype=torch.int32, device="cuda:0")
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        got = rpc.rpc_sync("worker1", torch.add, args=(tensor, 1))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        assert torch.equal(got, tensor + 1)
    return 2 * tensor.nbytes / min(seconds) / 1e9


def test_between_two_hosts(hosts: tuple[netns.Host, netns.Host]) -> None:
    """Prints what the pieces gain: with checksums a message leaves as a whole."""
    maps = {"worker0": MAP, "worker1": MAP}
    for whole in (False, True):
        with group_on(hosts, hosts[0].ipv4, device_maps=maps, integrity=whole) as group:
            print("whole, with checksums" if whole else "in pieces", group.run(echoes), "GB/s")
