"""Events for workers that are lost, leave, join or return, by callbacks and by an iterator."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import rpc

import torch_rpc_ext
from tests.process.deaths import QUICK, check_alive, kill
from tests.process.group import SECONDS, Group, workers
from tests.support.backend import needs_ucx
from torch_rpc_ext.events import Subscription, WorkerEvent

pytestmark = needs_ucx("tells of no events")


class Heard:
    """Collects the events of one subscription."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self.changed = threading.Condition()

    def __call__(self, event: WorkerEvent) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[list[tuple[str, str]]], bool]) -> list[tuple[str, str]]:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.short()), SECONDS), self.events
            return self.short()

    def short(self) -> list[tuple[str, str]]:
        return [(event.worker, event.kind) for event in self.events]


_heard = Heard()
_subscriptions: list[Subscription] = []


def subscribe() -> None:
    _subscriptions.append(torch_rpc_ext.on_worker_event(_heard))


def heard(count: int) -> list[tuple[str, str]]:
    """Wait for ``count`` events and return them."""
    return _heard.wait_for(lambda events: len(events) >= count)[:count]


def reasons() -> list[str]:
    return [event.reason for event in _heard.events]


def heard_so_far() -> list[tuple[str, str]]:
    return _heard.short()


def leave(graceful: bool = True) -> None:
    rpc.shutdown(graceful=graceful)


# ---- static groups -------------------------------------------------------------------------------


def test_a_killed_worker_is_lost_without_a_call_to_it() -> None:
    with Group(3) as group:
        group[0].run(subscribe)
        group[2].run(subscribe)
        killed = kill(group[1])
        for worker in (group[0], group[2]):
            assert worker.run(heard, 1) == [("worker1", "lost")]
            assert all(worker.run(reasons))
        assert time.monotonic() - killed < QUICK


def test_who_subscribes_late_hears_of_the_lost() -> None:
    with Group(3) as group:
        group[1].kill()
        group[0].run(subscribe)
        assert group[0].run(heard, 1) == [("worker1", "lost")]
        # A second subscription in the same worker gets the event too, and the first gets nothing
        # twice.
        group[0].run(subscribe)
        assert group[0].run(heard, 2) == [("worker1", "lost")] * 2
        group[2].kill()
        assert group[0].run(heard, 4)[2:] == [("worker2", "lost")] * 2
        group.run(check_alive, "worker0")
        assert len(group[0].run(heard_so_far)) == 4


def test_a_worker_that_comes_back() -> None:
    with Group(3) as group:
        group[0].run(subscribe)
        for _ in range(2):
            group[1].kill()
            group.start_again(1)
        each_once = [("worker1", "lost"), ("worker1", "returned")] * 2
        assert group[0].run(heard, 4) == each_once
        group[0].run(check_alive, "worker1")
        assert group[0].run(heard_so_far) == each_once


def test_a_worker_that_leaves_alone() -> None:
    with Group(2) as group:
        group[0].run(subscribe)
        # A worker cannot say goodbye over a connection that it does not know of yet.
        group[0].run(check_alive, "worker1")
        group[1].run(leave, False)
        assert group[0].run(heard, 1) == [("worker1", "left")]
        group[0].run(leave, False)


def subscribe_and_end() -> list[tuple[str, str]]:
    heard = Heard()
    torch_rpc_ext.on_worker_event(heard)
    for other in ("worker0", "worker1", "worker2"):
        check_alive(other)
    rpc.shutdown()
    return heard.short()


def test_a_normal_shutdown_is_no_event() -> None:
    with Group(3) as group:
        assert group.run_all(subscribe_and_end) == [[], [], []]


# ---- dynamic groups ------------------------------------------------------------------------------


def test_join_and_leave() -> None:
    with Group(2, dynamic=True) as group:
        group[0].run(subscribe)
        for number in range(2):
            guest = group.add("guest", 2 + number)
            guest.run(leave)
        assert group[0].run(heard, 4) == [("guest", "joined"), ("guest", "left")] * 2
        group[1].run(leave)
        assert group[0].run(heard, 5)[4:] == [("worker1", "left")]
        group[0].run(leave)
        assert len(group[0].run(heard_so_far)) == 5


def test_a_member_that_is_killed_and_started_again() -> None:
    with Group(2, dynamic=True) as group:
        group[0].run(subscribe)
        group[1].kill()
        assert group[0].run(heard, 1) == [("worker1", "lost")]
        group.start_again(1)
        assert group[0].run(heard, 2) == [("worker1", "lost"), ("worker1", "returned")]
        group[1].run(leave)
        assert group[0].run(heard, 3)[2:] == [("worker1", "left")]
        group[0].run(leave)
        assert len(group[0].run(heard_so_far)) == 3


# ---- subscriptions -------------------------------------------------------------------------------

_order: list[str] = []


def raise_at(event: WorkerEvent) -> None:
    raise ValueError(f"at {event.worker}")


def exit_at(event: WorkerEvent) -> None:
    sys.exit(f"at {event.worker}")


def subscribe_in_turn() -> None:
    torch_rpc_ext.on_worker_event(raise_at)
    torch_rpc_ext.on_worker_event(exit_at)
    removed = torch_rpc_ext.on_worker_event(lambda _: _order.append("removed"))
    with torch_rpc_ext.on_worker_event(lambda _: _order.append("block")):
        pass
    subscribe()
    removed.remove()
    removed.remove()


def order() -> list[str]:
    return _order


def test_callbacks_that_raise_and_that_are_removed() -> None:
    with Group(3) as group:
        group[0].run(subscribe_in_turn)
        group[1].kill()
        assert group[0].run(heard, 1) == [("worker1", "lost")]
        group[2].kill()
        assert group[0].run(heard, 2)[1:] == [("worker2", "lost")]
        assert group[0].run(order) == []
        output = group[0].child.output()
        assert "ValueError: at worker1" in output and "SystemExit: at worker1" in output


def call_in_a_callback(to: str) -> str:
    answers: list[str] = []
    called = threading.Event()

    def call(event: WorkerEvent) -> None:
        answers.append(rpc.rpc_sync(to, name_of_this_worker))
        called.set()

    torch_rpc_ext.on_worker_event(call)
    assert called.wait(SECONDS)
    return answers[0]


def name_of_this_worker() -> str:
    return str(rpc.get_worker_info().name)


def test_a_callback_may_call() -> None:
    with Group(3) as group:
        call = group[0].start(call_in_a_callback, "worker2")
        group[1].kill()
        assert call.result() == "worker2"


def iterate_to_the_end() -> list[list[tuple[str, str]]]:
    """The events of two iterators until RPC ends in this worker."""

    async def collect(events: Any, found: list[tuple[str, str]]) -> None:
        async for event in events:
            found.append((event.worker, event.kind))
            if event.worker == "worker1":
                await asyncio.to_thread(rpc.shutdown, graceful=False)

    async def main() -> list[list[tuple[str, str]]]:
        first: list[tuple[str, str]] = []
        second: list[tuple[str, str]] = []
        closed = torch_rpc_ext.worker_events()
        closed.close()
        assert [event async for event in closed] == []
        with pytest.raises(StopAsyncIteration):
            await closed.__anext__()
        one, other = torch_rpc_ext.worker_events(), torch_rpc_ext.worker_events()
        task = asyncio.create_task(collect(one, first))
        async for event in other:
            second.append((event.worker, event.kind))
        await task
        return [first, second]

    return asyncio.run(main())


def test_an_iterator() -> None:
    with Group(2) as group:
        call = group[0].start(iterate_to_the_end)
        group[1].kill()
        assert call.result() == [[("worker1", "lost")]] * 2


def check_refusals() -> None:
    with pytest.raises(TypeError, match="callback must be a function of a WorkerEvent, got 3"):
        torch_rpc_ext.on_worker_event(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no running event loop"):
        torch_rpc_ext.worker_events()


@workers(1)
def test_what_is_refused() -> None:
    check_refusals()


def test_without_rpc() -> None:
    with pytest.raises(RuntimeError, match="has not been initialized on UCX"):
        torch_rpc_ext.on_worker_event(print)
