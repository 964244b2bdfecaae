"""Stages on devices, on the fake CUDA of tests/support/fake_cuda: values go from stage to stage by
device map, and time is measured when the devices are done. A backward pass needs more than the fake
devices can do."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed import rpc

from tests.process.group import Group
from tests.process.test_cuda import devices
from tests.support import fake_cuda
from tests.support.backend import needs_ucx

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]
PLACES = ["worker1/cuda:0", "worker2/cuda:1", "worker2/cuda:0"]


class Plus(nn.Module):
    """Adds a number on the device where its parameter is, a little later."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor([number]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device == self.number.device
        return x + self.number


def layers() -> nn.Sequential:
    return nn.Sequential(Plus(1.0), Plus(2.0), Plus(3.0)).eval()


@pytest.fixture(scope="module")
def mapped() -> Iterator[Group]:
    """worker1 and worker2 have maps for each other, worker0 has none."""
    maps = [
        {},
        {"worker2": {"cuda:0": "cuda:1"}},
        {"worker1": {"cuda:1": "cuda:0"}},
    ]
    with devices(maps) as group:
        yield group


@pytest.fixture(scope="module")
def unmapped() -> Iterator[Group]:
    with devices([{}, {}, {}]) as group:
        yield group


def run_both() -> dict[str, dict[str, dict[str, int]]]:
    """Run forward and the pipeline; return what the devices of each worker did in each."""
    from torch_rpc_ext import sharding

    model = sharding.shard(layers(), PLACES)
    pipe = sharding.Pipeline(model, 4)
    x = torch.arange(40_000.0).view(8, 5000)
    found = {}
    for name, compute in (("forward", model), ("pipeline", pipe.forward)):
        workers = ["worker1", "worker2"]
        before = {worker: rpc.rpc_sync(worker, fake_cuda.counts) for worker in workers}
        made = compute(x)
        assert made.is_cpu and torch.equal(made, x + 6)
        after = {worker: rpc.rpc_sync(worker, fake_cuda.counts) for worker in workers}
        found[name] = {
            worker: {kind: after[worker][kind] - before[worker][kind] for kind in after[worker]}
            for worker in workers
        }
    return found


def test_values_go_by_device_map(mapped: Group, unmapped: Group) -> None:
    by_map, by_cpu = mapped.run(run_both), unmapped.run(run_both)
    # By way of the CPU a stage copies its output there and waits for it. By a map the transport
    # copies, which waits for nobody. The input comes from the CPU in any case.
    count = {"forward": 1, "pipeline": 4}
    for name, values in count.items():
        ways = by_map[name], by_cpu[name]
        assert [way["worker1"]["pageable"] for way in ways] == [values, 2 * values], name
        assert [way["worker1"]["device_to_host"] for way in ways] == [values, values]
    # Two stages of one worker: the pipeline hands the value over on the device.
    assert by_map["pipeline"]["worker2"]["device_to_device"] >= 4


class Late(nn.Module):
    """Takes 40 ms on the device, and no time here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        for _ in range(20):
            x = x + 1
        return x


class Early(nn.Module):
    """Takes 15 ms here, and no time on the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.015)
        return x.detach()


def measure() -> list[list[str]]:
    from torch_rpc_ext import sharding

    model = sharding.shard(
        nn.Sequential(Late(), Early(), Early()),
        ["worker0/cuda:0"] * 2,
        balance="time",
        example=torch.ones(2, 2, device="cuda:0"),
    )
    return [handle.names for handle in model.stages]


def test_time_is_measured_when_devices_are_done(unmapped: Group) -> None:
    assert unmapped.run(measure) == [["0"], ["1", "2"]]
