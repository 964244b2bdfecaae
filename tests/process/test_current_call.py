"""current_call(): what a remote function can ask about its call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed import rpc
from torch.futures import Future

import torch_rpc_ext
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("has no current_call()")


def caller(*_: Any) -> str:
    return torch_rpc_ext.current_call().caller


@rpc.functions.async_execution
def caller_later() -> Future[str]:
    """Ask the call for its caller on another thread, maybe after the function has returned."""
    call, future = torch_rpc_ext.current_call(), Future[str]()
    threading.Thread(target=lambda: future.set_result(call.caller)).start()
    return future


class Asker:
    def caller(self) -> str:
        return caller()


def caller_through(to: str) -> tuple[str, str, str]:
    """Return the caller of this function before a nested call, the caller of the nested call, and
    the caller after it."""
    return caller(), str(rpc.rpc_sync(to, caller)), caller()


def refused() -> str:
    with pytest.raises(RuntimeError) as raised:
        torch_rpc_ext.current_call()
    return str(raised.value)


@rpc.functions.async_execution
def refused_on_another_thread() -> Future[str]:
    future = Future[str]()
    threading.Thread(target=lambda: future.set_result(refused())).start()
    return future


@workers(2)
def test_the_caller_has_a_name() -> None:
    assert rpc.rpc_sync("worker1", caller) == "worker0"
    assert rpc.rpc_async("worker1", caller).wait() == "worker0"
    assert rpc.remote("worker1", caller).to_here() == "worker0"
    assert rpc.rpc_sync("worker1", caller_later) == "worker0"
    assert rpc.remote("worker1", caller_later).to_here() == "worker0"
    rref = rpc.remote("worker1", Asker)
    assert rref.rpc_sync().caller() == "worker0"
    assert rref.remote().caller().to_here() == "worker0"
    assert rpc.rpc_sync("worker0", caller) == "worker0"
    assert rpc.rpc_sync("worker1", caller_through, args=("worker0",)) == (
        "worker0",
        "worker1",
        "worker0",
    )


@workers(3)
def test_a_call_whose_rrefs_are_yet_to_be_confirmed() -> None:
    """The function begins on the thread that receives the confirmation."""
    for _ in range(20):
        rref = rpc.remote("worker2", Asker)
        assert rpc.rpc_sync("worker1", caller, args=(rref,)) == "worker0"
        assert rpc.remote("worker1", caller, args=(rref,)).to_here() == "worker0"


@workers(2)
def test_where_no_remote_function_runs() -> None:
    assert "no remote function runs" in refused()
    assert "no remote function runs" in rpc.rpc_sync("worker1", refused_on_another_thread)
    future = rpc.rpc_async("worker1", caller).then(lambda _: refused())
    assert "no remote function runs" in future.wait()


_began, _end = threading.Event(), threading.Event()
_seen: list[bool] = []


def watch_caller() -> None:
    call = torch_rpc_ext.current_call()
    _seen.append(call.cancelled)
    _began.set()
    while not call.cancelled and not _end.wait(0.01):
        pass
    _seen.append(call.cancelled)
    _seen.append(call.caller == "worker0")
    _end.set()


def wait_for_begin() -> None:
    assert _began.wait(30)


def what_was_seen() -> list[bool]:
    assert _end.wait(30)
    return _seen


def call_and_wait() -> None:
    rpc.rpc_sync("worker1", watch_caller)


def test_the_caller_dies() -> None:
    with Group(2) as group:
        group[0].start(call_and_wait)
        group[1].run(wait_for_begin)
        group[0].kill()
        assert group[1].run(what_was_seen) == [False, True, True]
