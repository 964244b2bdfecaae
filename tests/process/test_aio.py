"""torch_rpc_ext.aio: async def functions, futures to await, cancellation, batches."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process import remote_functions as m
from tests.process.deaths import wait_for_file
from tests.process.group import Group, init
from tests.support.backend import needs_ucx, on_ucx
from tests.support.child import Child, wait_for_end

TO = "worker1"


def kept(error: type[Exception]) -> type[Exception]:
    """The class as which an error arrives: upstream keeps only the types ValueError and
    TypeError."""
    return error if on_ucx() else RuntimeError


def check_all_ways() -> None:
    assert m.nap.sync(TO, 0.0, value="a") == "a"
    assert m.nap.async_(TO, 0.0, "b").wait() == "b"
    assert m.nap.sync(TO, 0.0, torch.ones(2, device="meta")).is_meta
    assert m.nap.remote(TO, 0.0, "c").to_here() == "c"
    assert asyncio.run(m.nap.call(TO, 0.0, "d")) == "d"
    assert asyncio.run(m.nap(0.0, "here")) == "here"
    assert m.nap.gather(["worker0", TO], 0.0, "e") == ["e", "e"]
    assert str(m.nap.sync(TO, 0.0, KeyError("a value"))) == "'a value'"
    assert m.nap.sync(TO, 0.0, {"t": torch.ones(2)})["t"].tolist() == [1, 1]
    assert m.thread_name.sync(TO) == "rpc-aio"
    assert m.ask_next.sync(TO, 4) == ["worker1", "worker0"] * 2 + ["worker1"]
    with pytest.raises(Exception, match="RPCErr:1"):
        m.nap.sync(TO, 1.0, rpc_timeout=0.2)
    # The callee notes that its call was cancelled, which the next test must not find. (A call that
    # reached a busy callee too late was never begun, and leaves no note.)
    end = time.monotonic() + (2 if on_ucx() else 0)
    while "cancelled None" not in rpc.rpc_sync(TO, m.ran) and time.monotonic() < end:
        time.sleep(0.01)


def check_thousands() -> None:
    async def main() -> list[int]:
        return list(await asyncio.gather(*(m.meet.call(TO, 1000, i) for i in range(1000))))

    # No call ends before all have begun, and the callee has fewer threads.
    assert asyncio.run(main()) == list(range(1000))


def check_errors() -> None:
    with pytest.raises(kept(KeyError), match="some text"):
        m.raise_async.sync(TO, "some text")
    with pytest.raises(kept(KeyError), match="worker1"):
        asyncio.run(m.raise_async.call(TO, "some text"))
    with pytest.raises(TypeError, match=r"nap\(\) missing 1 required"):
        m.nap.sync(TO)
    with pytest.raises(Exception, match="pickle"):
        m.unpicklable_async.sync(TO)
    with pytest.raises(RuntimeError, match="nobody"):
        asyncio.run(m.nap.call("nobody", 0.0))
    with pytest.raises(AttributeError, match="pickle"):
        m.nap.sync(TO, 0.0, lambda: None)
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(m.stop.call(TO))
    # sys.exit() in a call ends neither process and no other call.
    waiting = m.nap.async_(TO, 0.5, "still there")
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        m.exit_async.sync(TO)
    assert waiting.wait() == "still there"
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        m.exit_batch.sync(TO, 1)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        m.exit_batch.sync(TO, 1)


def check_awaiting() -> None:
    with tempfile.TemporaryDirectory() as folder:
        await_futures(Path(folder) / "ticked", Path(folder) / "closed")


def await_futures(ticked: Path, closed: Path) -> None:
    from torch_rpc_ext import aio

    async def main() -> Any:
        add = rpc.rpc_async(TO, torch.add, (torch.ones(2), 1))
        failing = rpc.rpc_async(TO, f.raise_value_error)
        assert (await aio.as_asyncio(add)).tolist() == [2, 2]
        with pytest.raises(ValueError, match="the value was wrong"):
            await aio.as_asyncio(failing)
        # The event loop goes on while a call is under way: without ticks the call would not end.
        slow = asyncio.ensure_future(aio.as_asyncio(rpc.rpc_async(TO, wait_for_file, (ticked,))))
        for _ in range(6):
            await asyncio.sleep(0.02)
            assert not slow.done()
        ticked.touch()
        assert await slow is None
        late = rpc.rpc_async(TO, wait_for_file, (closed,))
        given_up = aio.as_asyncio(late)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(given_up, 0.05)
        return late

    late = asyncio.run(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        aio.as_asyncio(torch.futures.Future())
    # An answer that comes after the loop was closed is dropped.
    assert not late.done()
    closed.touch()
    late.then(lambda _: None).wait()  # which is called after what as_asyncio() has added
    assert rpc.rpc_sync(TO, f.identity, (1,)) == 1


def check_cancellation() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cancel_what_waits(Path(folder) / "gate")
    cancel_what_runs()


def cancel_what_waits(gate: Path) -> None:
    from torch_rpc_ext import aio

    rpc.rpc_sync(TO, m.ran)

    async def until_calls(count: int) -> None:
        end = time.monotonic() + 30
        while await aio.as_asyncio(rpc.rpc_async(TO, m.one_at_a_time_calls)) != count:
            assert time.monotonic() < end, f"there are never {count} calls"
            await asyncio.sleep(0.01)

    async def not_begun() -> None:
        running = asyncio.ensure_future(m.one_at_a_time.call(TO, "first", str(gate)))
        await until_calls(1)
        dropped = asyncio.ensure_future(m.one_at_a_time.call(TO, "dropped"))
        await until_calls(2)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        await until_calls(1)  # it is given up while the first still runs
        gate.touch()
        assert await running == "first"
        assert await m.one_at_a_time.call(TO, "last") == "last"

    asyncio.run(not_begun())
    assert rpc.rpc_sync(TO, m.ran) == ["first", "last"]


def cancel_what_runs() -> None:
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(folder) / "begun"

        async def main() -> None:
            call = m.show_and_nap.call(TO, str(begun), 60.0, "begun", rpc_timeout=90)
            task = asyncio.ensure_future(call)
            while not begun.exists():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
    end = time.monotonic() + 30
    seen: list[Any] = []
    while "cancelled begun" not in seen and time.monotonic() < end:
        seen += rpc.rpc_sync(TO, m.ran)
        time.sleep(0.02)
    assert seen == ["begun", "cancelled begun"]


@needs_ucx("knows no limits")
def test_a_cancellation_needs_no_room() -> None:
    with Group(2, options={"max_calls_in_flight": 1}) as group:
        group.run(cancel_what_runs)


def check_cancellation_that_comes_first() -> None:
    """A cancellation may come before its call, when two threads take them from the network."""
    from torch_rpc_ext.aio import _server

    rpc.rpc_sync(TO, m.ran)
    target, request, _ = m.nap._request((0.0, "late"), {})
    rpc.rpc_sync(TO, _server.cancel, (request[1],))
    with pytest.raises(Exception, match="nap was cancelled on worker1"):
        rpc.rpc_sync(TO, target, request)
    assert rpc.rpc_sync(TO, m.ran) == []


def check_batches() -> None:
    rpc.rpc_sync(TO, m.ran)
    futures = [m.double.async_(TO, torch.tensor([i])) for i in range(64)]
    assert [int(future.wait()) for future in futures] == [2 * i for i in range(64)]
    sizes = rpc.rpc_sync(TO, m.ran)
    assert sum(sizes) == 64 and 1 < max(sizes) <= 8, sizes
    # By time: a single call does not wait for others for ever.
    assert m.double.sync(TO, torch.tensor([3])).tolist() == [6]
    assert asyncio.run(m.double.call(TO, torch.tensor([4]))).tolist() == [8]
    assert m.double([torch.ones(1)]).tolist() == [[2]], "called itself it runs here"
    assert m.double.remote(TO, torch.ones(1)).to_here().tolist() == [2]


def check_batch_by_size_and_errors_per_call() -> None:
    # Without the fourth call, the batch would start after the calls' time-outs.
    futures = [m.label.async_(TO, "n", number) for number in (2, 3)]
    futures += [m.label.async_(TO, texts="m", numbers=number) for number in (4, 5)]
    assert futures[0].wait() == "n2" and futures[2].wait() == "m4"
    for place, number in ((1, 3), (3, 5)):
        with pytest.raises(ValueError, match=f"{number} is odd"):
            futures[place].wait()


def check_batches_that_wait_for_ever() -> None:
    for _ in range(2):
        futures = [m.two_at_a_time.async_(TO, number, rpc_timeout=20) for number in (1, 2)]
        assert [future.wait() for future in futures] == [2, 2]


def check_bad_batches() -> None:
    from torch_rpc_ext.aio import _batch

    with pytest.raises(ValueError, match="batch function miscount returned 2 results for 1 calls"):
        m.miscount.sync(TO, 1)
    with pytest.raises(TypeError, match="batch function no_list returned a int"):
        m.no_list.sync(TO, 1)
    for kind in ("str", "dict", "set"):  # their items are no results of the calls
        with pytest.raises(TypeError, match=f"batch function of_kind returned a {kind}"):
            m.of_kind.sync(TO, kind)
    with pytest.raises(kept(KeyError), match="batch of 1"):
        m.raise_batch.sync(TO, 1)
    with pytest.raises(Exception, match="pickle"):
        m.unpicklable_batch.sync(TO, 1)
    with pytest.raises(Exception, match="pickle"):
        m.unpicklable_batch.sync(TO, 1)
    with pytest.raises(TypeError, match=r"label\(\): missing.*'numbers'"):
        m.label.sync(TO, "text")
    # A peer cannot break a batch with calls of others by such a request either.
    with pytest.raises(TypeError, match="numbers"):
        rpc.rpc_sync(TO, _batch.enqueue, (m.label, ("text",)))
    with pytest.raises(TypeError, match="not a batched"):
        rpc.rpc_sync(TO, _batch.enqueue, (time.sleep, (1,)))


def check_errors_that_cannot_be_described() -> None:
    """Each call gets an answer, and the thread that serves others too goes on."""
    for _ in range(2):
        futures = [m.indescribable_one.async_(TO, i, rpc_timeout=20) for i in (1, 2)]
        with pytest.raises(RuntimeError, match="Indescribable"):
            futures[0].wait()
        assert futures[1].wait() == 2
        with pytest.raises(RuntimeError, match="Indescribable"):
            m.raise_indescribable.sync(TO, rpc_timeout=20)


def check_answers_that_fail() -> None:
    """A future that cannot take its result, as one without devices refuses those of a GPU."""
    rpc.rpc_sync(TO, m.refuse_results, (True,))
    try:
        with pytest.raises(RuntimeError, match="refused"):
            m.double.sync(TO, torch.ones(1), rpc_timeout=20)
        with pytest.raises(RuntimeError, match="refused"):
            m.nap.sync(TO, 0.0, torch.ones(1), rpc_timeout=20)
    finally:
        rpc.rpc_sync(TO, m.refuse_results, (False,))
    assert m.double.sync(TO, torch.ones(1)).tolist() == [2]
    rpc.rpc_sync(TO, m.ran)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


def check_back_pressure() -> None:
    from torch_rpc_ext import errors

    first = m.slow_batch.async_(TO, -1)
    until(lambda: rpc.rpc_sync(TO, m.ran) == [-1])
    futures = [m.slow_batch.async_(TO, i) for i in range(12)]
    # One call runs and three wait; nine are refused.
    until(lambda: sum(future.done() for future in futures) == 9)
    rpc.rpc_sync(TO, m.open_gate)
    refusals = 0
    for number, future in enumerate(futures):
        try:
            assert future.wait() == number
        except kept(errors.OverloadedError) as error:
            assert "slow_batch waiting, its max_queue" in str(error)
            refusals += 1
    assert refusals == 9 and first.wait() == -1
    assert m.slow_batch.sync(TO, 5) == 5
    rpc.rpc_sync(TO, m.ran)


def check_a_name_that_is_taken() -> None:
    from torch_rpc_ext.aio import _server

    target, request, _ = m.meet._request((2, "first"), {})
    first = rpc.rpc_async(TO, target, request)
    while rpc.rpc_sync(TO, m.inside) == 0:
        time.sleep(0.01)
    # A peer's call that repeats the name of another call leaves that call alone.
    with pytest.raises(ValueError, match="meet runs already"):
        rpc.rpc_sync(TO, _server.run, (m.meet, request[1], (2, "second"), {}))
    assert m.meet.sync(TO, 2, "third") == "third"
    assert first.wait() == "first"


@pytest.mark.parametrize(
    "check",
    [
        check_all_ways,
        check_thousands,
        check_errors,
        check_awaiting,
        check_cancellation,
        check_cancellation_that_comes_first,
        check_batches,
        check_batch_by_size_and_errors_per_call,
        check_batches_that_wait_for_ever,
        check_bad_batches,
        check_errors_that_cannot_be_described,
        check_answers_that_fail,
        check_back_pressure,
        check_a_name_that_is_taken,
    ],
)
def test_aio(pair: Group, check: Any) -> None:
    pair.run(check)


def fork_clients(init_method: str, world_size: int) -> None:
    """Fork all workers but the first from this process, which has already imported aio."""
    forks = multiprocessing.get_context("fork")
    clients = [
        forks.Process(target=meet_at_service, args=(rank, world_size, init_method))
        for rank in range(1, world_size)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert [client.exitcode for client in clients] == [0] * len(clients)


def meet_at_service(rank: int, world_size: int, init_method: str) -> None:
    init(f"worker{rank}", rank, world_size, init_method, {})
    # The service answers no call before the other client has called too.
    assert m.meet.sync("worker0", world_size - 1, rank) == rank
    rpc.shutdown()


def test_clients_forked_from_one_process() -> None:
    with Group(1, init=False) as group:
        serving = group[0].init(3)
        parent = Child(fork_clients, (group.init_method, 3), name="parent")
        try:
            parent.start()
            serving.result()
            leaving = group[0].start(rpc.shutdown)
            assert wait_for_end([parent], 60) and parent.exitcode == 0, parent.output()
            leaving.result()
        finally:
            parent.close()


@needs_ucx("has no allow_list")
def test_allow_list() -> None:
    allowed = [
        {},
        {
            "allow_list": [
                "tests.process.remote_functions.nap",
                "tests.process.remote_functions.double",
                "tests.process.remote_functions.scale",
            ]
        },
    ]
    with Group(2, options=allowed) as group:
        group.run(check_allowed)


def check_allowed() -> None:
    from torch_rpc_ext import errors

    assert m.nap.sync(TO, 0.0, "a") == "a"
    assert asyncio.run(m.nap.call(TO, 0.0, "b")) == "b"
    assert m.double.sync(TO, torch.ones(1)).tolist() == [2]
    assert m.scale.sync(TO, torch.ones(1)).tolist() == [2]
    for refused in (m.thread_name, m.slow_batch, m.whoami):
        with pytest.raises(errors.RefusedError, match=refused.__name__):
            refused.sync(TO, *([1] if refused is m.slow_batch else []))
    with pytest.raises(errors.RefusedError, match="spin"):
        m.spin.sync(TO, torch.ones(1), 1)


RAISING = [
    "tests.process.functions.NeedsArguments",
    "tests.process.remote_functions.raise_batch",
    "tests.process.remote_functions.raise_needs_arguments",
    "tests.process.remote_functions.raise_value_error",
]


@needs_ucx("has no allow_list")
@pytest.mark.parametrize("callers", [{}, {"allow_list": RAISING}], ids=["callee", "both"])
def test_errors_with_an_allow_list(callers: dict[str, Any]) -> None:
    with Group(2, options=[callers, {"allow_list": RAISING}]) as group:
        group.run(check_listed_errors)


def check_listed_errors() -> None:
    with pytest.raises(ValueError, match="the value was wrong"):
        m.raise_value_error.sync(TO)
    with pytest.raises(f.NeedsArguments) as raised:
        m.raise_needs_arguments.sync(TO)
    assert (raised.value.code, raised.value.where) == (7, "here")
    with pytest.raises(KeyError, match="batch of 1"):
        m.raise_batch.sync(TO, 1)
