"""RetryPolicy: calls again what may run twice, when and as long as it is told to."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("has no errors by kind")

CALLS: list[float] = []


def fail_first(times: int, kind: str) -> int:
    """Fails so often, then returns the number of calls."""
    import torch_rpc_ext

    CALLS.append(time.monotonic())
    if len(CALLS) <= times:
        error = getattr(torch_rpc_ext.errors, kind, ValueError)
        raise error("not yet")
    count = len(CALLS)
    CALLS.clear()
    return count


def sleep_first(seconds: float) -> int:
    """Sleeps through the first call."""
    CALLS.append(time.monotonic())
    if len(CALLS) == 1:
        time.sleep(seconds)
        return -1
    count = len(CALLS)
    CALLS.clear()
    return count


def policy(**given: Any) -> Any:
    from torch_rpc_ext import RetryPolicy

    return RetryPolicy(**{"wait": 0.01, "jitter": 0.01, **given})


def check_attempts() -> None:
    from torch_rpc_ext.errors import OverloadedError

    kind = "OverloadedError"
    assert policy(attempts=3).rpc_sync("worker1", fail_first, (2, kind)) == 3
    assert policy(attempts=3).rpc_async("worker1", fail_first, (2, kind)).wait() == 3
    assert policy(attempts=2)(lambda: rpc.rpc_sync("worker1", fail_first, (1, kind)))() == 2
    with pytest.raises(OverloadedError, match="not yet"):
        policy(attempts=2).rpc_sync("worker1", fail_first, (5, kind))
    rpc.rpc_sync("worker1", forget)
    with pytest.raises(OverloadedError, match="not yet"):
        policy(attempts=2).rpc_async("worker1", fail_first, (5, kind)).wait()
    rpc.rpc_sync("worker1", forget)


def forget() -> None:
    CALLS.clear()


def check_kinds() -> None:
    # What the function raises is its answer, unless one says otherwise.
    with pytest.raises(ValueError, match="not yet"):
        policy(attempts=5).rpc_sync("worker1", fail_first, (1, "ValueError"))
    assert rpc.rpc_sync("worker1", calls) == 1
    rpc.rpc_sync("worker1", forget)
    patient = policy(attempts=5, retry_on=(ValueError,))
    assert patient.rpc_sync("worker1", fail_first, (1, "ValueError")) == 2


def calls() -> int:
    return len(CALLS)


def check_timeouts() -> None:
    # Each attempt has a time-out of its own.
    assert policy().rpc_sync("worker1", sleep_first, (3.0,), timeout=0.3) == 2


def check_deadline() -> None:
    from torch_rpc_ext.errors import CallTimeoutError

    start = time.monotonic()
    with pytest.raises(CallTimeoutError):
        policy(attempts=1000, deadline=1.0).rpc_sync("worker1", f.sleep, (4.0,))
    assert 0.9 < time.monotonic() - start < 3.5
    start = time.monotonic()
    with pytest.raises(CallTimeoutError):
        policy(attempts=1000, deadline=1.0).rpc_sync("worker1", f.sleep, (2.0,), timeout=0.1)
    assert 0.5 < time.monotonic() - start < 3


def test_attempts(pair: Group) -> None:
    pair.run(check_attempts)


def test_kinds_of_errors(pair: Group) -> None:
    pair.run(check_kinds)


def test_each_attempt_times_out(pair: Group) -> None:
    pair.run(check_timeouts)


def test_a_deadline_over_all(pair: Group) -> None:
    pair.run(check_deadline)


def ask_the_restarted(asynchronous: bool) -> str:
    patient = policy(attempts=1000, wait=0.05, max_wait=0.2, deadline=30)
    call = patient.rpc_async if asynchronous else patient.rpc_sync
    answer = call("worker1", f.name_here)
    return str(answer.wait() if asynchronous else answer)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_worker_that_is_killed_and_comes_back(asynchronous: bool) -> None:
    with Group(2, dynamic=True) as group:
        assert group.run(ask_the_restarted, asynchronous) == "worker1"
        group[1].kill()
        call = group[0].start(ask_the_restarted, asynchronous)
        time.sleep(0.5)
        assert not call.done(), "there is nobody to answer"
        again = group.add("worker1", 1)
        assert call.result(30) == "worker1"
        for worker in (again, group[0]):
            worker.run(leave)


def leave() -> None:
    rpc.shutdown()


@pytest.mark.parametrize(
    "given",
    [{"attempts": 0}, {"wait": -1.0}, {"max_wait": -1.0}, {"jitter": -0.1}, {"deadline": 0.0}],
    ids=str,
)
def test_bad_values_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        policy(**given)
