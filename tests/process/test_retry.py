"""RetryPolicy: repeats calls that may run twice, for the errors and as often as it says."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import math
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process import remote_functions as m
from tests.process.deaths import served
from tests.process.group import Group
from tests.support import script
from tests.support.backend import needs_ucx
from torch_rpc_ext import wire_dtype
from torch_rpc_ext.errors import OverloadedError

pytestmark = needs_ucx("has no errors by kind")

CALLS: list[float] = []


def fail_first(times: int, kind: str) -> int:
    """Fail ``times`` times; then return the number of calls."""
    import torch_rpc_ext

    CALLS.append(time.monotonic())
    if len(CALLS) <= times:
        error = getattr(torch_rpc_ext.errors, kind, ValueError)
        raise error("not yet")
    count = len(CALLS)
    CALLS.clear()
    return count


def calls_of_fail_first() -> int:
    return len(CALLS)


_second = threading.Event()


def hang_first() -> int:
    """In the first call, wait for the second call."""
    CALLS.append(time.monotonic())
    if len(CALLS) == 1:
        _second.clear()
        assert _second.wait(60)
        return -1
    count = len(CALLS)
    CALLS.clear()
    _second.set()
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


def check_async_functions() -> None:
    from torch_rpc_ext import aio
    from torch_rpc_ext.errors import OverloadedError

    kind = "OverloadedError"

    @policy(attempts=5)
    async def ask(times: int) -> Any:
        return await aio.as_asyncio(rpc.rpc_async("worker1", fail_first, (times, kind)))

    assert inspect.iscoroutinefunction(ask) and ask.__name__ == "ask"
    assert asyncio.run(ask(2)) == 3
    with pytest.raises(OverloadedError, match="not yet"):
        asyncio.run(ask(9))
    assert rpc.rpc_sync("worker1", calls) == 5
    rpc.rpc_sync("worker1", forget)
    # Remote functions of torch_rpc_ext.aio, called here and through their method call().
    rpc.rpc_sync("worker1", m.ran)
    again = policy(attempts=2, retry_on=(KeyError,))
    with pytest.raises(KeyError, match="here"):
        asyncio.run(again(m.raise_async)("here"))
    assert m.ran() == ["here", "here"]
    with pytest.raises(KeyError, match="there"):
        asyncio.run(again(m.raise_async.call)("worker1", "there"))
    assert rpc.rpc_sync("worker1", m.ran) == ["there", "there"]

    # A cancelled call is not repeated: the caller gets the cancellation.
    async def cancel_while_it_pauses() -> None:
        task = asyncio.ensure_future(policy(attempts=9, wait=60.0, max_wait=60.0)(ask)(9))
        while not rpc.rpc_sync("worker1", calls) == 5:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_while_it_pauses())
    assert rpc.rpc_sync("worker1", calls) == 5
    rpc.rpc_sync("worker1", forget)


def check_threads() -> None:
    """Calls do not have a thread each while they wait for answers or pause."""
    before = threading.active_count()
    futures = [policy().rpc_async("worker1", wait_until_open) for _ in range(20)]
    slow = policy(attempts=2, wait=3.0, max_wait=3.0)
    futures += [slow.rpc_async("worker1", fail_first, (40, "OverloadedError")) for _ in range(20)]
    while rpc.rpc_sync("worker1", calls) < 20:
        time.sleep(0.01)
    # Remaining threads: those that wait for the ends of pauses, and those of the back end that have
    # run a Python callback.
    mine = [thread for thread in threading.enumerate() if thread.name == "rpc-retry"]
    assert len(mine) <= 2, mine
    assert threading.active_count() < before + 20
    rpc.rpc_sync("worker1", open_gate)
    assert [future.wait() for future in futures[:20]] == [None] * 20
    for future in futures[20:]:
        with pytest.raises(RuntimeError, match="not yet"):
            future.wait()
    assert rpc.rpc_sync("worker1", calls) == 40
    rpc.rpc_sync("worker1", forget)


WAITING: list[Any] = []


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def wait_until_open() -> Any:
    future: Any = torch.futures.Future()
    WAITING.append(future)
    return future


def open_gate() -> None:
    while len(WAITING) < 20:
        time.sleep(0.01)
    for future in WAITING:
        future.set_result(None)
    WAITING.clear()


def check_kinds() -> None:
    # By default, an exception of the function is its answer and is not retried.
    with pytest.raises(ValueError, match="not yet"):
        policy(attempts=5).rpc_sync("worker1", fail_first, (1, "ValueError"))
    assert rpc.rpc_sync("worker1", calls) == 1
    rpc.rpc_sync("worker1", forget)
    patient = policy(attempts=5, retry_on=(ValueError,))
    assert patient.rpc_sync("worker1", fail_first, (1, "ValueError")) == 2


def calls() -> int:
    return len(CALLS)


def check_timeouts() -> None:
    # So that the first attempt does not have to import this module there.
    rpc.rpc_sync("worker1", forget)
    # Each attempt has its own time-out.
    assert policy().rpc_sync("worker1", hang_first, timeout=3) == 2


def check_deadline() -> None:
    from torch_rpc_ext.errors import CallTimeoutError

    start = time.monotonic()
    with pytest.raises(CallTimeoutError):
        policy(attempts=1000, deadline=1.0).rpc_sync("worker1", f.sleep, (1.5,))
    assert 0.9 < time.monotonic() - start < 60  # 1000 attempts would take 1500 s
    start = time.monotonic()
    with pytest.raises(CallTimeoutError):
        policy(attempts=1000, deadline=1.0).rpc_sync("worker1", f.sleep, (1.5,), timeout=0.1)
    assert 0.5 < time.monotonic() - start < 60  # 1000 attempts would take 100 s
    for timeout in (None, 0.1):
        patient = policy(attempts=1000, deadline=1.0)
        future = patient.rpc_async("worker1", f.sleep, (1.5,), timeout=timeout)
        with pytest.raises(CallTimeoutError):
            future.wait()
    for timeout in (-5.0, math.nan):
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            patient.rpc_sync("worker1", f.nothing, timeout=timeout)
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            patient.rpc_async("worker1", f.nothing, timeout=timeout).wait()
    # The calls that were given up still run, and would delay those of the next test.
    while rpc.rpc_sync("worker1", served) > 1:
        time.sleep(0.05)


class ExitsInARetry:
    """Raises SystemExit where it is pickled for an attempt after a pause."""

    def __reduce__(self) -> Any:
        if threading.current_thread().name == "rpc-retry":
            sys.exit(3)
        return ExitsInARetry, ()


def be_overloaded(_: Any) -> None:
    from torch_rpc_ext.errors import OverloadedError

    raise OverloadedError("not yet")


def check_attempts_that_exit() -> None:
    future = policy().rpc_async("worker1", be_overloaded, (ExitsInARetry(),))
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        future.wait()
    # The pauses of other calls still end.
    assert policy().rpc_async("worker1", fail_first, (1, "OverloadedError")).wait() == 2


class NotesItsThread:
    """Notes the thread that pickles it, whether that thread computes gradients, and turns that
    off."""

    seen: ClassVar[list[tuple[threading.Thread, bool]]] = []

    def __reduce__(self) -> Any:
        self.seen.append((threading.current_thread(), torch.is_grad_enabled()))
        if threading.current_thread() is not threading.main_thread():
            torch.set_grad_enabled(False)
        return NotesItsThread, ()


def check_threads_after_pauses() -> None:
    for _ in range(10):
        future = policy(attempts=2, wait=0.01).rpc_async(
            "worker1", be_overloaded, (NotesItsThread(),)
        )
        with pytest.raises(OverloadedError):
            future.wait()
    others = [thread for thread, _ in NotesItsThread.seen if thread is not threading.main_thread()]
    # Two as a rule; one more if a thread is not scheduled before the next pause ends.
    assert len(others) == 10 and len(set(others)) <= 5
    assert all(grad for _, grad in NotesItsThread.seen)


class NeverPickled:
    """Each attempt fails before it is sent, so the last one ends where its pause ends."""

    def __reduce__(self) -> Any:
        from torch_rpc_ext.errors import OverloadedError

        raise OverloadedError("not yet")


def check_callbacks_that_wait() -> None:
    first, second = (
        policy(attempts=2, wait=0.2).rpc_async("worker1", be_overloaded, (NeverPickled(),))
        for _ in range(2)
    )
    after = first.then(lambda _: second.wait())
    with pytest.raises(Exception, match="not yet"):
        after.wait()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def fail_elsewhere(to: str) -> Any:
    return policy(attempts=2).rpc_async(to, f.raise_value_error)


def check_returned_futures() -> None:
    for at, to in itertools.product(("worker0", "worker1"), repeat=2):
        with pytest.raises(ValueError, match="the value was wrong"):
            rpc.rpc_sync(at, fail_elsewhere, args=(to,))
        with pytest.raises(ValueError, match="the value was wrong"):
            rpc.rpc_async(at, fail_elsewhere, args=(to,)).wait()
        with pytest.raises(ValueError, match="the value was wrong"):
            rpc.remote(at, fail_elsewhere, args=(to,)).to_here()
    # Here the error is the one that the last attempt raised.
    future = policy(attempts=2).rpc_async("worker1", f.raise_value_error)
    for end in (future.wait, future.value):
        with pytest.raises(ValueError, match="the value was wrong"):
            end()


def test_an_async_function_may_return_the_future(pair: Group) -> None:
    """Its caller got the exception as the result."""
    pair.run(check_returned_futures)


def test_a_callback_may_wait_for_another_call(pair: Group) -> None:
    pair.run(check_callbacks_that_wait)


def test_attempts(pair: Group) -> None:
    pair.run(check_attempts)


def test_async_functions(pair: Group) -> None:
    pair.run(check_async_functions)


def first_number(tensor: torch.Tensor, times: int) -> float:
    """Fail ``times`` times; then return the number that has arrived."""
    fail_first(times, "OverloadedError")
    return float(tensor[0])


def check_wire_dtype() -> None:
    x = torch.full((4,), 1 / 3)
    with wire_dtype(torch.bfloat16):
        patient = policy()
        futures = [patient.rpc_async("worker1", first_number, args=(x, 0))]
        once = rpc.rpc_sync("worker1", first_number, args=(x, 0))
    assert once == float(x.bfloat16()[0]) != float(x[0])

    async def ask(times: int) -> Any:
        return rpc.rpc_sync("worker1", first_number, args=(x, times))

    for times in (1, 2):
        with wire_dtype(torch.bfloat16):
            # This thread leaves the block before the second attempt.
            futures.append(policy(wait=0.2).rpc_async("worker1", first_number, args=(x, times)))
        assert futures[-1].wait() == once
        with wire_dtype(torch.bfloat16):
            assert patient.rpc_sync("worker1", first_number, args=(x, times)) == once
            assert asyncio.run(patient(ask)(times)) == once
        # Blocks that other attempts were in, on the threads that end pauses, do not count.
        assert patient.rpc_async("worker1", first_number, args=(x, times)).wait() == float(x[0])
    assert [future.wait() for future in futures] == [once] * 3


def test_all_attempts_are_in_the_wire_dtype_block_of_the_call(pair: Group) -> None:
    pair.run(check_wire_dtype)


TENSORPIPE = """
    import sys
    from torch.distributed import rpc
    from torch_rpc_ext import RetryPolicy

    options = rpc.TensorPipeRpcBackendOptions(init_method="file://{path}")
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    assert RetryPolicy().rpc_async("me", abs, args=(-1,)).wait() == 1
    rpc.shutdown()
    assert "torch_rpc_ext._C" not in sys.modules
"""


def test_a_policy_on_tensorpipe_does_not_load_the_extension(tmp_path: Path) -> None:
    ended = script.python(TENSORPIPE.format(path=tmp_path / "store"), timeout=100)
    assert ended.code == 0, ended


def test_calls_have_no_threads(pair: Group) -> None:
    pair.run(check_threads)


def test_the_ends_of_pauses_share_threads(pair: Group) -> None:
    pair.run(check_threads_after_pauses)


def check_a_pause_without_an_end() -> None:
    """A pause that no wait() of Python can take must not end the thread of all pauses."""
    endless = policy(attempts=2, wait=math.inf, max_wait=math.inf)
    endless.rpc_async("worker1", fail_first, args=(1, "OverloadedError"))
    while not rpc.rpc_sync("worker1", calls_of_fail_first):
        time.sleep(0.01)
    time.sleep(0.5)  # the thread has the pause by now, most likely
    future = policy(attempts=2, wait=0.1).rpc_async(
        "worker1", fail_first, args=(2, "OverloadedError")
    )
    assert future.wait() == 3  # with the call that pauses for ever


def test_a_pause_without_an_end_holds_up_no_other(pair: Group) -> None:
    pair.run(check_a_pause_without_an_end)


def test_kinds_of_errors(pair: Group) -> None:
    pair.run(check_kinds)


def take_calls() -> int:
    count = len(CALLS)
    CALLS.clear()
    return count


def call_in_vain() -> None:
    """Make a call that runs into its time-out."""
    CALLS.append(time.monotonic())
    rpc.rpc_sync("worker0", time.sleep, args=(0.5,), timeout=0.05)


def check_what_the_function_raises() -> None:
    from torch_rpc_ext.errors import CallTimeoutError

    for call in (
        lambda: policy().rpc_sync("worker1", call_in_vain),
        lambda: policy().rpc_async("worker1", call_in_vain).wait(),
    ):
        with pytest.raises(CallTimeoutError, match="worker0"):
            call()
        assert rpc.rpc_sync("worker1", take_calls) == 3


def test_an_error_of_a_call_that_the_function_makes(pair: Group) -> None:
    """It counts as one of the function's call."""
    pair[0].run(check_what_the_function_raises)


def check_nothing_is_kept() -> None:
    from torch_rpc_ext.errors import OverloadedError

    for kind, error in (("ValueError", ValueError), ("OverloadedError", OverloadedError)):
        tensor = torch.ones(4)
        kept = weakref.ref(tensor)
        future = policy(retry_on=OverloadedError).rpc_async(
            "worker1", raise_given, args=(kind, tensor)
        )
        for _ in range(2):
            with pytest.raises(error):
                future.wait()
        with pytest.raises(error):
            future.value()
        del tensor, future
        end = time.monotonic() + 20
        while kept() is not None:  # the thread that completed the future may still have it
            gc.collect()
            assert time.monotonic() < end, "the argument stays"
            time.sleep(0.01)


def raise_given(kind: str, tensor: Any) -> None:
    import torch_rpc_ext

    raise getattr(torch_rpc_ext.errors, kind, ValueError)("not yet")


def test_a_call_that_failed_keeps_nothing(pair: Group) -> None:
    pair[0].run(check_nothing_is_kept)


def test_attempts_that_exit(pair: Group) -> None:
    pair.run(check_attempts_that_exit)


def test_each_attempt_times_out(pair: Group) -> None:
    pair.run(check_timeouts)


def test_a_deadline_over_all(pair: Group) -> None:
    pair.run(check_deadline)


def ask_the_restarted(asynchronous: bool) -> str:
    patient = policy(attempts=1000, wait=0.05, max_wait=0.2, deadline=30)
    call = patient.rpc_async if asynchronous else patient.rpc_sync
    answer = call("worker1", f.name_here)
    return str(answer.wait() if asynchronous else answer)


@pytest.mark.parametrize("ending", ["killed", "process ends", "shuts down"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_worker_that_ends_and_comes_back(asynchronous: bool, ending: str) -> None:
    with Group(2, dynamic=True) as group:
        assert group.run(ask_the_restarted, asynchronous) == "worker1"
        info = group.run(rpc.get_worker_info, "worker1")
        if ending == "killed":
            group[1].kill()
        else:
            if ending == "shuts down":
                group[1].run(leave)
                assert group.run(call_nobody, info) == ("NotInGroupError", "worker1", 3)
            group[1].leave()
            group[1].child.process.join(30)
            group[1].killed = True  # nobody is there to be asked to leave
        call = group[0].start(ask_the_restarted, asynchronous)
        time.sleep(0.5)
        assert not call.done(), "there is nobody to answer"
        again = group.add("worker1", 1)
        assert call.result(30) == "worker1"
        for worker in (again, group[0]):
            worker.run(leave)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_worker_that_has_still_to_join(asynchronous: bool) -> None:
    with Group(1, dynamic=True) as group:
        call = group[0].start(ask_the_restarted, asynchronous)
        time.sleep(0.5)
        assert not call.done(), "there is nobody to answer"
        late = group.add("worker1", 1)
        assert call.result(30) == "worker1"
        for worker in (late, group[0]):
            worker.run(leave)


def call_nobody(to: Any) -> tuple[str, str | None, int]:
    """Return (class of the error, its worker, number of attempts)."""
    tries: list[int] = []

    @policy(attempts=3)
    def call() -> None:
        tries.append(1)
        rpc.rpc_sync(to, f.nothing)

    with pytest.raises(RuntimeError, match="^could not find destination worker") as caught:
        call()
    return type(caught.value).__name__, getattr(caught.value, "worker", ""), len(tries)


def test_a_mistaken_name_in_a_static_group_is_not_repeated(pair: Group) -> None:
    assert pair.run(call_nobody, "wroker1") == ("RefusedError", "wroker1", 1)
    assert pair.run(call_nobody, 7) == ("RefusedError", None, 1)


def test_a_mistaken_name_in_a_dynamic_group_is_named() -> None:
    with Group(1, dynamic=True) as group:
        assert group.run(call_nobody, "wroker1") == ("NotInGroupError", "wroker1", 3)
        assert group.run(call_nobody, 7) == ("NotInGroupError", None, 3)


def shut_down_during_a_call() -> None:
    from torch_rpc_ext.errors import ShutDownError

    patient = policy(attempts=1000, wait=0.05, max_wait=0.2, deadline=30)
    call = patient.rpc_async("worker1", time.sleep, args=(2,))
    rpc.shutdown(graceful=False)
    with pytest.raises(ShutDownError, match="this worker shut down"):
        call.wait()


def test_this_workers_own_shutdown_ends_the_attempts() -> None:
    with Group(2, dynamic=True) as group:
        group.run(shut_down_during_a_call)
        group.close(gently=False)


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


@pytest.mark.parametrize(
    "given",
    [{"attempts": "5"}, {"attempts": 2.5}, {"wait": None}, {"max_wait": "5"}, {"deadline": "30"}],
    ids=str,
)
def test_values_of_another_type_are_named(given: dict[str, Any]) -> None:
    name, value = next(iter(given.items()))
    with pytest.raises(TypeError, match=f"^{name} must be .*, got {value!r}$"):
        policy(**given)


@pytest.mark.parametrize("value", [[KeyError], ("KeyError",), (KeyError(),), None], ids=str)
def test_what_cannot_be_retried_on_is_named(value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        policy(retry_on=value)
    assert str(caught.value) == f"retry_on must be a tuple of exception classes, got {value!r}"


def test_one_class_may_be_retried_on() -> None:
    tries: list[int] = []

    @policy(attempts=2, retry_on=LookupError)
    def look() -> Any:
        tries.append(len(tries))
        return {1: "found"}[tries[-1]]

    assert look() == "found"


def numbers() -> Any:
    yield 1


async def numbers_of_coroutine() -> Any:
    yield 1


class Numbers:
    def __call__(self) -> Any:
        yield 1


@pytest.mark.parametrize("function", [numbers, numbers_of_coroutine, Numbers()])
def test_a_generator_function_is_refused(function: Any) -> None:
    """A call of it fails when the generator runs, which the policy does not see."""
    with pytest.raises(TypeError, match=r"cannot repeat a generator.*umbers.*that makes the call"):
        policy()(function)


class ExitsWhereItIsRead:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("read",)


def return_what_exits() -> Any:
    return ExitsWhereItIsRead()


def retry_what_exits() -> None:
    from torch_rpc_ext import RetryPolicy

    future = RetryPolicy(attempts=2).rpc_async("worker1", return_what_exits)
    with pytest.raises(RuntimeError, match="SystemExit: read"):
        future.wait()
    calls = ThreadPoolExecutor(1)
    called = calls.submit(rpc.rpc_sync, "worker1", return_what_exits)
    with pytest.raises(RuntimeError, match="SystemExit: read"):
        called.result(60)


def test_an_answer_that_would_end_whoever_reads_it() -> None:
    with Group(2) as group:
        group.run(retry_what_exits)
