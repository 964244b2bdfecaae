"""Bodies of test_agent_calls.py: calls with CUDA tensors from worker0 to worker1. They need no more
than torch's operators, so that tests/process/test_cuda_gpu_bodies.py runs them in small on the fake
devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from torch_rpc_ext import wire_dtype

#: TEST_GPU_ROWS=... : rows of 1000 floats in the large tensors.
ROWS = int(os.environ.get("TEST_GPU_ROWS", "4000"))
DEVICE = "cuda:0"


def pause() -> None:
    """Keep the current stream busy, so that what does not wait for it sees old bytes."""
    if torch.backends.cuda.is_built():
        torch.cuda._sleep(50_000_000)  # else the fake devices are late by themselves


def expected(start: int, rows: int = 0) -> Tensor:
    count = (rows or ROWS) * 1000
    return torch.arange(start, start + count, dtype=torch.float32).remainder_(4096)


def late(start: int, rows: int = 0) -> Tensor:
    """Numbers that a stream has only after a while."""
    zeros = torch.zeros((rows or ROWS) * 1000).to(DEVICE)
    values = expected(start, rows).to(DEVICE)
    pause()
    return zeros + values


def twice(tensors: Sequence[Tensor]) -> list[Tensor]:
    pause()
    return [tensor * 2 for tensor in tensors]


def check(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.device == torch.device(DEVICE)
        assert torch.equal(one.cpu(), other)


def parts(base: Tensor) -> list[Tensor]:
    """Parts of a storage: columns, rows, blocks, small and large."""
    table = base.view(-1, 1000)
    return [table.t()[3], table[:, 10:13], table[5], table.t()[::5], table[: len(table) // 3]]


def late_and_freed() -> None:
    """The work that makes tensors is under way when they are sent and freed."""
    futures = []
    for start in range(5):
        whole, base = late(start), late(start + 1)
        small = [late(start + i, 1)[: 100 + i].mul(1) for i in range(20)]
        futures.append(rpc.rpc_async("worker1", twice, args=([whole, *parts(base), *small],)))
        del whole, base, small
        junk = [torch.zeros(ROWS * 1000).to(DEVICE) for _ in range(3)]
        del junk
    for start, future in enumerate(futures):
        small = [expected(start + i, 1)[: 100 + i] for i in range(20)]
        want = [expected(start), *parts(expected(start + 1)), *small]
        check(future.wait(), [tensor * 2 for tensor in want])


def narrow(dtype: torch.dtype) -> None:
    base = late(7)
    want = [part.to(dtype).float() for part in parts(expected(7))]
    with wire_dtype(dtype):
        got = rpc.rpc_sync("worker1", twice, args=(parts(base),))
    check(got, [(one * 2).to(dtype).float() for one in want])


def sparse() -> None:
    """A COO tensor there and back, and a CSR one there: torch's futures of devices hold none."""
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
    values = late(1)[:3].mul(1)
    coo = torch.sparse_coo_tensor(indices.to(DEVICE), values, (3, 3), is_coalesced=True)
    rows, columns = torch.tensor([0, 1, 2, 3]), torch.tensor([2, 0, 1])
    csr = torch.sparse_csr_tensor(rows.to(DEVICE), columns.to(DEVICE), values, (3, 3))
    got = rpc.rpc_sync("worker1", same, args=(coo,))
    assert got.device == torch.device(DEVICE) and got.layout == torch.sparse_coo
    check_equal(elements(got), elements(coo))
    check_equal(rpc.rpc_sync("worker1", elements, args=(csr,)), elements(csr))


def same(tensor: Tensor) -> Tensor:
    return tensor


def check_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.device == torch.device(DEVICE) and torch.equal(one.cpu(), other.cpu())


def elements(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


def metric(name: str) -> int:
    agent: Any = rpc.api._get_current_rpc_agent()
    return int(agent.get_metrics()[f"agent.{name}"])
