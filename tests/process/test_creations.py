"""A message that releases an RRef is served after the requests that may still make that RRef, and
waits for no other requests."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc
from torch.distributed.rpc import server_process_global_profiler

from tests.process import functions as f
from tests.process.deaths import wait_until_stopped
from tests.process.group import SECONDS, Group
from tests.support.backend import needs_ucx

_go_on = threading.Event()


def double_later(tensor: torch.Tensor) -> torch.Tensor:
    assert _go_on.wait(SECONDS)
    return tensor * 2


def go_on() -> None:
    _go_on.set()


def owned_values() -> int:
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


def wait_until_released() -> None:
    end = time.monotonic() + SECONDS / 4
    while owned_values() != 0:
        assert time.monotonic() < end, "the RRef's value is still there"
        time.sleep(0.01)


def begin_a_call_and_release_an_rref() -> None:
    """The call is wrapped for autograd, so only its inside tells that it makes no RRef."""
    rref: Any = rpc.remote("worker1", f.identity, args=(1,))
    assert rref.to_here() == 1
    with autograd.context():
        tensor = torch.ones(2, requires_grad=True)
        f.HELD["call"] = rpc.rpc_async("worker1", double_later, args=(tensor,), timeout=0)
        del rref


def test_a_call_in_a_context_holds_no_release_up() -> None:
    with Group(2) as group:
        group[0].run(begin_a_call_and_release_an_rref)
        group[1].run(wait_until_released)
        group[1].run(go_on)


def begin_a_creation_and_release_its_rref() -> None:
    tensor = torch.ones(2, requires_grad=True)
    with autograd.context():
        rref: Any = rpc.remote("worker1", double_later, args=(tensor,))
        del rref


def test_a_creation_in_a_context_comes_before_its_release() -> None:
    with Group(2) as group:
        group[0].run(begin_a_creation_and_release_its_rref)
        group[1].run(go_on)
        group[1].run(wait_until_released)


def wait_for_go_on() -> None:
    assert _go_on.wait(SECONDS)


def begin_a_long_creation_and_release_another_rref() -> None:
    f.HELD["long"] = rpc.remote("worker1", wait_for_go_on, timeout=0)
    rref: Any = rpc.remote("worker1", f.identity, args=(1,))
    assert rref.to_here() == 1
    del rref


def test_a_long_creation_holds_no_other_release_up() -> None:
    with Group(2) as group:
        group[0].run(begin_a_long_creation_and_release_another_rref)
        group[1].run(wait_until_released)
        group[1].run(go_on)


def hold_rref_of(worker: str) -> None:
    f.HELD["rref"] = rpc.remote(worker, f.identity, args=(1,))
    assert f.HELD["rref"].to_here() == 1


def create_with_the_rref_in_vain() -> None:
    rref: Any = rpc.remote("worker1", f.nothing, args=(f.HELD["rref"],), timeout=1)
    with pytest.raises(RuntimeError, match="timeout"):
        rref._get_future().wait()
    del rref


def drop_the_rref() -> None:
    f.HELD.clear()


def profile_requests() -> None:
    """Let torch profile all requests to this process."""
    profile = server_process_global_profiler._server_process_global_profile()
    f.HELD["profile"] = profile.__enter__()


@pytest.mark.parametrize("is_profiled", [False, True])
def test_a_creation_that_waits_for_its_arguments_comes_before_its_release(
    is_profiled: bool,
) -> None:
    """worker1 begins the creation once worker2 has confirmed that it is a user of worker2's RRef.
    By then the caller has given up."""
    with Group(3) as group:
        if is_profiled:
            group[1].run(profile_requests)
        group[0].run(hold_rref_of, "worker2")
        group[2].signal(signal.SIGSTOP)
        wait_until_stopped(group[2].child.pid)
        group[0].run(create_with_the_rref_in_vain)
        time.sleep(0.5)  # the release is there
        group[2].signal(signal.SIGCONT)
        group[1].run(wait_until_released)
        group[0].run(drop_the_rref)


def begin_a_creation_with_the_rref_and_release_another_rref() -> None:
    other: Any = rpc.remote("worker1", f.identity, args=(1,))
    assert other.to_here() == 1
    f.HELD["made"] = rpc.remote("worker1", f.nothing, args=(f.HELD["rref"],), timeout=0)
    del other


def test_a_creation_that_waits_for_its_arguments_holds_no_other_release_up() -> None:
    with Group(3) as group:
        group[0].run(hold_rref_of, "worker2")
        group[2].signal(signal.SIGSTOP)
        wait_until_stopped(group[2].child.pid)
        group[0].run(begin_a_creation_with_the_rref_and_release_another_rref)
        group[1].run(wait_until_released)
        group[2].signal(signal.SIGCONT)
        group[0].run(drop_the_rref)


def create_from_small_tensors_in_vain(seconds: float) -> None:
    """The tensors lie in the message's head, which is so large that the callee has to fetch it."""
    tensors = [torch.zeros(3000) for _ in range(1500)]
    rref: Any = rpc.remote("worker1", f.nothing, args=(tensors,), timeout=seconds)
    with pytest.raises(RuntimeError, match="timeout"):
        rref._get_future().wait()
    del rref


def served() -> int:
    return int(rpc.api._get_current_rpc_agent().get_metrics()["agent.calls_served"])


def are_served(count: int) -> bool:
    """Wait a while until so many calls have been served; return whether they have."""
    end = time.monotonic() + SECONDS / 4
    while served() < count:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@needs_ucx("does not count what it serves")
def test_a_creation_whose_message_is_still_fetched_comes_before_its_release() -> None:
    with Group(2) as group:
        group[0].run(hold_rref_of, "worker1")
        group[0].run(drop_the_rref)
        group[1].run(wait_until_released)
        rounds, seconds = 0, 0.4
        while rounds < 4:
            before = group[1].run(served)
            # So that the message and the release arrive together.
            group[1].signal(signal.SIGSTOP)
            wait_until_stopped(group[1].child.pid)
            group[0].run(create_from_small_tensors_in_vain, seconds)
            time.sleep(0.2)  # the release is there
            group[1].signal(signal.SIGCONT)
            if group[1].run(are_served, before + 2):
                rounds += 1
            else:  # the time-out came before the message was sent
                seconds *= 4
                assert seconds < 30, "the creation or its release has not come"
            group[1].run(wait_until_released)


@needs_ucx("has no such number")
def test_a_release_is_not_taken_for_the_last_call() -> None:
    with Group(2) as group:
        group[0].run(release_after_a_call)


def release_after_a_call() -> None:
    """The collector of garbage may release an RRef right after a call was sent. What is looked up
    by the thread's last call is still about that call."""
    rref: Any = rpc.remote("worker1", f.identity, args=(1,))
    assert rref.to_here() == 1
    future = rpc.rpc_async("worker1", f.identity, args=(2,))
    last = rpc.api._get_current_rpc_agent().last_call_id()
    del rref
    assert rpc.api._get_current_rpc_agent().last_call_id() == last
    assert future.wait() == 2
