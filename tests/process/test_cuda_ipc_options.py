"""The options wire_dtype and integrity by CUDA IPC, on the fakes of test_cuda_ipc_calls.py."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process.group import Group
from tests.process.test_cuda import SWAPPED, assert_ramp, ramp
from tests.process.test_cuda_ipc_calls import (
    devices,
    hold,
    metric,
    released,
    until,
    until_devices,
)
from tests.process.test_cuda_kernels import without_compiler
from tests.support import fake_cuda
from tests.support.backend import needs_ucx
from tests.support.libcuda import FakeCuda
from torch_rpc_ext import errors, wire_dtype

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]


def narrowed(dtype: torch.dtype) -> None:
    """Tensors have the same values as when they are staged, and half as many bytes are copied."""
    sizes = (1, 100, 3000, 17, 100_000)
    numbers = [torch.linspace(-3, 3, size) + 0.0001 for size in sizes]
    sent = metric("sent_bytes")
    with wire_dtype(dtype):
        future = rpc.rpc_async("worker1", twice, args=([one.to("cuda:0") for one in numbers],))
    junk = [torch.full((size,), -1.0).to("cuda:0") for size in sizes]
    for got, one in zip(future.wait(), numbers, strict=True):
        assert got.dtype == torch.float32 and got.device == torch.device("cuda:0")
        assert torch.equal(got.cpu(), one.to(dtype).float() * 2)
    del junk
    assert metric("sent_bytes") - sent == 2 * sum(sizes)


def twice(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor * 2 for tensor in tensors]


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with devices([{"worker1": SWAPPED}, {}]) as group:
        group.run(until_devices, "worker1", "cuda ipc")
        for worker in group:
            worker.run(released)
        yield group


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(pair: Group, dtype: torch.dtype) -> None:
    pair.run(narrowed, dtype)


@pytest.fixture(scope="module")
def checked() -> Iterator[Group]:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    with devices([{"worker1": SWAPPED}, {}], integrity=True) as group:
        group.run(until_devices, "worker1", "cuda ipc")
        for worker in group:
            worker.run(released)
        yield group


def summed() -> dict[str, int]:
    """Make a call with small and large tensors; return how often each kernel for checksums was
    launched."""
    tensors = [ramp(size, "cuda:0") for size in (10, 20, 30, 40, 100_000, 200_000)]
    FakeCuda().forget_calls()
    with fake_cuda.counted() as counts:
        results = rpc.rpc_async("worker1", twice, args=(tensors,)).wait()
    for tensor, result in zip(tensors, results, strict=True):
        assert torch.equal(result.cpu(), tensor.cpu() * 2)
    calls = FakeCuda().calls("cuLaunchKernel")
    counts["checksums"] = sum("checksum" in call for call in calls)
    return counts


def test_checksums_are_the_devices(checked: Group) -> None:
    counts = checked.run(summed)
    # One block of small tensors and two large tensors leave, and as many arrive.
    assert counts["checksums"] == 6
    assert counts["synchronizations"] == counts["device_to_host"] == counts["host_to_device"] == 0
    checked.run(narrowed, torch.bfloat16)
    for worker in checked:
        worker.run(released)


ran: list[int] = []


def notes_that_it_ran(tensor: torch.Tensor) -> torch.Tensor:
    ran.append(1)
    return tensor


def times_run() -> int:
    return len(ran)


HELD: dict[str, Any] = {}


def send_and_change() -> None:
    """Change memory between the sender's checksum and the receiver's copy."""
    tensor = ramp(100_000, "cuda:0")
    FakeCuda().forget_calls()
    HELD["future"] = rpc.rpc_async("worker1", notes_that_it_ran, args=(tensor,))
    until(lambda: metric("held_messages") == 1)
    until(lambda: any("checksum" in call for call in FakeCuda().calls("cuLaunchKernel")))
    time.sleep(0.5)  # by now the kernel has computed the sender's checksum
    tensor[7] = -1.0
    tensor.cpu()


def is_corrupted() -> None:
    with pytest.raises(errors.IntegrityError, match="tensor 0 of the message changed on its way"):
        HELD.pop("future").wait()
    assert rpc.rpc_sync("worker1", times_run) == 0
    assert_ramp(
        rpc.rpc_sync("worker1", notes_that_it_ran, args=(ramp(100_000, "cuda:0"),)), "cuda:0", 0
    )
    released()


def test_a_tensor_that_changes_before_it_is_copied(checked: Group) -> None:
    checked[1].run(hold, True)
    checked.run(send_and_change)
    checked[1].run(hold, False)
    checked.run(is_corrupted)


def test_without_kernels_there_are_no_checksums() -> None:
    with devices([{"worker1": SWAPPED}, {}], integrity=True) as group:
        group.run_all(without_compiler)
        group.run(until_devices, "worker1", "cuda ipc")
        assert group.run(summed)["checksums"] == 0
