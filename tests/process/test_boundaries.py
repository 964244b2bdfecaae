"""Where threads, UCX and torch call the package's code, an exception fails the call or the
connection that it concerns, and the worker goes on serving. These tests throw std::bad_alloc and
c10::Error at each boundary of csrc/base/boundary.h, on the calling and on the called worker."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from tests.process.deaths import wait_until_stopped
from tests.process.group import Group
from tests.support import native
from tests.support.backend import needs_ucx
from tests.support.ports import free_ports
from torch_rpc_ext import errors

pytestmark = needs_ucx("has none of these")

#: Boundaries that calls between two workers of a host reach, and the options for each.
PLAIN: dict[str, Any] = {}
BY_TCP: dict[str, Any] = {"use_cma": False, "use_shared_memory": False}
BY_UCX: dict[str, Any] = {"use_cma": False}
REACHED: dict[str, dict[str, Any]] = {
    "event": PLAIN,
    "timer": PLAIN,
    "thread": PLAIN,
    "request": PLAIN,
    "fetch": PLAIN,
    "completion": PLAIN,
    "answer": PLAIN,
    "future": PLAIN,
    "send": PLAIN,
    "delivery": PLAIN,
    "message": PLAIN,
    "sent": BY_TCP,
    "storage": PLAIN,
    "bulk socket": BY_TCP,
    "bulk sent": BY_UCX,
    "bulk received": BY_UCX,
}
#: These boundaries surround every other one; nothing is thrown there.
LAST = {"task", "operation", "deferred"}
#: Reached when a peer dies.
AT_A_DEATH = ["broken", "bulk broken"]
#: Reached when this worker shuts down: its endpoints are flushed, and closed later.
AT_THE_END = {"closed"}
#: Reached only with a device: tests/unit/event_waiter.cpp throws there.
ON_DEVICES = {"device event"}
#: Exceptions at these boundaries fail nothing: the work is done again, or served only speed.
HARMLESS = {"event", "timer", "thread", "storage", "bulk socket"}


def throw_at(where: str, out_of_memory: bool) -> None:
    native.base.throw_at(where, out_of_memory)


def is_pending() -> bool:
    """Whether the ordered throw has not happened yet."""
    return native.base.is_pending()


def stop_throwing() -> bool:
    """Return whether the ordered throw has happened."""
    has_happened = not is_pending()
    native.base.stop_throwing()
    return has_happened


def names() -> set[str]:
    return set(native.base.crossed())


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def double_slowly(tensor: Tensor) -> Tensor:
    time.sleep(0.02)
    return tensor * 2


def block(_: int) -> None:
    """Block a thread; enough such calls at once make the pool start another thread."""
    rpc.rpc_sync("worker0", double_slowly, args=(torch.ones(1),))


@rpc.functions.async_execution
def double_later(tensor: Tensor) -> Future[Tensor]:
    return rpc.rpc_async("worker0", double, args=(tensor,))


def ask_later(tensor: Tensor) -> Tensor:
    result: Tensor = rpc.rpc_sync("worker0", double_after, args=(tensor,))
    return result


@rpc.functions.async_execution
def double_after(tensor: Tensor) -> Future[Tensor]:
    return rpc.rpc_async("worker1", double, args=(tensor,))


def many(tensor: Tensor) -> Tensor:
    """Make calls at once with more bytes than a socket takes."""
    futures = [rpc.rpc_async("worker1", double, args=(tensor,)) for _ in range(1000)]
    results: list[Tensor] = torch.futures.wait_all(futures)
    return results[-1]


def calls() -> list[str]:
    """Make one call of each kind; return the errors of the calls that failed."""
    small, large = torch.ones(3), torch.ones(3_000_000)
    attempts = [
        lambda: rpc.rpc_sync("worker1", double, args=(small,)),
        lambda: rpc.rpc_sync("worker1", double_later, args=(small,)),
        lambda: rpc.rpc_sync("worker1", ask_later, args=(small,)),
        lambda: many(torch.ones(3000)),
        lambda: rpc.rpc_sync("worker1", double, args=(large,)),
        lambda: rpc.rpc_sync("worker1", torch.add, args=(large, large)),
        lambda: rpc.remote("worker1", double, args=(small,)).to_here(),
        lambda: [rpc.rpc_async("worker1", block, args=(i,)) for i in range(64)][-1].wait(),
    ]
    failures = []
    for attempt in attempts:
        try:
            result = attempt()
        except Exception as error:
            # The failure is noticed at once, and not by the time-out of the call.
            assert not isinstance(error, errors.CallTimeoutError), error
            failures.append(f"{type(error).__name__}: {error}")
        else:
            assert result is None or torch.equal(result, torch.full_like(result, 2.0))
    return failures


def pass_time() -> None:
    """Wait until a timer has fired: make a call that runs into its time-out."""
    with contextlib.suppress(RuntimeError):
        rpc.rpc_sync("worker1", double_never, timeout=0.2)


@rpc.functions.async_execution
def double_never() -> Future[Tensor]:
    return Future()


def throws(group: Group, where: str, at: int, out_of_memory: bool) -> None:
    group[at].run(throw_at, where, out_of_memory)
    failures = []
    if where == "sent":
        failures += send_to_one_that_is_stopped(group, at)
    for _ in range(100):  # whether a call reaches some boundaries depends on timing
        failures += group.run(calls)
        group.run(pass_time)
        if not group[at].run(is_pending):
            break
    assert group[at].run(stop_throwing), f"{where}: nothing came by"
    if where in HARMLESS:
        assert not failures
    recover(group)


def recover(group: Group) -> None:
    """Wait until calls work again: a worker whose connection broke is tried again after a
    second."""
    end = time.monotonic() + 60
    while failures := group.run(calls):
        assert time.monotonic() < end, failures
        time.sleep(0.1)


SENT: list[Future[Tensor]] = []
HELD: list[tuple[Future[Tensor], Tensor]] = []


@rpc.functions.async_execution
def hold(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    HELD.append((future, tensor))
    return future


def send_thousand(hold_them: bool) -> None:
    function = hold if hold_them else double
    for _ in range(1000):
        SENT.append(rpc.rpc_async("worker1", function, args=(torch.ones(3000),)))


def held() -> int:
    return len(HELD)


def answer_held() -> None:
    while HELD:
        future, tensor = HELD.pop()
        future.set_result(tensor * 2)


def take_answers() -> list[str]:
    failures = []
    while SENT:
        try:
            SENT.pop().wait()
        except Exception as error:
            assert not isinstance(error, errors.CallTimeoutError), error
            failures.append(str(error))
    return failures


def send_to_one_that_is_stopped(group: Group, at: int) -> list[str]:
    """Send more than the queue between two workers takes: UCX keeps the rest, and reports later
    that it has sent the rest."""
    other = group[1 - at]
    if at == 1:
        group[0].run(send_thousand, True)
        while group[1].run(held) < 1000:
            time.sleep(0.01)
    other.signal(signal.SIGSTOP)
    wait_until_stopped(other.child.pid)
    group[at].run(answer_held) if at == 1 else group[0].run(send_thousand, False)
    other.signal(signal.SIGCONT)
    return group[0].run(take_answers)


@pytest.fixture(scope="module", params=[PLAIN, BY_TCP, BY_UCX], ids=["plain", "tcp", "ucx"])
def group(request: pytest.FixtureRequest) -> Any:
    with Group(2, options={"rpc_timeout": 30, **request.param}) as group:
        yield group, request.param


@pytest.mark.slow
@pytest.mark.parametrize("out_of_memory", [True, False], ids=["bad_alloc", "c10"])
@pytest.mark.parametrize("at", [0, 1], ids=["caller", "callee"])
@pytest.mark.parametrize("where", REACHED)
def test_the_worker_goes_on_serving(
    group: tuple[Group, Any], where: str, at: int, out_of_memory: bool
) -> None:
    workers, options = group
    if options is not REACHED[where]:
        pytest.skip("the other group's")
    throws(workers, where, at, out_of_memory)


def fail_the_first_call_of_all() -> None:
    throw_at("send", True)
    with pytest.raises(errors.OverloadedError):
        rpc.rpc_sync("worker1", double, args=(torch.ones(3),))
    for _ in range(3):
        with contextlib.suppress(errors.PeerLostError):
            rpc.rpc_sync("worker1", double, args=(torch.ones(3),))


def test_a_connection_given_up_while_it_begins() -> None:
    """In one run of three, UCX at the called worker took the next connection for the one that had
    been given up: from then on each call ran into its time-out."""
    for _ in range(8):
        with Group(2, options={"rpc_timeout": 30}) as group:
            group[0].run(fail_the_first_call_of_all)
            recover(group)


def break_and_call() -> None:
    """Break the connection; then make calls that UCX sends in one part, and in several parts."""
    throw_at("send", True)
    with pytest.raises(errors.OverloadedError):
        rpc.rpc_sync("worker1", double, args=(torch.ones(3),))
    for elements in (3, 3000):
        rpc.rpc_sync("worker1", double, args=(torch.ones(elements),))
        for function in (double_later, ask_later):
            # worker1 calls too, maybe over a connection of which it does not know yet that it
            # broke.
            with contextlib.suppress(errors.PeerLostError):
                rpc.rpc_sync("worker1", function, args=(torch.ones(elements),))


def test_messages_after_connections_broke() -> None:
    """What broken connections had left in UCX broke later connections, or silently took parts of
    their messages of more than 8 KB."""
    for _ in range(4):
        with Group(2, options={"rpc_timeout": 30}) as group:
            group[0].run(fail_the_first_call_of_all)
            for _ in range(20):
                group[0].run(break_and_call)
            recover(group)


def double_at(to: str) -> None:
    for elements in (3, 3_000_000):
        result = rpc.rpc_sync(to, double, args=(torch.ones(elements),))
        assert torch.equal(result, torch.full((elements,), 2.0))


def lose(to: str) -> None:
    with pytest.raises(errors.PeerLostError):
        while True:
            double_at(to)


@pytest.mark.parametrize("out_of_memory", [True, False], ids=["bad_alloc", "c10"])
@pytest.mark.parametrize("where", AT_A_DEATH)
def test_a_peer_that_dies(where: str, out_of_memory: bool) -> None:
    """Over TCP, where UCX itself notices that an endpoint, and the endpoint for bulk, have
    broken. UCX has bulk to send when the range has no third port for each worker."""
    options = {**BY_TCP, "port_range": free_ports(6)}
    with Group(3, options=options, env={"UCX_TLS": "tcp"}) as group:
        group[0].run(double_at, "worker1")
        group[0].run(throw_at, where, out_of_memory)
        group[1].kill()
        group[0].run(lose, "worker1")
        deadline = time.monotonic() + 30
        while group[0].run(is_pending):
            assert time.monotonic() < deadline, f"{where}: nothing came by"
            time.sleep(0.05)
        group[0].run(double_at, "worker2")
        group[2].run(double_at, "worker0")


def shut_down_under(where: str, out_of_memory: bool) -> bool:
    """Shut down with a throw ordered at ``where``; return whether it has happened."""
    double_at("worker1")
    throw_at(where, out_of_memory)
    rpc.shutdown()
    return stop_throwing()


def shut_down() -> None:
    rpc.shutdown()


@pytest.mark.parametrize("out_of_memory", [True, False], ids=["bad_alloc", "c10"])
def test_its_own_end(out_of_memory: bool) -> None:
    """Mostly UCX still has to send something when an endpoint is closed, and reports the end later;
    else it closes the endpoint at once, and the boundary is not reached."""
    for _ in range(20):
        with Group(2, options=BY_TCP, env={"UCX_TLS": "tcp"}) as group:
            other = group[1].start(shut_down)
            came_by = group[0].run(shut_down_under, "closed", out_of_memory)
            other.result()
        if came_by:
            return
    pytest.fail("closed: nothing came by")


@pytest.mark.parametrize("where", ["request", "message", "completion"])
def test_three_of_them(where: str) -> None:
    with Group(2, options={"rpc_timeout": 30}) as group:
        throws(group, where, 1 if where == "request" else 0, True)


def test_all_boundaries_are_looked_at() -> None:
    assert names() == {*REACHED, *LAST, *AT_A_DEATH, *AT_THE_END, *ON_DEVICES}
