"""RRefs in messages that nobody reads: their values are released all the same."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc
from torch.distributed.rpc import RRef

from tests.process import functions as f
from tests.process.deaths import served, wait_until_serving, wait_until_stopped
from tests.process.group import Group
from tests.support import native
from tests.support.backend import needs_ucx

# Under TENSORPIPE each of these values stays for ever, and shutdown waits 100 s for it.
pytestmark = needs_ucx("keeps the values, and shutdown waits 100 s for them")

OWNER, USER = "worker1", "worker2"


class Unreadable:
    """Pickles well; reading the pickle raises a ValueError."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def only_here(*_: Any) -> None:
    """A function that USER does not have; see forget_function()."""


def forget_function() -> None:
    del sys.modules[__name__].only_here  # type: ignore[attr-defined]


LATER = threading.Event()


def set_later(now: bool) -> None:
    """Let the functions of this worker that answer later go on; or, not ``now``, let the next ones
    wait."""
    if now:
        LATER.set()
    else:
        LATER.clear()


def pass_later(rref: Any) -> Any:
    assert LATER.wait(60)
    return rref


def make_later() -> Any:
    assert LATER.wait(60)
    return rpc.RRef(torch.ones(2))


def pass_what_cannot_be_sent(rref: Any) -> Any:
    return rref, threading.Lock()


def pass_what_cannot_be_encoded(rref: Any) -> Any:
    return rref, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def pass_what_cannot_be_decoded(rref: Any) -> Any:
    return rref, torch._neg_view(torch.ones(2, dtype=torch.int64))


def pass_with_a_large_tensor(rref: Any) -> Any:
    return rref, torch.ones(1_000_000)


def pass_later_with_a_gradient(rref: Any) -> Any:
    assert LATER.wait(60)
    return rref, torch.ones(2, requires_grad=True)


def fetch_late_in_a_context(rref: Any) -> None:
    with autograd.context():
        made = rpc.remote(USER, pass_later_with_a_gradient, args=(rref,))
        with pytest.raises(RuntimeError):
            made.to_here(timeout=0.2)
        # USER answers before the context ends: later it could not.
        rpc.rpc_sync(USER, set_later, args=(True,))
        while rpc.rpc_sync(USER, served) > 1:  # the other one is this call
            time.sleep(0.01)
    raise RuntimeError("as the other calls")


def call_late_in_a_profile(rref: Any) -> None:
    with torch.autograd.profiler.profile():
        rpc.rpc_sync(USER, pass_later, args=(rref,), timeout=0.2)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def interrupted(wait: Callable[[], Any]) -> Any:
    """Interrupt a wait for what takes longer."""
    before = signal.signal(signal.SIGALRM, raise_interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        return wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def held() -> int:
    """How many forks of this worker's RRefs others have."""
    return int(rpc._get_debug_info()["num_forks"])


def make() -> torch.Tensor:
    return torch.ones(2)


def pass_in_vain(call: Callable[[Any], Any], error: type[BaseException]) -> None:
    """Make an RRef to a value at OWNER, pass it in a call that fails, and drop it."""
    rref = rpc.remote(OWNER, make)
    assert rref.to_here().sum() == 2
    with pytest.raises(error):
        call(rref)
    del rref


# name -> (the call, its error)
REQUESTS: dict[str, tuple[Callable[[Any], Any], type[BaseException]]] = {
    "cannot be pickled": (
        lambda r: rpc.rpc_sync(USER, f.nothing, args=(r, threading.Lock())),
        TypeError,
    ),
    "cannot be pickled, remote()": (
        lambda r: rpc.remote(USER, f.nothing, args=(r, threading.Lock())),
        TypeError,
    ),
    "no such worker": (lambda r: rpc.rpc_sync("worker9", f.nothing, args=(r,)), RuntimeError),
    "no such function": (lambda r: rpc.rpc_sync(USER, only_here, args=(r,)), AttributeError),
    "no such function, remote()": (
        lambda r: rpc.remote(USER, only_here, args=(r,)).to_here(),
        AttributeError,
    ),
    "cannot be read, before the RRef": (
        lambda r: rpc.rpc_sync(USER, f.nothing, args=(Unreadable(), r)),
        RuntimeError,
    ),
    "cannot be read, after the RRef": (
        lambda r: rpc.rpc_sync(USER, f.nothing, args=(r, Unreadable())),
        RuntimeError,
    ),
    "cannot be read at the owner": (
        lambda r: rpc.rpc_sync(OWNER, f.nothing, args=(Unreadable(), r)),
        RuntimeError,
    ),
}
ANSWERS: dict[str, tuple[Callable[[Any], Any], type[BaseException]]] = {
    "late": (lambda r: rpc.rpc_sync(USER, pass_later, args=(r,), timeout=0.2), RuntimeError),
    "late, from the owner": (
        lambda r: rpc.rpc_sync(OWNER, make_later, timeout=0.2),
        RuntimeError,
    ),
    "late, of to_here": (
        lambda r: rpc.remote(USER, pass_later, args=(r,)).to_here(timeout=0.2),
        RuntimeError,
    ),
    "cannot be sent": (
        lambda r: rpc.rpc_sync(USER, pass_what_cannot_be_sent, args=(r,)),
        RuntimeError,
    ),
    "late, of to_here, in an autograd context": (fetch_late_in_a_context, RuntimeError),
    "late, in a profile": (call_late_in_a_profile, RuntimeError),
    "cannot be encoded": (
        lambda r: rpc.rpc_sync(USER, pass_what_cannot_be_encoded, args=(r,)),
        RuntimeError,
    ),
    "cannot be encoded, of to_here": (
        lambda r: rpc.remote(USER, pass_what_cannot_be_encoded, args=(r,)).to_here(),
        RuntimeError,
    ),
    "cannot be decoded": (
        lambda r: rpc.rpc_sync(USER, pass_what_cannot_be_decoded, args=(r,)),
        RuntimeError,
    ),
    "cannot be decoded, of to_here": (
        lambda r: rpc.remote(USER, pass_what_cannot_be_decoded, args=(r,)).to_here(),
        RuntimeError,
    ),
    "interrupted": (
        lambda r: interrupted(lambda: rpc.rpc_sync(USER, pass_later, args=(r,))),
        KeyboardInterrupt,
    ),
    "interrupted, of to_here": (
        lambda r: interrupted(rpc.remote(USER, pass_later, args=(r,)).to_here),
        KeyboardInterrupt,
    ),
}


def pass_in_request(name: str) -> None:
    pass_in_vain(*REQUESTS[name])


def pass_in_answer(name: str) -> None:
    pass_in_vain(*ANSWERS[name])


def wait_until_released(group: Group, what: str) -> None:
    end = time.monotonic() + 20
    # First, because a function that still runs may make the RRef that is to be released.
    while any(worker.run(served) for worker in group if not worker.killed):
        assert time.monotonic() < end, f"{what}: a function still runs"
        time.sleep(0.01)
    while (left := group[1].run(held)) != 0:
        assert time.monotonic() < end, f"{what}: {left} forks are left"
        time.sleep(0.01)


def test_requests_that_are_not_read() -> None:
    with Group(3) as group:
        group[2].run(forget_function)
        for name in REQUESTS:
            group.run(pass_in_request, name)
            wait_until_released(group, name)


def return_unreadable(rref: Any) -> Any:
    return Unreadable(), rref


TO_ITSELF: dict[str, tuple[Callable[[Any], Any], type[BaseException]]] = {
    "a request that cannot be read": REQUESTS["cannot be read at the owner"],
    "an answer that cannot be read": (
        lambda r: rpc.rpc_sync(OWNER, return_unreadable, args=(r,)),
        ValueError,
    ),
    "a late answer": (
        lambda r: rpc.rpc_sync(OWNER, pass_later, args=(r,), timeout=0.2),
        RuntimeError,
    ),
}


def pass_to_itself(name: str) -> None:
    call, error = TO_ITSELF[name]
    LATER.clear()
    with pytest.raises(error):
        call(rpc.RRef(torch.ones(2)))
    LATER.set()


def test_calls_of_the_owner_to_itself() -> None:
    with Group(2) as group:
        for name in TO_ITSELF:
            group[1].run(pass_to_itself, name)
            wait_until_released(group, name)


def test_requests_that_are_refused() -> None:
    with Group(3, options={"allow_list": [f"{__name__}.make"]}) as group:
        group.run(pass_in_vain, small_call, RuntimeError)
        wait_until_released(group, "refused")


def test_requests_that_are_too_large() -> None:
    """The frame has arrived. Its receiver does not take the tensors, so it reads nothing."""
    with Group(3, options=[{}, {}, {"max_message_bytes": 1_000_000}]) as group:
        for call in (too_large_call, too_large_creation):
            group.run(pass_in_vain, call, RuntimeError)
            wait_until_released(group, call.__name__)


def too_large_call(rref: Any) -> None:
    rpc.rpc_sync(USER, f.nothing, args=(rref, torch.ones(1_000_000)))


def too_large_creation(rref: Any) -> None:
    rpc.remote(USER, f.nothing, args=(rref, torch.ones(1_000_000)))._get_future().wait()


def throw_at_the_next_request() -> None:
    native.base.throw_at("request", True)


def stop_throwing() -> None:
    assert not native.base.is_pending()
    native.base.stop_throwing()


def test_requests_that_cannot_be_served() -> None:
    """The callee is out of memory before it reads the request."""
    with Group(3) as group:
        for call in (small_call, small_creation):
            group[2].run(throw_at_the_next_request)
            group.run(pass_in_vain, call, RuntimeError)
            group[2].run(stop_throwing)
            wait_until_released(group, call.__name__)


def small_call(rref: Any) -> None:
    rpc.rpc_sync(USER, f.nothing, args=(rref,))


def small_creation(rref: Any) -> None:
    rpc.remote(USER, f.nothing, args=(rref,))._get_future().wait()


def test_answers_that_are_not_read() -> None:
    with Group(3) as group:
        for name in ANSWERS:
            group.run(pass_in_answer, name)
            group.run_all(set_later, True)  # the answer comes after the error, however late that is
            wait_until_released(group, name)
            group.run_all(set_later, False)


def test_answers_that_are_too_large() -> None:
    """Their caller does not take the tensors, so it does not know whose answer it is."""
    with Group(3, options=[{"max_message_bytes": 1_000_000}, {}, {}]) as group:
        group[0].run(pass_in_vain, too_large_answer, RuntimeError)
        wait_until_released(group, "an answer")


def too_large_answer(rref: Any) -> None:
    rpc.rpc_sync(USER, pass_with_a_large_tensor, args=(rref,))


@torch.jit.script
def take_in_script(rref: RRef[torch.Tensor]) -> int:
    return 1


def call_within_context(rref: Any) -> None:
    with autograd.context():
        rpc.rpc_sync(USER, f.nothing, args=(rref, torch.ones(2, requires_grad=True)))


def profiled_call(rref: Any) -> None:
    with torch.autograd.profiler.profile():
        rpc.rpc_sync(USER, f.nothing, args=(rref,))


CALLS: dict[str, Callable[[Any], Any]] = {
    "rpc_sync": lambda rref: rpc.rpc_sync(USER, f.nothing, args=(rref, 1)),
    "tensors beside it": lambda rref: rpc.rpc_sync(USER, f.nothing, args=(rref, torch.ones(9))),
    "remote": lambda rref: rpc.remote(USER, f.nothing, args=(rref,)).to_here(),
    "TorchScript": lambda rref: rpc.rpc_sync(USER, take_in_script, args=(rref,)),
    "TorchScript, remote": lambda rref: rpc.remote(USER, take_in_script, args=(rref,)).to_here(),
    "within an autograd context": call_within_context,
    "profiled": profiled_call,
}


def call_the_dead(how: str) -> None:
    pass_in_vain(CALLS[how], RuntimeError)


def connect() -> None:
    rpc.rpc_sync(USER, f.nothing)


def call_that_dies(seconds: float, timeout: float = 60.0) -> None:
    pass_in_vain(
        lambda rref: rpc.rpc_sync(USER, f.sleep, args=(seconds, rref), timeout=timeout),
        RuntimeError,
    )


@pytest.mark.parametrize("connected", [True, False])
def test_the_callee_dies_before_it_reads(connected: bool) -> None:
    with Group(3) as group:
        if connected:
            group[0].run(connect)
        group[2].signal(signal.SIGSTOP)
        wait_until_stopped(group[2].child.pid)
        call = group[0].start(call_that_dies, 0.0)
        time.sleep(0.3)
        group[2].kill()
        call.result()
        wait_until_released(group, "died before")


@pytest.mark.parametrize("connected", [True, False])
def test_the_callee_dies_after_the_time_out(connected: bool) -> None:
    """If the callee is not connected, the request waits for the connection, and outlives its
    call."""
    with Group(3) as group:
        if connected:
            group[0].run(connect)
        group[2].signal(signal.SIGSTOP)
        wait_until_stopped(group[2].child.pid)
        group[0].run(call_that_dies, 0.0, 0.5)
        assert group[1].run(held) == 1  # the callee may still read the request
        group[2].kill()
        wait_until_released(group, "died after the time-out")


def test_calls_to_the_dead() -> None:
    with Group(3) as group:
        group[2].kill()
        group[0].run(call_that_dies, 0.0)
        wait_until_released(group, "died before the first call")
        for how in CALLS:
            group.run(call_the_dead, how)
            wait_until_released(group, how)


def test_the_callee_dies_in_the_function() -> None:
    with Group(3) as group:
        call = group[0].start(call_that_dies, 50.0)
        wait_until_serving(group[2])
        group[2].kill()
        call.result()
        wait_until_released(group, "died in the function")


def return_rref_when_the_caller_is_lost() -> Any:
    end = time.monotonic() + 30
    while "worker0" not in rpc.api._get_current_rpc_agent().lost_workers():
        assert time.monotonic() < end
        time.sleep(0.01)
    return rpc.RRef(torch.ones(2))


def call_for_an_rref() -> None:
    rpc.rpc_sync(OWNER, return_rref_when_the_caller_is_lost)


def test_the_caller_dies_before_the_answer() -> None:
    with Group(3) as group:
        group[0].start(call_for_an_rref)
        wait_until_serving(group[1])
        group[0].kill()
        wait_until_released(group, "the caller died")
