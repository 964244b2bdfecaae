"""The agent's launches, through calls between two processes on one GPU: values, order, memory that
is freed; sparse tensors; no synchronisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc
from torch.profiler import ProfilerActivity, profile, record_function

from tests.gpu import agent_calls
from tests.process.group import Group
from tests.support import trace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MAP = {"cuda:0": "cuda:0"}
WAYS = [False, True]


def pair(**options: Any) -> Group:
    return Group(
        2,
        options=[{"device_maps": {"worker1": MAP}, **options}, options],
        env={"TORCH_RPC_EXT_LOG": "info"},
    )


@pytest.fixture(scope="module", params=WAYS, ids=["staged", "cuda ipc"])
def two(request: pytest.FixtureRequest) -> Iterator[Group]:
    with pair(use_cuda_ipc=request.param) as group:
        yield group


def needs_kernels() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")


def test_values_order_and_memory(two: Group) -> None:
    needs_kernels()
    two.run(agent_calls.late_and_freed)
    output = two.workers[0].child.output()
    assert "cuda:0: kernel segments is launched" in output
    assert "cuda:0: kernel strided_" in output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts(two: Group, dtype: torch.dtype) -> None:
    two.run(agent_calls.narrow, dtype)


def test_sparse_tensors(two: Group) -> None:
    two.run(agent_calls.sparse)


@pytest.mark.parametrize("ipc", WAYS, ids=["staged", "cuda ipc"])
def test_checksums(ipc: bool) -> None:
    needs_kernels()
    with pair(use_cuda_ipc=ipc, integrity=True) as group:
        group.run(agent_calls.late_and_freed)
        group.run(agent_calls.narrow, torch.bfloat16)
        for worker in group:
            assert "cuda:0: kernel checksum is launched" in worker.child.output()


# ---- no synchronisation ------------------------------------------------------


def profiled_calls(path: str) -> None:
    sent = [agent_calls.late(1), agent_calls.late(2, 1)[:100]]
    for _ in range(5):  # loads kernels, tries CUDA IPC
        rpc.rpc_sync("worker1", agent_calls.twice, args=(sent,))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(trace.CALLS):
            for _ in range(5):
                agent_calls.pause()
                got = rpc.rpc_sync("worker1", agent_calls.twice, args=(sent,))
                got = [tensor + 1 for tensor in got]
    profiler.export_chrome_trace(path)


def profiled_serving(path: str, until: str) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(trace.CALLS):
            while not Path(until).exists():
                time.sleep(0.01)
    profiler.export_chrome_trace(path)


@pytest.mark.parametrize("checked", [False, True], ids=["", "integrity"])
@pytest.mark.parametrize("ipc", WAYS, ids=["staged", "cuda ipc"])
def test_no_synchronisation_in_a_profile_of_calls(tmp_path: Path, ipc: bool, checked: bool) -> None:
    here, there, end = (tmp_path / name for name in ("here.json", "there.json", "end"))
    with pair(use_cuda_ipc=ipc, integrity=checked) as group:
        group.run(agent_calls.narrow, torch.bfloat16)  # both processes have begun
        serving = group[1].start(profiled_serving, str(there), str(end))
        group.run(profiled_calls, str(here))
        end.touch()
        serving.result()
    for path in (here, there):
        names = trace.cuda_calls(path)
        assert any("LaunchKernel" in name for name in names), "nothing was recorded"
        assert trace.waits_in(names) == []
