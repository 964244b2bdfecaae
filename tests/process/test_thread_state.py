"""Thread state that a remote function leaves behind is gone before the next request; and a fetched
tensor is an ordinary tensor, whatever the state of the thread that fetches it."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import rpc
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

from tests.process import functions as f
from tests.process.deaths import wait_for_file
from tests.process.group import Group, workers
from torch_rpc_ext import aio

CALLS = 16
_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("_VARIABLE", default=0)
_kept: list[Any] = []


class Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # pragma: no cover
        return func(*args, **(kwargs or {}))


def enter(manager: Any) -> None:
    """Enter a context manager and never leave it, as a faulty program does."""
    _kept.append(manager)  # its destructor would leave the context
    manager.__enter__()


def no_grad() -> None:
    torch.set_grad_enabled(False)


def inference_mode() -> None:
    enter(torch.inference_mode())


def autocast() -> None:
    enter(torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False))


def default_device() -> None:
    torch.set_default_device("meta")


def device_context() -> None:
    enter(torch.device("meta"))


def dispatch_mode() -> None:
    enter(Mode())


def saved_tensors_hooks() -> None:
    enter(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))


def no_torch_function() -> None:
    enter(torch._C.DisableTorchFunction())


def forward_grad() -> None:
    torch._C._set_fwd_grad_enabled(False)


def backward_in_one_thread() -> None:
    torch._C._set_multithreading_enabled(False)


def contexts() -> None:
    _VARIABLE.set(7)
    decimal.getcontext().prec = 3


LEAVERS: list[Callable[[], None]] = [
    no_grad,
    inference_mode,
    autocast,
    default_device,
    device_context,
    dispatch_mode,
    saved_tensors_hooks,
    no_torch_function,
    forward_grad,
    backward_in_one_thread,
    contexts,
]


def state() -> dict[str, Any]:
    """The thread state that a function finds."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": str(torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast nesting": torch.autocast_increment_nesting() - torch.autocast_decrement_nesting()
        == 1
        and _nesting(),
        "device": str(torch.get_default_device()),
        "made on": str(torch.empty(1).device),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "torch function": torch._C._is_torch_function_enabled(),
        "hooks": _saves_what_it_is_given(),
        "forward grad": torch._C._is_fwd_grad_enabled(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "variable": _VARIABLE.get(),
        "precision": decimal.getcontext().prec,
    }


def _nesting() -> int:
    depth = int(torch.autocast_increment_nesting()) - 1
    torch.autocast_decrement_nesting()
    return depth


def _saves_what_it_is_given() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def leave_async(leave: Callable[[], None]) -> Future[None]:
    leave()
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _leave_in_callback(leave: Callable[[], None], done: Future[Any]) -> None:
    done.wait()
    leave()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def leave_in_callback(leave: Callable[[], None]) -> Future[None]:
    """Run ``leave`` in a callback, which runs on the thread that takes the answer from worker0."""
    future: Future[Any] = rpc.rpc_async("worker0", f.nothing)
    return future.then(lambda done: _leave_in_callback(leave, done))


@torch.jit.script
def multiplied(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def local(rref: Any) -> tuple[bool, bool]:
    value = rref.local_value()
    return value.requires_grad, value.is_inference()


def by_sync(leave: Callable[[], None]) -> None:
    rpc.rpc_sync("worker1", leave)


def by_remote(leave: Callable[[], None]) -> None:
    rpc.remote("worker1", leave).to_here()


def by_async_execution(leave: Callable[[], None]) -> None:
    rpc.rpc_sync("worker1", leave_async, args=(leave,))


def by_callback(leave: Callable[[], None]) -> None:
    rpc.rpc_sync("worker1", leave_in_callback, args=(leave,))


@aio.remote
async def leave_in_task(leave: Callable[[], None]) -> None:
    async def leave_in_another_task() -> None:
        leave()
        await asyncio.sleep(0)

    await asyncio.create_task(leave_in_another_task())
    leave()


@aio.remote
async def state_in_task() -> dict[str, Any]:
    await asyncio.sleep(0)
    return state()


@aio.batched(max_size=1, max_wait=0)
def leave_in_batch(leaves: list[Callable[[], None]]) -> list[None]:
    for leave in leaves:
        leave()
    return [None] * len(leaves)


@aio.batched(max_size=1, max_wait=0)
def state_in_batch(numbers: list[int]) -> list[dict[str, Any]]:
    return [state() for _ in numbers]


def by_task(leave: Callable[[], None]) -> None:
    leave_in_task.sync("worker1", leave)


def by_batch(leave: Callable[[], None]) -> None:
    leave_in_batch.sync("worker1", leave)


def check_left(leave: Callable[[], None], by: Callable[..., None]) -> None:
    before = rpc.rpc_sync("worker1", state)
    here = state()
    with torch.autograd.profiler.profile():
        pass  # not a state of this thread
    for _ in range(CALLS):
        by(leave)
    # Every kind of request that could show a state left behind.
    for _ in range(CALLS):
        assert rpc.rpc_sync("worker1", state) == before
        assert rpc.remote("worker1", state).to_here() == before
        assert state_in_task.sync("worker1") == before
        assert state_in_batch.sync("worker1", 0) == before
    weight = torch.ones(2, requires_grad=True)
    for function in (torch.mul, f.times, multiplied):
        args = (weight,) if function is multiplied else (weight, 2.0)
        for _ in range(CALLS):
            rref = rpc.remote("worker1", function, args=args)
            assert rpc.rpc_sync("worker1", local, args=(rref,)) == (True, False), function
    assert state() == here


@pytest.mark.parametrize("leave", LEAVERS, ids=lambda leave: leave.__name__)
def test_a_functions_state_of_its_thread_ends_with_it(leave: Callable[[], None]) -> None:
    with Group(2, options={"num_worker_threads": 2}) as group:
        for by in (by_sync, by_remote, by_async_execution, by_callback, by_task, by_batch):
            group[0].run(check_left, leave, by)


@aio.remote
async def state_before_and_after(leave: Callable[[], None], gate: str) -> list[dict[str, Any]]:
    leave()
    before = state()
    Path(gate).touch()
    while Path(gate).exists():
        await asyncio.sleep(0.001)
    return [before, state()]


def check_task(leave: Callable[[], None], gate: Path) -> None:
    new = state_in_task.sync("worker1")
    future = state_before_and_after.async_("worker1", leave, str(gate))
    wait_for_file(gate)
    assert state_in_task.sync("worker1") == new
    gate.unlink()
    before, after = future.wait()
    assert before == after != new
    assert state_in_task.sync("worker1") == new


@pytest.mark.parametrize("leave", LEAVERS, ids=lambda leave: leave.__name__)
def test_a_tasks_state_is_its_own(leave: Callable[[], None], tmp_path: Path) -> None:
    with Group(2) as group:
        group[0].run(check_task, leave, tmp_path / "gate")


def fetch(how: str, function: Callable[..., Any], args: tuple[Any, ...], to: str) -> Any:
    if how == "sync":
        return rpc.rpc_sync(to, function, args=args)
    if how == "async":
        return rpc.rpc_async(to, function, args=args).wait()
    return rpc.remote(to, function, args=args).to_here()


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse_csr()


def listed(value: torch.Tensor) -> list[torch.Tensor]:
    return [value]


class Rebuilds:
    """Unpickling this object makes a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.ones(2)

    def __getstate__(self) -> int:
        return 2

    def __setstate__(self, count: int) -> None:
        self.tensor = torch.ones(count)


@workers(2)
def test_what_is_fetched_in_inference_mode_is_an_ordinary_tensor() -> None:
    small, large = torch.ones(2), torch.ones(1 << 16)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (torch.mul, (small, 2)),
        (torch.mul, (large, 2)),
        (f.times, (small, 2.0)),
        (f.times, (large, 2.0)),
        (listed, (small,)),
        (multiplied, (small,)),
        (f.to_sparse, (torch.eye(3), "coo")),
        (sparse, ()),
        (Rebuilds, ()),
    ]
    with torch.inference_mode():
        for to in ("worker0", "worker1"):
            for how in ("sync", "async", "to_here"):
                for function, args in calls:
                    value = fetch(how, function, args, to)
                    value = value[0] if isinstance(value, list) else value
                    value = value.tensor if isinstance(value, Rebuilds) else value
                    if how == "to_here" and to == "worker0":
                        continue  # on the owner this is the value itself
                    assert not value.is_inference(), (to, how, function)
        assert torch.is_inference_mode_enabled()
        fetched = rpc.rpc_sync("worker1", torch.mul, args=(small, 2))
    weight = torch.ones(2, requires_grad=True)
    (weight * fetched).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]


@workers(2)
def test_what_is_fetched_under_a_mode_is_an_ordinary_tensor() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        future = rpc.rpc_sync("worker1", f.nothing), rpc.rpc_sync("worker1", sparse_sum)
    assert type(future[1]) is torch.Tensor and future[1].item() == 3.0


def sparse_sum() -> torch.Tensor:
    return sparse().sum()
