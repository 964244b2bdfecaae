"""The callee knows the deadline of a call: it does not begin a call that nobody waits for, and a
running function can ask."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc
from torch.distributed.rpc import RRef

import torch_rpc_ext
from tests.process import functions as f
from tests.process.group import SECONDS, Group, workers
from tests.support.backend import needs_ucx
from torch_rpc_ext import aio, errors

pytestmark = needs_ucx("tells callees nothing of time-outs")

SHORT = 0.3  # s; a time-out that passes during the test
#: Such time-outs, too; but within one of these a call begins, however busy the machine is.
LONGER_AND_LONGER = (SHORT, 3.0, 15.0)
RAN: list[str] = []
_began, _end = threading.Event(), threading.Event()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS / 2
    while not condition():
        assert time.monotonic() < end, "nothing happened for a long time"
        time.sleep(0.01)


def metric(name: str) -> int:
    return int(rpc.api._get_current_rpc_agent().get_metrics()[f"agent.{name}"])


def note(text: str, *_: Any) -> str:
    RAN.append(text)
    return text


def ran() -> list[str]:
    return RAN


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def block() -> None:
    _began.set()
    assert _end.wait(SECONDS)


def wait_for_begin() -> None:
    assert _began.wait(SECONDS)


def let_go() -> None:
    _end.set()


def start_to_block(to: str) -> None:
    rpc.rpc_async(to, block, timeout=0)


def wait_for_queue(waiting: int) -> None:
    """Wait until so many requests wait behind block()."""
    wait_until(lambda: metric("queued_requests") >= waiting)


def release_too_late(waiting: int, seconds: float) -> None:
    """Let block() end after ``waiting`` requests have waited for longer than their time-outs."""
    wait_for_queue(waiting)
    time.sleep(seconds)
    _end.set()


def release_once_it_blocks(waiting: int, seconds: float) -> None:
    """As release_too_late(), where block() may not have begun yet."""
    wait_for_begin()
    release_too_late(waiting, seconds)


def make_calls_that_time_out() -> list[str]:
    to, x = "worker1", torch.ones(2)
    with autograd.context():
        recorded = rpc.rpc_async(to, note, ("recorded", x.requires_grad_()), timeout=SHORT)
    rref = rpc.remote(to, note, ("remote",), timeout=SHORT)
    futures = [
        recorded,
        rpc.rpc_async(to, note, ("plain",), timeout=SHORT),
        rpc.rpc_async(to, torch.add, (x, 1), timeout=SHORT),
        rpc.rpc_async(to, scripted, (x,), timeout=SHORT),
        rpc.rpc_async(to, note, ("bulk", torch.ones(1 << 20)), timeout=SHORT),
    ]
    texts = []
    for future in futures:
        with pytest.raises(errors.CallTimeoutError) as raised:
            future.wait()
        texts.append(str(raised.value))
    with pytest.raises(RuntimeError):
        rref.to_here()
    # This call runs after all of them, because the callee has only one thread.
    assert rpc.rpc_sync(to, note, ("in time",), timeout=0) == "in time"
    return texts


def test_a_request_whose_deadline_has_passed_is_not_begun() -> None:
    with Group(2, options=[{}, {"num_worker_threads": 1}]) as group:
        group[0].run(start_to_block, "worker1")
        group[1].run(wait_for_begin)
        release = group[1].start(release_too_late, 6, 2 * SHORT)
        texts = group[0].run(make_calls_that_time_out)
        assert all("worker1" in text for text in texts)
        release.result()
        assert group[1].run(ran) == ["in time"]
        assert group[1].run(metric, "calls_not_begun") == 6


def call_and_forget(to: str) -> None:
    for text in ("a", "b"):
        rpc.rpc_async(to, note, (text,), timeout=0)


def release_when_lost(caller: str) -> None:
    agent: Any = rpc.api._get_current_rpc_agent()
    wait_until(lambda: caller in agent.lost_workers())
    _end.set()


def note_there(to: str, text: str) -> str:
    return str(rpc.rpc_sync(to, note, (text,), timeout=0))


def test_a_request_of_a_dead_caller_is_not_begun() -> None:
    with Group(3, options=[{}, {"num_worker_threads": 1}, {}]) as group:
        group[2].run(start_to_block, "worker1")
        group[1].run(wait_for_begin)
        group[0].run(call_and_forget, "worker1")
        group[1].run(wait_for_queue, 2)
        group[0].kill()
        group[1].run(release_when_lost, "worker0")
        assert group[2].run(note_there, "worker1", "in time") == "in time"
        assert group[1].run(ran) == ["in time"]
        assert group[1].run(metric, "calls_not_begun") == 2


def share_what_is_not_begun(timeout: float) -> str:
    rref = rpc.remote("worker1", note, ("remote",), timeout=timeout)
    fetched = rpc.rpc_async("worker2", f.fetch, (rref,), timeout=0)
    with pytest.raises(RuntimeError) as raised:
        fetched.wait()
    return str(raised.value)


def test_the_rref_of_a_call_that_is_not_begun_has_an_error() -> None:
    """Without an error, another holder of the RRef would wait for ever for a value that nobody
    computes."""
    timeout = 3.0
    with Group(3, options=[{}, {"num_worker_threads": 1}, {}]) as group:
        group[2].run(start_to_block, "worker1")
        group[1].run(wait_for_begin)
        text = group[0].start(share_what_is_not_begun, timeout)
        # Two requests wait: the call, and the other worker's request for the RRef's value.
        group[1].run(release_too_late, 2, timeout + SHORT)
        assert "did not begin the call" in text.result()
        assert group[1].run(ran) == []


def times() -> tuple[float | None, float | None, bool]:
    call = torch_rpc_ext.current_call()
    left = None if call.deadline is None else call.deadline - time.monotonic()
    return left, call.remaining, call.cancelled


@workers(2)
def test_how_long_the_caller_waits() -> None:
    assert rpc.rpc_sync("worker1", times, timeout=0) == (None, None, False)
    for timeout in (20, 1e6):
        left, remaining, cancelled = rpc.rpc_sync("worker1", times, timeout=timeout)
        assert 0 < remaining <= left <= timeout + 0.01 and left > timeout - 15 and not cancelled
    # The default time-out is that of the options; a time-out of more than 49 days does not fit into
    # the frame.
    assert rpc.rpc_sync("worker1", times)[0] <= rpc.get_rpc_timeout() + 0.01
    assert rpc.rpc_sync("worker1", times, timeout=5e6) == (None, None, False)


_seen: list[bool] = []


def run_until_cancelled() -> None:
    call = torch_rpc_ext.current_call()
    _seen.append(call.cancelled)
    wait_until(lambda: call.cancelled)
    _seen.append(call.remaining == 0)
    _end.set()


def wait_for_the_end_if_it_began(notes: list[Any]) -> None:
    if not _end.wait(2) and notes:
        assert _end.wait(SECONDS)


def seen() -> list[bool]:
    """What the timed-out call has noted, if it had begun."""
    wait_for_the_end_if_it_began(_seen)
    _end.clear()
    found = _seen.copy()
    _seen.clear()
    return found


@workers(2)
def test_a_running_function_sees_the_deadline_pass() -> None:
    found = []
    for timeout in LONGER_AND_LONGER:
        # A busy caller may get the answer before it looks at the clock.
        with contextlib.suppress(errors.CallTimeoutError):
            rpc.rpc_sync("worker1", run_until_cancelled, timeout=timeout)
        found.append(rpc.rpc_sync("worker1", seen))
        if found[-1] == [False, True]:
            return
    raise AssertionError(found)


def number_of_values() -> int:
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


def give_up_a_remote_call() -> None:
    rref = rpc.remote("worker1", block, timeout=3.0)
    rpc.rpc_sync("worker1", wait_for_begin)
    with pytest.raises(errors.CallTimeoutError):
        rref._get_future().wait()
    del rref
    rpc.rpc_sync("worker1", let_go)  # served after the message that releases the RRef


def wait_until_no_value_is_left() -> None:
    wait_until(lambda: number_of_values() == 0)


def test_the_value_of_a_remote_call_that_nobody_waits_for_is_freed() -> None:
    """The caller releases the RRef before the function has made its value."""
    with Group(2) as group:
        group[0].run(give_up_a_remote_call)
        group[1].run(wait_until_no_value_is_left)


def take(rref: Any, tensor: Any = None) -> None:
    """Is given up before it can begin."""


@torch.jit.script
def take_in_script(rref: RRef[torch.Tensor]) -> bool:
    return rref.is_owner()


def give_up_calls_with_rrefs() -> None:
    rref = rpc.remote("worker1", torch.add, args=(torch.ones(1), 1))
    rref.to_here()
    busy = rpc.rpc_async("worker1", block, timeout=0)  # occupies its only thread
    with autograd.context():
        calls = [
            rpc.rpc_async("worker1", take, (rref,), timeout=SHORT),
            rpc.rpc_async("worker1", take, (rref, torch.ones(1_000_000)), timeout=SHORT),
            rpc.rpc_async("worker1", take, (rref, torch.ones(1).requires_grad_()), timeout=SHORT),
            rpc.rpc_async("worker1", take_in_script, (rref,), timeout=SHORT),
        ]
        for call in calls:
            with pytest.raises(errors.CallTimeoutError):
                call.wait()
    busy.wait()
    # This call is served after all of them. A busy worker may give some up before they are sent.
    assert 1 <= rpc.rpc_sync("worker1", metric, ("calls_not_begun",), timeout=0) <= 4
    del rref, calls, call


def test_rrefs_in_calls_that_are_not_begun_are_let_go_of() -> None:
    """If they were not, shutdown would wait 100 s for them, at both ends."""
    with Group(2, options={"num_worker_threads": 1}) as group:
        release = group[1].start(release_once_it_blocks, 4, 2 * SHORT)
        group[0].run(give_up_calls_with_rrefs)
        release.result()
        group[1].run(wait_until_no_value_is_left)


# ---- async def -----------------------------------------------------------------------------------


@aio.remote
async def callers() -> list[str]:
    """The caller of this function, as it is seen here, in a new task, and on another thread."""

    async def inside() -> str:
        return torch_rpc_ext.current_call().caller

    return [
        torch_rpc_ext.current_call().caller,
        await asyncio.create_task(inside()),
        await asyncio.to_thread(lambda: torch_rpc_ext.current_call().caller),
    ]


@aio.remote
async def run_until_cancelled_async(text: str) -> None:
    call = torch_rpc_ext.current_call()
    RAN.append("began")
    _began.set()
    try:
        await asyncio.sleep(10 * SECONDS)
    except asyncio.CancelledError:
        RAN.append(f"cancelled: {call.cancelled}")
        _end.set()
        raise


def what_ran() -> list[str]:
    assert _end.wait(SECONDS)
    return RAN


@workers(2)
def test_an_async_def_knows_its_call() -> None:
    assert callers.sync("worker1") == ["worker0"] * 3
    assert callers.sync("worker0") == ["worker0"] * 3


def what_ran_if_it_began() -> list[str]:
    wait_for_the_end_if_it_began(RAN)
    return RAN


@workers(2)
def test_an_async_def_is_cancelled_at_the_deadline() -> None:
    for timeout in LONGER_AND_LONGER:
        with pytest.raises(errors.CallTimeoutError):
            run_until_cancelled_async.sync("worker1", "", rpc_timeout=timeout)
        if found := rpc.rpc_sync("worker1", what_ran_if_it_began):
            break
    assert found == ["began", "cancelled: True"]


def cancel_once_it_runs() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(run_until_cancelled_async.call("worker1", ""))
        await asyncio.to_thread(rpc.rpc_sync, "worker1", wait_for_begin)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@workers(2)
def test_an_async_def_knows_that_its_caller_cancelled_it() -> None:
    cancel_once_it_runs()
    assert rpc.rpc_sync("worker1", what_ran) == ["began", "cancelled: True"]


def call_async_def() -> None:
    run_until_cancelled_async.sync("worker1", "", rpc_timeout=0)


def test_an_async_def_is_cancelled_when_its_caller_dies() -> None:
    with Group(2) as group:
        group[0].start(call_async_def)
        group[1].run(wait_for_begin)
        group[0].kill()
        assert group[1].run(what_ran) == ["began", "cancelled: True"]


@aio.batched(max_size=1, max_wait=0)
def slow(items: list[str]) -> list[str]:
    RAN.extend(items)
    if items == ["block"]:
        block()
    return items


@workers(2)
def test_a_batch_leaves_out_who_has_given_up() -> None:
    first = slow.async_("worker1", "block", rpc_timeout=0)
    rpc.rpc_sync("worker1", wait_for_begin)
    with pytest.raises(errors.CallTimeoutError):
        slow.sync("worker1", "too late", rpc_timeout=SHORT)
    # The deadline at the callee has passed too: the callee counts it from the request's arrival.
    rpc.rpc_sync("worker1", time.sleep, (SHORT,))
    last = slow.async_("worker1", "in time", rpc_timeout=0)
    rpc.rpc_sync("worker1", let_go)
    assert (first.wait(), last.wait()) == ("block", "in time")
    assert rpc.rpc_sync("worker1", ran) == ["block", "in time"]
