"""More calls than a worker can serve: their caller waits, other callers do not, and messages say
why."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import check_alive, wait_for_file
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("knows no limits")

_lock = threading.Lock()
_running = _most = 0


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count how many calls run at once."""
    global _running, _most
    with _lock:
        _running += 1
        _most = max(_most, _running)
    try:
        yield
    finally:
        with _lock:
            _running -= 1


def occupy(seconds: float = 0.2, data: Any = None) -> None:
    with counted():
        time.sleep(seconds)


def wait_until_running(calls: int) -> None:
    deadline = time.monotonic() + 30
    while _running < calls:
        assert time.monotonic() < deadline, f"{_running} calls are running"
        time.sleep(0.01)


def most() -> int:
    """The most calls that have run at once since the last call of most()."""
    global _most
    with _lock:
        value, _most = _most, 0
    return value


def held_back() -> int:
    return int(rpc.api._get_current_rpc_agent().get_metrics()["agent.calls_held_back"])


def wait_until_held_back(caller: str) -> None:
    deadline = time.monotonic() + 30
    while rpc.rpc_sync(caller, held_back) == 0:
        assert time.monotonic() < deadline, "no call is held back"
        time.sleep(0.01)


def test_callers_wait_for_room() -> None:
    with Group(3, options={"max_calls_in_flight": 4}) as group:
        group[0].run(begin, occupy_until_freed, 4)
        group[1].run(wait_until_running, 4)
        # Each callee has its own limit, so calls to the other worker do not wait.
        group[0].run(check_alive, "worker2")
        assert group[0].run(held_back) == 0
        further = group[0].start(begin, occupy, 8)
        group[2].run(wait_until_held_back, "worker0")
        assert not further.done()
        group[1].run(let_go)
        further.result()
        group[0].run(end)
        assert group[1].run(most) == 4


@workers(2, options={"max_calls_in_flight": 2})
def test_no_room_until_the_time_out(tmp_path: Path) -> None:
    from torch_rpc_ext.errors import OverloadedError

    end = tmp_path / "end"
    futures = [rpc.rpc_async("worker1", wait_for_file, args=(end,)) for _ in range(2)]
    with pytest.raises(OverloadedError, match="max_calls_in_flight") as raised:
        rpc.rpc_sync("worker1", f.nothing, timeout=0.3)
    assert raised.value.worker == "worker1" and "nothing" in str(raised.value)
    with pytest.raises(OverloadedError):
        rpc.remote("worker1", f.nothing, timeout=0.3)
    end.touch()
    for future in futures:
        future.wait()
    check_alive("worker1")


@workers(2, options={"max_bytes_in_flight": 10_000_000})
def test_bytes_count_too() -> None:
    data = torch.zeros(1_000_000)
    futures = [rpc.rpc_async("worker1", occupy, args=(0.1, data)) for _ in range(6)]
    for future in futures:
        future.wait()
    assert rpc.rpc_sync("worker1", most) <= 2
    # A call that is larger than the limit is made when no other is under way.
    large = torch.zeros(5_000_000)
    futures = [rpc.rpc_async("worker1", occupy, args=(0.1, large)) for _ in range(3)]
    for future in futures:
        future.wait()
    assert rpc.rpc_sync("worker1", most) == 1


def call_back(to: str, depth: int) -> int:
    return (
        0 if depth == 0 else 1 + int(rpc.rpc_sync(to, call_back, args=(f.name_here(), depth - 1)))
    )


@workers(2, options={"max_calls_in_flight": 3})
def test_calls_that_call_back_go_on() -> None:
    """The limits of a caller do not hold back its callees' nested calls, and answers are never held
    back."""
    assert rpc.rpc_sync("worker1", call_back, args=("worker0", 4)) == 4
    futures = [rpc.rpc_async("worker1", call_back, args=("worker0", 1)) for _ in range(12)]
    assert [future.wait() for future in futures] == [1] * 12


def call_again(done: Any) -> str:
    name: str = rpc.rpc_sync("worker1", f.name_here, timeout=20)
    return f"{name}, {'an error' if is_error(done) else 'a value'}"


def is_error(done: Any) -> bool:
    try:
        done.value()
    except ValueError:
        return True
    return False


@workers(2, options={"max_calls_in_flight": 1})
def test_a_callback_makes_the_next_call() -> None:
    """A call whose callbacks run is over: they find room."""
    for function, end in ((f.nothing, "a value"), (f.raise_value_error, "an error")):
        future = rpc.rpc_async("worker1", function).then(call_again)
        assert future.wait() == f"worker1, {end}"


CALLS: list[Any] = []
free = threading.Event()


def occupy_until_freed() -> None:
    with counted():
        assert free.wait(50)


def let_go() -> None:
    free.set()


def begin(function: Any, count: int) -> None:
    CALLS.extend(rpc.rpc_async("worker1", function) for _ in range(count))


def end() -> None:
    torch.futures.wait_all(CALLS)


def wait_until_queued(requests: int) -> None:
    deadline = time.monotonic() + 30
    while int(rpc.api._get_current_rpc_agent().get_metrics()["agent.queued_requests"]) < requests:
        assert time.monotonic() < deadline, "the requests do not arrive"
        time.sleep(0.01)


def test_a_full_pool_says_so_once() -> None:
    with Group(2, options={"num_worker_threads": 2}) as group:
        group[0].run(begin, occupy_until_freed, 4)
        group[1].run(wait_until_queued, 2)
        time.sleep(1.1)  # nothing is logged when the threads are busy for less
        group[0].run(begin, f.nothing, 2)
        group[1].run(wait_until_queued, 4)
        group[1].run(let_go)
        group[0].run(end)
        output = group.output()
        assert output.count("all 2 threads for requests have been busy") == 1, output
        assert "2 x tests.process.test_load.occupy_until_freed" in output
