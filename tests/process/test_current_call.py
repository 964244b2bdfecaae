"""current_call(): what a remote function can ask about its call."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc
from torch.futures import Future

import torch_rpc_ext
from tests.process import functions as f
from tests.process.deaths import wait_until_stopped
from tests.process.group import SECONDS, Group, init, workers
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


_kept: list[Any] = []


def keep_call() -> None:
    _kept.append(torch_rpc_ext.current_call())


def call_one_that_keeps_its_call() -> None:
    rpc.rpc_sync("worker0", keep_call)


def start_again_before_a_message_is_taken(store: str) -> None:
    """worker1, which is stopped, may yet read the tensors, so the transport holds them. torch keeps
    an agent until the next one starts."""
    owners = [array("b", bytes(100_000)) for _ in range(17)]  # more tensors than are lent
    references = [weakref.ref(owner) for owner in owners]
    tensors = [torch.frombuffer(owner, dtype=torch.int8) for owner in owners]
    rpc.rpc_async("worker1", f.nothing, args=(tensors,))
    del owners, tensors
    rpc.shutdown(graceful=False)
    init("worker0", 0, 1, f"file://{store}", {})
    end = time.monotonic() + SECONDS / 4
    while any(reference() is not None for reference in references):
        assert time.monotonic() < end, "the tensors are still there"
        gc.collect()
        time.sleep(0.01)
    assert _kept[0].cancelled and _kept[0].caller == "worker1"


def test_a_call_that_is_kept_does_not_keep_the_transport(tmp_path: Path) -> None:
    with Group(2) as group:
        group[1].run(call_one_that_keeps_its_call)
        group[1].signal(signal.SIGSTOP)
        wait_until_stopped(group[1].child.pid)
        group[0].run(start_again_before_a_message_is_taken, str(tmp_path / "store"))
        group[1].kill()
