"""Stages on devices, on the fake CUDA of tests/support/fake_cuda: time is measured when the devices
are done. A backward pass needs more than the fake devices can do."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.process.group import Group
from tests.process.test_cuda import devices
from tests.support.backend import needs_ucx

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]


@pytest.fixture(scope="module")
def three() -> Iterator[Group]:
    with devices([{}, {}, {}]) as group:
        yield group


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


def test_time_is_measured_when_devices_are_done(three: Group) -> None:
    assert three.run(measure) == [["0"], ["1", "2"]]
