"""CUDA tensors in calls that a callee runs on other threads than the one that took the request, on
the fake devices of tests/support/fake_cuda: what does not wait for a stream sees old bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

import torch_rpc_ext
from tests.process.group import Group
from tests.process.test_cuda import SAME, assert_ramp, devices, ramp
from tests.support.backend import needs_ucx
from torch_rpc_ext import aio
from torch_rpc_ext._calls.device_futures import new_future
from torch_rpc_ext._calls.failed_futures import fail

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]
SIZE = 100_000
TO = "worker1"


@aio.remote
async def values(tensor: Tensor, more: dict[str, list[Tensor]]) -> list[Tensor]:
    return [tensor.cpu(), *(each.cpu() for each in more["in"])]


@aio.batched(max_size=4, max_wait=0.05)
def values_of_batch(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


@aio.remote
async def plus(tensor: Tensor, number: int) -> Tensor:
    return tensor + number


@aio.batched(max_size=4, max_wait=0.05)
def plus_of_batch(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor + 1 for tensor in tensors]


def plain_plus(tensor: Tensor, number: int) -> Tensor:
    return tensor + number


def arguments() -> None:
    for start in range(10):
        found = values.sync(TO, ramp(SIZE, "cuda:0", start), {"in": [ramp(SIZE, "cuda:1", start)]})
        for tensor in found:
            assert_ramp(tensor, "cpu", start)
        for future in [values_of_batch.async_(TO, ramp(SIZE, "cuda:1", start)) for _ in range(4)]:
            assert_ramp(future.wait(), "cpu", start)


def results() -> None:
    for start in range(10):
        assert_ramp(plus.sync(TO, ramp(SIZE, "cuda:1", start), 1), "cuda:1", start + 1)
        assert_ramp(plus_of_batch.sync(TO, ramp(SIZE, "cuda:0", start)), "cuda:0", start + 1)


def retried() -> None:
    policy = torch_rpc_ext.RetryPolicy(attempts=2)
    for start in range(10):
        future: Any = policy.rpc_async(TO, plain_plus, args=(ramp(SIZE, "cuda:0", start), 1))
        assert_ramp(future.wait(), "cuda:0", start + 1)


def plain_key_error() -> None:
    raise KeyError("no such key")


@aio.remote
async def key_error() -> None:
    raise KeyError("no such key")


def errors() -> None:
    """A future with devices takes its value apart, also where the value stands for an error."""

    class Local(Exception):
        """Cannot be pickled."""

    policy = torch_rpc_ext.RetryPolicy(attempts=2)
    future: Any = policy.rpc_async(TO, plain_key_error)
    with pytest.raises(KeyError, match="no such key"):
        future.wait()
    with pytest.raises(KeyError, match="no such key"):
        key_error.sync(TO)
    here: Any = new_future()
    fail(here, Local("at the caller"))
    with pytest.raises(Local):
        here.wait()


@pytest.fixture(scope="module")
def cuda_pair() -> Iterator[Group]:
    with devices([{"worker1": SAME}, {"worker0": SAME}]) as group:
        yield group


@pytest.mark.parametrize("body", [arguments, results, retried, errors])
def test_cuda_tensors_on_other_threads(cuda_pair: Group, body: Any) -> None:
    cuda_pair.run(within, body.__name__)


def within(body: str) -> None:
    rpc.rpc_sync(TO, torch.add, args=(torch.ones(1), 1))
    globals()[body]()
