"""What tests/gpu/test_agent_calls.py does on a GPU, with small tensors on the fake devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu import agent_calls
from tests.process.group import Group
from tests.support import fake_cuda, libcuda
from tests.support.backend import needs_ucx

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]

MAP = {"cuda:0": "cuda:0"}


def pair(**options: Any) -> Group:
    libcuda.needs_headers()
    fake_cuda.build()
    env = libcuda.environment(uuids="a")
    maps = [{"device_maps": {"worker1": MAP}, **options}, options]
    group = Group(2, options=maps, env=env, init=False)
    group.run_all(fake_cuda.install, 1)
    group.run_all(small)
    group.init_all()
    return group


def small() -> None:
    agent_calls.ROWS = 60


@pytest.fixture(scope="module", params=[False, True], ids=["staged", "cuda ipc"])
def two(request: pytest.FixtureRequest) -> Iterator[Group]:
    with pair(use_cuda_ipc=request.param, integrity=True) as group:
        yield group


def test_values_order_and_memory(two: Group) -> None:
    two.run(agent_calls.late_and_freed)


def test_casts(two: Group) -> None:
    two.run(agent_calls.narrow, torch.bfloat16)


def test_sparse_tensors(two: Group) -> None:
    two.run(agent_calls.sparse)
