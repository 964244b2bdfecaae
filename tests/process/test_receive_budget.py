"""More tensors than a worker can serve: the received tensors that no thread serves yet are bounded,
and the rest waits at the senders."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import check_alive
from tests.process.group import Group
from tests.support.backend import needs_ucx
from torch_rpc_ext import aio
from torch_rpc_ext.errors import OverloadedError

pytestmark = needs_ucx("has no such option")

MB = 1 << 20
BUDGET = 64 * MB
TENSOR = 8 * MB
THREADS = 2
#: Their tensors are more than the caller lends (256 MiB), and the rest is more than the budget.
CALLS = 60
SMALL = {"receive_budget": BUDGET, "num_worker_threads": THREADS}
#: process_vm_readv and UCX: ways for which the callee allocates memory.
WAYS = [pytest.param({}, id="cma"), pytest.param({"use_cma": False}, id="ucx")]
#: Tensors that the frame carries where only TCP joins two workers; more than the budget together.
CARRIED, CARRIED_CALLS = 100_000, 1500
FLOODS = [
    pytest.param({}, TENSOR, CALLS, id="cma"),
    pytest.param({"use_cma": False}, TENSOR, CALLS, id="ucx"),
    pytest.param(
        {"use_cma": False, "use_shared_memory": False}, CARRIED, CARRIED_CALLS, id="carried"
    ),
]

_free = threading.Event()
_began: list[int] = []
CALLS_MADE: list[Any] = []
RREF: Any = None


def hold(data: torch.Tensor, number: int) -> tuple[int, float]:
    """Serve a request until the test ends it."""
    _began.append(number)
    assert _free.wait(50)
    return number, float(data[0]) + float(data[-1])


def began() -> list[int]:
    return list(_began)


def let_go() -> None:
    _free.set()


def counters() -> dict[str, int]:
    metrics = rpc.api._get_current_rpc_agent().get_metrics()
    return {
        name.removeprefix("agent."): int(float(value))
        for name, value in metrics.items()
        if name.startswith("agent.")
    }


def anonymous_bytes() -> int:
    """Anonymous memory of this process: without files and memfds."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such line")


def make(number: int, size: int = TENSOR) -> torch.Tensor:
    return torch.full((size // 4,), float(number))


def flood(to: str, numbers: range, timeout: float = 60, size: int = TENSOR) -> None:
    CALLS_MADE.extend(
        rpc.rpc_async(to, hold, args=(make(number, size), number), timeout=timeout)
        for number in numbers
    )


def check_answers(numbers: range) -> None:
    assert [call.wait() for call in CALLS_MADE] == [(n, 2.0 * n) for n in numbers]


def wait_for_requests(count: int, seconds: float = 40) -> dict[str, int]:
    """Wait until ``count`` requests of hold() have come, and everything that can be received has
    been."""
    deadline = time.monotonic() + seconds
    before: dict[str, int] = {}
    while True:
        now = counters()
        here = now["queued_requests"] + now["receive_waiting_requests"] + len(_began)
        if here == count and now["receive_held_bytes"] == before.get("receive_held_bytes"):
            return now
        before = now
        assert time.monotonic() < deadline, f"{count} requests expected: {now}"
        time.sleep(0.05)


@pytest.mark.parametrize(("way", "size", "calls"), FLOODS)
def test_a_flood_waits_at_its_sender(way: dict[str, Any], size: int, calls: int) -> None:
    with Group(2, options={**SMALL, **way}) as group:
        group[0].run(check_alive, "worker1")
        before = group[1].run(anonymous_bytes)
        group[0].run(flood, "worker1", range(calls), 60, size)
        now = group[1].run(wait_for_requests, calls)
        assert now["receive_waiting_requests"] > 0
        assert now["receive_waiting_bytes"] == now["receive_waiting_requests"] * size
        assert now["receive_held_bytes"] <= BUDGET
        waiting = (now["receive_waiting_requests"], now["receive_waiting_bytes"])
        assert group[1].run(what_top_shows) == {"worker0": waiting}
        grown = group[1].run(anonymous_bytes) - before
        assert grown <= BUDGET + THREADS * TENSOR + 32 * MB, f"{grown >> 20} MiB"
        assert group[1].run(rpc_add, "worker0") == 3  # the answer needs no room
        group[1].run(let_go)
        group[0].run(check_answers, range(calls))
        left = group[1].run(counters)
        assert left["receive_held_bytes"] == left["receive_waiting_requests"] == 0


def what_top_shows() -> dict[str, tuple[int, int]]:
    from rich.console import Console

    from torch_rpc_ext import monitoring
    from torch_rpc_ext.cli import answers, poller, view

    own = poller._describe("worker1", answers.Answer.of(monitoring.snapshot()), None, None)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view.draw([own], console.width))
    assert "has no room yet for the tensors of requests: " in capture.get()
    return own.waiting


def rpc_add(to: str) -> int:
    return int(rpc.rpc_sync(to, torch.add, args=(torch.ones(1), 2)))


def test_a_small_call_passes_a_flood() -> None:
    """A small call waits for a thread behind what has been received, but not behind what waits for
    room."""
    with Group(2, options={**SMALL, "use_cma": False}) as group:
        group[0].run(flood, "worker1", range(40))
        group[1].run(wait_for_requests, 40)
        group[0].run(hold_little, "worker1", 40)
        group[1].run(wait_for_requests, 41)
        group[1].run(let_go)
        group[0].run(check_answers, range(41))
        order = group[1].run(began)
        assert order.index(40) < 2 * (THREADS + BUDGET // 2 // TENSOR), order


def hold_little(to: str, number: int) -> None:
    CALLS_MADE.append(rpc.rpc_async(to, hold, args=(make(number, 4), number)))


def recurse(data: torch.Tensor, depth: int) -> float:
    """Send a tensor back and forth, in calls nested ``depth`` deep."""
    if depth == 0:
        return float(data.sum())
    to = f"worker{1 - rpc.get_worker_info().id}"
    return 1 + float(rpc.rpc_sync(to, recurse, args=(data.clone(), depth - 1)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [1, 2 * TENSOR])
def test_deep_recursion_goes_on(way: dict[str, Any], budget: int) -> None:
    options = {"receive_budget": budget, "num_worker_threads": 1, **way}
    with Group(2, options=options) as group:
        group.run(check_recursion)


def check_recursion() -> None:
    calls = [
        rpc.rpc_async("worker1", recurse, args=(torch.zeros(TENSOR // 4), 16)) for _ in range(3)
    ]
    assert [call.wait() for call in calls] == [16.0] * 3


def errors_of_calls() -> list[tuple[str, str]]:
    errors = []
    for call in CALLS_MADE:
        try:
            call.wait()
        except RuntimeError as error:
            errors.append((type(error).__name__, str(error)))
    return errors


def test_the_time_out_says_that_it_waited() -> None:
    with Group(2, options={**SMALL, "use_cma": False}) as group:
        group[0].run(flood, "worker1", range(20), timeout=2.0)
        errors = group[0].run(errors_of_calls)
        assert len(errors) == 20 and {kind for kind, _ in errors} == {"CallTimeoutError"}
        said = [
            text
            for _, text in errors
            if re.search(r"has not taken the \d{7} bytes .* receive_budget", text)
        ]
        assert len(said) >= 10, errors
        group[1].run(let_go)
        group[0].run(check_alive, "worker1")


def test_what_its_caller_has_given_up_is_not_fetched() -> None:
    with Group(2, options={**SMALL, "use_cma": False}) as group:
        group[0].run(flood, "worker1", range(20), timeout=2.0)
        group[1].run(wait_for_requests, 20)
        assert len(group[0].run(errors_of_calls)) == 20
        # The callee counts the two seconds of the time-out from the request's arrival.
        group[1].run(time.sleep, 2.1)
        before = group[1].run(counters)
        assert before["receive_waiting_requests"] >= 10
        group[1].run(let_go)
        after = group[1].run(wait_for_the_end_of, 20)
        fetched = ("receive_cache_hits", "receive_cache_misses")
        assert [after[name] for name in fetched] == [before[name] for name in fetched]


def wait_for_the_end_of(count: int) -> dict[str, int]:
    """Wait until ``count`` requests have been served or given up."""
    deadline = time.monotonic() + 40
    while (now := counters())["calls_not_begun"] + len(_began) < count:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)
    return now


def test_a_caller_that_dies_leaves_nothing_waiting() -> None:
    with Group(3, options={**SMALL, "use_cma": False}) as group:
        group[1].run(flood, "worker2", range(20))
        assert group[2].run(wait_for_requests, 20)["receive_waiting_requests"] > 0
        group[1].kill()
        group[2].run(wait_until_nothing_waits)
        group[2].run(let_go)
        group[0].run(flood_and_check, "worker2")


def wait_until_nothing_waits() -> None:
    deadline = time.monotonic() + 40
    while counters()["receive_waiting_requests"] != 0:
        assert time.monotonic() < deadline, counters()
        time.sleep(0.01)


def flood_and_check(to: str) -> None:
    flood(to, range(20))
    check_answers(range(20))


def test_callers_take_turns() -> None:
    """A caller with few calls does not wait for the whole flood of another caller."""
    with Group(3, options={**SMALL, "use_cma": False}) as group:
        group[0].run(flood, "worker2", range(40))
        group[2].run(wait_for_requests, 40)
        group[1].run(flood, "worker2", range(100, 104))
        group[2].run(wait_for_requests, 44)
        group[2].run(let_go)
        group[0].run(check_answers, range(40))
        group[1].run(check_answers, range(100, 104))
        order = group[2].run(began)
        assert max(order.index(number) for number in range(100, 104)) < 30, order


def test_a_larger_request_goes_alone() -> None:
    with Group(2, options={"receive_budget": TENSOR, "use_cma": False}) as group:
        group[1].run(let_go)
        group.run(call_with_large_ones)


def call_with_large_ones() -> None:
    calls = [
        rpc.rpc_async("worker1", hold, args=(make(number, size * TENSOR), number))
        for number, size in enumerate((1, 4, 1, 3, 1, 1))
    ]
    assert [call.wait() for call in calls] == [(n, 2.0 * n) for n in range(6)]


def test_calls_to_oneself_are_bounded_too() -> None:
    with Group(1, options=SMALL) as group:
        group[0].run(flood, "worker0", range(20))
        now = group[0].run(wait_for_requests, 20)
        assert now["receive_waiting_requests"] > 0 and now["receive_held_bytes"] <= BUDGET
        group[0].run(let_go)
        group[0].run(check_answers, range(20))


def test_leaving_while_requests_wait() -> None:
    with Group(2, options={**SMALL, "use_cma": False}) as group:
        group[0].run(flood, "worker1", range(20))
        waiting = group[1].run(wait_for_requests, 20)["receive_waiting_requests"]
        assert waiting >= 10
        group[1].run(leave_now)
        errors = group[0].run(errors_of_calls)
        # All that waited, and what the worker had received or was running.
        assert len(errors) >= waiting
        assert {kind for kind, _ in errors} == {"ShutDownError"}, errors
        group[0].killed = group[1].killed = True


@aio.remote(limit=1)
async def hold_async(data: torch.Tensor, number: int) -> tuple[int, float]:
    while not _free.is_set():
        await asyncio.sleep(0.01)
    return number, float(data[0]) + float(data[-1])


@aio.batched(max_size=1, max_wait=0)
def hold_batch(data: list[torch.Tensor], numbers: list[int]) -> list[tuple[int, float]]:
    assert _free.wait(50)
    return [(numbers[0], float(data[0][0]) + float(data[0][-1]))]


@aio.remote(limit=1)
async def answer_async(data: torch.Tensor) -> float:
    return float(data[0])


@aio.batched(max_size=1, max_wait=0)
def answer_batch(data: list[torch.Tensor]) -> list[float]:
    return [float(data[0][0])]


def call_others() -> None:
    """Call functions that need not wait."""
    assert answer_async.sync("worker1", make(1)) == answer_batch.sync("worker1", make(1)) == 1.0


def do_not_hold(data: torch.Tensor, number: int, rref: Any) -> tuple[int, float]:
    return number, float(data[0]) + float(data[-1])


def keep_one_at(owner: str) -> None:
    global RREF
    RREF = rpc.remote(owner, f.identity, args=(1,))
    RREF.to_here()


QUEUES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "limit": lambda data, number: hold_async.async_("worker1", data, number),
    "batch": lambda data, number: hold_batch.async_("worker1", data, number),
    "RRefs": lambda data, number: rpc.rpc_async("worker1", do_not_hold, (data, number, RREF)),
}


def flood_queue(kind: str, calls: int) -> None:
    CALLS_MADE[:] = [QUEUES[kind](make(number), number) for number in range(calls)]


def wait_until_over(count: int) -> None:
    deadline = time.monotonic() + 40
    while (now := sum(call.done() for call in CALLS_MADE)) < count:
        assert time.monotonic() < deadline, f"{now} of {count} calls are over"
        time.sleep(0.01)


def check_refusals(count: int) -> None:
    """Check that so many calls were refused at least, and that the others have their results."""
    refused = []
    for number, call in enumerate(CALLS_MADE):
        try:
            assert call.wait() == (number, 2.0 * number)
        except OverloadedError as error:
            refused.append(str(error))
    assert count <= len(refused) < len(CALLS_MADE)
    assert all("wait there for their functions to begin" in text for text in refused), refused[0]


@pytest.mark.parametrize("kind", QUEUES)
def test_calls_that_wait_for_their_function_are_refused(kind: str) -> None:
    way = {"use_cma": False, "use_shared_memory": False}
    with Group(3, options={**SMALL, **way}) as group:
        group[0].run(check_alive, "worker1")
        group[0].run(keep_one_at, "worker2")
        before = group[1].run(anonymous_bytes)
        if kind == "RRefs":
            group[1].run(check_alive, "worker2")
            group[2].signal(signal.SIGSTOP)  # so the owner confirms nothing
        # One call may run, the first that waits for a batch does not count, and no more wait than
        # the budget holds.
        refused = CALLS - 2 - BUDGET // TENSOR
        group[0].run(flood_queue, kind, CALLS)
        group[0].run(wait_until_over, refused)
        group[0].run(call_others)
        now = group[1].run(counters)["held_call_bytes"]
        # A request that is being refused counts for a moment.
        assert BUDGET // 2 < now <= BUDGET + THREADS * (TENSOR + MB)
        grown = group[1].run(anonymous_bytes) - before
        assert grown <= 2 * BUDGET + (1 + THREADS) * TENSOR + 32 * MB, f"{grown >> 20} MiB"
        if kind == "RRefs":
            group[2].signal(signal.SIGCONT)
        group[1].run(let_go)
        group[0].run(check_refusals, refused)
        assert group[1].run(counters)["held_call_bytes"] == 0
        group[0].run(flood_queue, kind, 1)
        group[0].run(check_answers, range(1))
        group[2].run(wait_for_forks, 1)


def wait_for_forks(count: int) -> None:
    """Wait until other workers have so many forks of this worker's RRefs."""
    deadline = time.monotonic() + 20
    while (now := int(rpc._get_debug_info()["num_forks"])) != count:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)


def leave_now() -> None:
    rpc.shutdown(graceful=False)
    _free.set()


def test_all_is_served_before_a_graceful_end() -> None:
    with Group(2, options={**SMALL, "use_cma": False}) as group:
        group[0].run(flood, "worker1", range(20))
        group[1].run(wait_for_requests, 20)
        ending = group[0].start(shut_down_and_check)
        group[1].run(let_go)
        other = group[1].start(shut_down)
        ending.result()
        other.result()


def shut_down() -> None:
    rpc.shutdown()


def shut_down_and_check() -> None:
    answers: list[Any] = []
    for call in CALLS_MADE:
        call.add_done_callback(lambda done: answers.append(done.value()))
    rpc.shutdown()
    assert sorted(answers) == [(n, 2.0 * n) for n in range(20)]


def flood_with_small_ones(to: str, numbers: range, beside: list[int]) -> None:
    """Make calls of 64 tensors of 16 KiB each, which travel inside the frame and so cannot wait at
    their sender; and with tensors of these sizes beside them."""
    for n in numbers:
        parts = [make(n, size) for size in [16384] * 64 + beside]
        CALLS_MADE.append(rpc.rpc_async(to, hold_parts, args=(parts, n)))


def hold_parts(parts: list[torch.Tensor], number: int) -> tuple[int, float]:
    return hold(torch.cat(parts), number)


def answers_and_errors() -> tuple[list[int], list[str]]:
    answered, refused = [], []
    for number, call in enumerate(CALLS_MADE):
        try:
            assert call.wait() == (number, 2.0 * number)
            answered.append(number)
        except OverloadedError as error:
            refused.append(str(error))
    return answered, refused


@pytest.mark.parametrize("beside", [[], [65536]], ids=["small ones", "a larger one beside them"])
def test_small_requests_beyond_the_budget_are_refused(beside: list[int]) -> None:
    calls = 100
    with Group(3, options={**SMALL, "receive_budget": MB}) as group:
        group[0].run(flood_with_small_ones, "worker2", range(calls), beside)
        group[2].run(wait_for_refusals, calls)
        assert group[2].run(counters)["queued_frame_bytes"] <= 66 * MB
        group[2].run(let_go)
        answered, refused = group[0].run(answers_and_errors)
        assert 50 < len(answered) < 70
        assert len(refused) == calls - len(answered)
        assert re.search(
            r"\"worker2\" did not begin the call: .* take \d{8} bytes, of 67108864 .* Wait for",
            refused[0],
        ), refused[0]
        group[1].run(check_alive, "worker2")
        assert group[2].run(counters)["queued_frame_bytes"] == 0


def wait_for_refusals(count: int) -> None:
    deadline = time.monotonic() + 40
    while (now := counters())["calls_not_begun"] + now["queued_requests"] + len(_began) < count:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)


def test_without_a_limit_a_caller_still_has_its_share() -> None:
    with Group(2, options={**SMALL, "receive_budget": 0, "use_cma": False}) as group:
        group[0].run(flood, "worker1", range(20))
        now = group[1].run(wait_for_requests, 20)
        assert now["receive_held_bytes"] <= 64 * MB and now["receive_waiting_requests"] > 0
        group[1].run(let_go)
        group[0].run(check_answers, range(20))


def test_answers_that_are_not_taken_hold_requests_up() -> None:
    """Echoing large tensors does not fill the callee with answers."""
    with Group(2, options={"use_cma": False}) as group:
        group.run(echo_many)
        assert group[1].run(counters)["receive_held_bytes"] == 0


def echo_many() -> None:
    data = torch.zeros(8 * MB)
    calls = [rpc.rpc_async("worker1", f.identity, args=(data,)) for _ in range(20)]
    for call in calls:
        assert call.wait().nbytes == data.nbytes
