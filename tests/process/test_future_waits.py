"""future.wait() of rpc_async(): the thread that waits takes the answer itself, as in rpc_sync()."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group, workers
from tests.process.test_fork import Fork
from tests.support.backend import needs_ucx

SECONDS = 30.0


class Thread:
    """Unpickling this object gives the thread that does it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (threading.get_ident, ())


def thread_later(gate: str) -> Thread:
    """Return when the file ``gate`` exists."""
    wait_for(gate)
    return Thread()


def wait_for(gate: str) -> None:
    end = time.monotonic() + SECONDS
    while not Path(gate).exists():
        assert time.monotonic() < end
        time.sleep(0.001)


@contextlib.contextmanager
def opened_soon(gate: Path) -> Iterator[None]:
    """Create the file ``gate`` on another thread, when this thread probably waits."""

    def open_it() -> None:
        time.sleep(0.05)
        gate.touch()

    thread = threading.Thread(target=open_it)
    thread.start()
    yield
    thread.join()


def threads_of_answers(tmp_path: Path) -> Iterator[int]:
    """Yield the threads that read the answers for which this thread waits.

    The test cannot make sure that this thread waits before the answer comes, but in one of a
    hundred calls it will.
    """
    for number in range(100):
        gate = tmp_path / f"gate {number}"
        future = rpc.rpc_async("worker1", thread_later, args=(str(gate),))
        with opened_soon(gate):
            yield future.wait()


@needs_ucx("another thread completes the future")
@workers(2)
def test_the_thread_that_waits_takes_the_answer(tmp_path: Path) -> None:
    here = threading.get_ident()
    assert any(there == here for there in threads_of_answers(tmp_path))


def then(future: Any, callback: Callable[[Any], object]) -> Any:
    return future.then(callback)


def add_done_callback(future: Any, callback: Callable[[Any], object]) -> None:
    future.add_done_callback(callback)


def then_of_all(future: Any, callback: Callable[[Any], object]) -> Any:
    return torch.futures.collect_all([future]).then(callback)


@pytest.mark.parametrize("add", [then, add_done_callback, then_of_all], ids=lambda it: it.__name__)
@workers(2)
def test_a_callback_may_wait_for_the_thread_that_waits(
    add: Callable[..., object], tmp_path: Path
) -> None:
    took: list[float] = []
    end = time.monotonic() + SECONDS
    # A thread that waits looks up once a second. On a busy machine it may be late otherwise, too.
    while len(took) < 5 or min(took) >= 0.9:
        assert time.monotonic() < end, took
        gate = tmp_path / f"gate {len(took)}"
        future = rpc.rpc_async("worker1", thread_later, args=(str(gate),))
        waited, ran = threading.Event(), threading.Event()
        seen: list[bool] = []

        def callback(_: Any, waited: Any = waited, ran: Any = ran, seen: Any = seen) -> None:
            seen.append(waited.wait(SECONDS))
            ran.set()

        add(future, callback)
        begin = time.monotonic()
        with opened_soon(gate):
            future.wait()
            took.append(time.monotonic() - begin)
        waited.set()
        assert ran.wait(SECONDS)
        assert seen == [True]


@workers(2)
def test_callbacks_get_the_future_itself() -> None:
    for function, args in [
        (torch.add, (torch.ones(2), 1)),
        (f.name_here, ()),
        (f.script_add, (torch.ones(2),) * 2),
    ]:
        future = rpc.rpc_async("worker1", function, args=args)
        assert isinstance(future, torch._C.Future)
        done = threading.Event()
        seen: list[Any] = []

        def callback(given: Any, seen: Any = seen, done: Any = done) -> None:
            seen.append(given)
            done.set()

        future.add_done_callback(callback)
        assert future.then(lambda given, future=future: given is future).wait()
        assert done.wait(SECONDS)
        assert seen[0] is future
        with pytest.raises(RuntimeError, match="what a callback raises"):
            future.then(raise_in_callback).wait()


def raise_in_callback(_: Any) -> None:
    raise ValueError("what a callback raises")


@workers(2)
def test_many_threads_wait_for_one_future(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    future = rpc.rpc_async("worker1", thread_later, args=(str(gate),))
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    with opened_soon(gate):
        pass
    for thread in threads:
        thread.join(SECONDS)
    assert len(results) == 8
    assert len(set(results)) == 1


@workers(2)
def test_futures_are_waited_for_in_any_order() -> None:
    futures = [rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), i)) for i in range(200)]
    for i in [*range(199, -1, -2), *range(0, 200, 2)]:
        assert futures[i].wait().tolist() == [i + 1] * 2
    assert [each.sum() for each in torch.futures.wait_all(futures)] == [
        2 * i + 2 for i in range(200)
    ]


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@needs_ucx("its future.wait() does not notice signals")
@pytest.mark.parametrize("other_leads", [False, True])
@workers(2)
def test_a_signal_ends_a_wait_but_not_the_call(other_leads: bool, tmp_path: Path) -> None:
    gate, go = tmp_path / "gate", tmp_path / "go"
    before = signal.signal(signal.SIGALRM, raise_interrupt)
    other = threading.Thread(target=lambda: rpc.rpc_sync("worker1", wait_for, args=(str(go),)))
    try:
        if other_leads:
            other.start()
            time.sleep(0.1)  # usually it leads by then
        future = rpc.rpc_async("worker1", thread_later, args=(str(gate),))
        for _ in range(3):
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                future.wait()
            assert time.monotonic() - begin < SECONDS / 2
        assert not future.done()
        with opened_soon(gate):
            assert isinstance(future.wait(), int)
    finally:
        signal.signal(signal.SIGALRM, before)
        go.touch()
        if other_leads:
            other.join()


def wait_nested(depth: int) -> int:
    if depth == 0:
        return 0
    to = f"worker{1 - rpc.get_worker_info().id}"
    return 1 + int(rpc.rpc_async(to, wait_nested, args=(depth - 1,)).wait())


@workers(2, options={"num_worker_threads": 1})
def test_nested_calls_need_no_further_thread() -> None:
    assert wait_nested(20) == 20


@needs_ucx("a fork beside its agent hangs")
@workers(2)
def test_a_forked_process_waits_for_no_call_of_its_parent(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    future = rpc.rpc_async("worker1", thread_later, args=(str(gate),))
    ended = rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1))
    ended.wait()

    def check() -> None:
        with pytest.raises(RuntimeError, match="only the process that made the call"):
            future.wait()
        assert ended.wait().sum() == 4

    child = Fork(check)
    child.check()
    gate.touch()
    assert isinstance(future.wait(), int)


def wait_while_it_shuts_down(gate: str) -> list[str]:
    errors: list[str] = []

    def wait(future: Any) -> None:
        try:
            future.wait()
        except RuntimeError as error:
            errors.append(str(error))

    future = rpc.rpc_async("worker1", thread_later, args=(gate,), timeout=0)
    thread = threading.Thread(target=wait, args=(future,))
    thread.start()
    time.sleep(0.1)  # usually it waits by then
    rpc.shutdown(graceful=False)
    thread.join(SECONDS)
    wait(future)
    Path(gate).touch()
    return errors


@needs_ucx("its futures stay open")
def test_a_shutdown_ends_the_wait(tmp_path: Path) -> None:
    with Group(2) as group:
        errors = group[0].run(wait_while_it_shuts_down, str(tmp_path / "gate"))
        assert len(errors) == 2
        assert all("shut down" in error for error in errors)
        group[1].run(rpc.shutdown, graceful=False)


def answer(size: int) -> dict[str, int]:
    return {f"key {number}": number for number in range(size)}


@needs_ucx("its future.wait() does not notice signals")
@workers(2)
def test_a_signal_is_raised_by_the_wait_that_it_comes_in() -> None:
    # Small answers of several calls: this thread may complete some of them in another's wait.
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (answer, (300,)),
        (torch.add, (torch.ones(2), 1)),
        (answer, (300,)),
        (f.name_here, ()),
        (f.raise_plain, ("no",)),
    ]
    armed, raised, caught = False, 0, 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal armed, raised
        if armed:
            armed = False
            raised += 1
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        while raised < 200:
            futures = [rpc.rpc_async("worker1", function, args=args) for function, args in calls]
            try:
                armed = True
                futures[0].wait()
                armed = False
            except KeyboardInterrupt:
                caught += 1
            armed = False
            assert caught == raised
            for future in futures[1:-1]:
                future.wait()  # no exception is left in it
            with pytest.raises(f.PlainError):
                futures[-1].wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
