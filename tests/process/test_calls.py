"""Every way to make a call, from every kind of thread and function."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.jit import _builtins

from tests.process import functions as f
from tests.process.deaths import wait_for_file
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

ONE = torch.ones(2)


def check_ways(to: str) -> None:
    assert rpc.rpc_sync(to, torch.add, args=(ONE, 1)).equal(ONE + 1)
    assert rpc.rpc_async(to, torch.add, args=(ONE, 1)).wait().equal(ONE + 1)
    assert rpc.remote(to, torch.add, args=(ONE, 1)).to_here().equal(ONE + 1)
    assert rpc.rpc_sync(to, f.script_add, args=(ONE, ONE)).equal(ONE * 2)
    assert rpc.remote(to, f.script_add, args=(ONE, ONE)).to_here().equal(ONE * 2)
    assert rpc.rpc_sync(to, f.make, args=(2, 3), kwargs={"dtype": torch.int32}).dtype == torch.int32
    assert rpc.rpc_sync(to, f.name_here) == to
    assert rpc.rpc_sync(rpc.get_worker_info(to), f.name_here) == to
    rref = rpc.remote(to, f.make, args=(2, 3))
    assert rref.rpc_sync().sum().equal(torch.tensor(15.0))
    assert rref.rpc_async().reshape(3, 2).wait().shape == (3, 2)
    assert rref.remote().sum().to_here().item() == 15.0
    assert rpc.rpc_sync(to, f.async_add_on, args=(to, ONE, ONE)).equal(ONE * 3)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_all_ways_to_call(pair: Group, to: str) -> None:
    pair.run(check_ways, to)


def rref_sum(rrefs: list[Any]) -> float:
    return float(sum(rref.to_here().sum() for rref in rrefs))


@workers(3)
def test_rrefs_travel() -> None:
    mine = rpc.RRef(torch.ones(3))
    other = rpc.remote("worker1", torch.full, args=((3,), 2.0))
    assert rpc.rpc_sync("worker2", rref_sum, args=([mine, other],)) == 9.0
    assert rpc.remote("worker2", rref_sum, args=([mine, other],)).to_here() == 9.0


@workers(3)
def test_async_execution_goes_on_elsewhere() -> None:
    futures = [
        rpc.rpc_async("worker1", f.async_add_on, args=("worker2", ONE * i, 1)) for i in range(50)
    ]
    assert [future.wait()[0].item() for future in futures] == [i + 2.0 for i in range(50)]


def check_threads(count: int, calls: int, payload: int = 1) -> None:
    """Call from ``count`` threads; the tensors of thread i have i * ``payload`` + 1 elements."""
    wrong: list[Any] = []

    def call(number: int) -> None:
        try:
            for i in range(calls):
                sent = torch.full((number * payload + 1,), float(i))
                back = rpc.rpc_sync("worker1", (f.identity, torch.clone)[i % 2], args=(sent,))
                if not back.equal(sent):
                    wrong.append((number, i, back))
        except Exception as error:  # noqa: BLE001
            wrong.append((number, error))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


def test_calls_from_8_threads(pair: Group) -> None:
    pair.run(check_threads, 8, 50)


def test_calls_from_threads_with_little_and_much(pair: Group) -> None:
    # 4 B, and 14, 29 and 43 MB, which the pool copies before they leave.
    pair.run(check_threads, 4, 12, 3_600_000)


def wait_for_gate(gate: Path, *_: object) -> None:
    wait_for_file(gate, 30)


def check_time_out_beside_another_thread(seconds: float, much: int, gate: Path) -> None:
    other = threading.Thread(
        target=rpc.rpc_sync, args=("worker1", wait_for_gate), kwargs={"args": (gate,)}
    )
    other.start()
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match="ran for more than"):
        rpc.rpc_sync("worker1", wait_for_gate, args=(gate, torch.ones(much)), timeout=seconds)
    assert other.is_alive(), "the call ended when the other one's answer arrived"
    assert rpc.rpc_sync("worker1", f.name_here) == "worker1"
    gate.touch()
    other.join()


@needs_ucx("its time-outs are looked at once a second")
@pytest.mark.parametrize("much", [1, 5_000_000])
def test_a_time_out_reaches_a_thread_that_waits_beside_another(
    pair: Group, much: int, tmp_path: Path
) -> None:
    pair.run(check_time_out_beside_another_thread, 0.5, much, tmp_path / "gate")


def check_many(count: int) -> None:
    futures = [rpc.rpc_async("worker1", torch.add, args=(torch.tensor(i), 1)) for i in range(count)]
    assert [future.wait().item() for future in futures] == list(range(1, count + 1))
    futures = [rpc.rpc_async("worker1", f.identity, args=(i,)) for i in range(count)]
    assert [future.wait() for future in futures] == list(range(count))


def test_2000_calls_at_once(pair: Group) -> None:
    pair.run(check_many, 2000)


@needs_ucx("deadlocks when nested calls fill its threads")
@pytest.mark.parametrize("threads", [1, 2])
def test_nested_32_deep(threads: int) -> None:
    with Group(2, options={"num_worker_threads": threads}, timeout=30) as group:
        assert group.run(f.nested, 32, 2) == 32


def call_round(size: int, rounds: int) -> int:
    """All workers of a ring do this at the same time: call the next worker, which calls the next
    one, and so on."""
    return sum(f.nested(2 * size, size) for _ in range(rounds))


@needs_ucx("deadlocks when nested calls fill its threads")
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_ring_of_synchronous_calls(size: int, threads: int) -> None:
    with Group(size, options={"num_worker_threads": threads}, timeout=30) as group:
        assert group.run_all(call_round, size, 5) == [2 * size * 5] * size


@needs_ucx("queues responses behind requests")
@workers(2, options={"num_worker_threads": 1})
def test_a_response_does_not_wait_behind_a_slow_request(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = rpc.rpc_async("worker0", wait_for_gate, args=(gate,))
    assert rpc.rpc_async("worker1", f.identity, args=(5,)).wait() == 5
    assert not slow.done(), "the response came after the slow request had left the only thread"
    gate.touch()
    slow.wait()


opened = threading.Event()


def wait_until_opened() -> bool:
    return opened.wait(30)


def open_up(_: Any) -> None:
    opened.set()


class CallsWhenPickled:
    """While it is pickled as an argument, begins a call that ends only after the call with that
    argument."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.futures: list[Any] = []

    def __reduce__(self) -> tuple[type, tuple[str]]:
        self.futures.append(rpc.rpc_async(self.to, wait_until_opened))
        return CallsWhenPickled, (self.to,)


def check_call_while_pickling(to: str) -> None:
    argument = CallsWhenPickled(to)
    rpc.rpc_sync(to, open_up, args=(argument,), timeout=20)
    assert argument.futures[0].wait()


def test_pickling_begins_a_call_and_does_not_wait_for_it(pair: Group) -> None:
    pair.run(check_call_while_pickling, "worker1")


def add_again(future: Any) -> Any:
    return rpc.rpc_sync("worker1", torch.add, args=(future.wait(), 1))


def check_callbacks(count: int) -> None:
    chain = rpc.rpc_async("worker1", torch.add, args=(ONE, 1))
    for _ in range(4):
        chain = chain.then(add_again)
    assert chain.wait().equal(ONE + 5)
    many = [
        rpc.rpc_async("worker1", f.identity, args=(ONE * i,)).then(add_again) for i in range(count)
    ]
    assert [future.wait()[0].item() for future in many] == [i + 1.0 for i in range(count)]


@pytest.mark.parametrize(
    "count", [1, pytest.param(100, marks=needs_ucx("deadlocks when callbacks fill its threads"))]
)
def test_callbacks_that_call_again(pair: Group, count: int) -> None:
    pair.run(check_callbacks, count)


class Scale(nn.Module):
    """A layer with one weight, for a RemoteModule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.weight

    def parameter_rrefs(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def check_training_step() -> None:
    from torch.distributed import autograd
    from torch.distributed.optim import DistributedOptimizer

    layer = rpc.remote("worker1", Scale)
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.5)
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with autograd.context() as context:
        loss = layer.rpc_sync().forward(values).sum()
        autograd.backward(context, [loss])
        assert autograd.get_gradients(context)[values].tolist() == [1.0, 1.0, 1.0]
        optimizer.step(context)
    after = rpc.rpc_sync("worker1", weight_of, args=(layer,))
    assert after.tolist() == [0.5, 0.0, -0.5]


def weight_of(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.local_value().weight.detach().clone()
    return weight


def test_distributed_optimizer_step(pair: Group) -> None:
    pair.run(check_training_step)


def check_remote_module() -> None:
    from torch.distributed.nn.api.remote_module import RemoteModule

    module: Any = RemoteModule("worker1/cpu", Scale)
    assert module.forward(torch.full((3,), 2.0)).tolist() == [2.0, 2.0, 2.0]
    assert module.forward_async(torch.full((3,), 4.0)).wait().tolist() == [4.0, 4.0, 4.0]
    assert len(module.remote_parameters()) == 1


def test_remote_module(pair: Group) -> None:
    pair.run(check_remote_module)


def profiled_events() -> list[str]:
    from torch.autograd.profiler_legacy import profile as legacy_profile

    with legacy_profile() as profile:
        rpc.rpc_sync("worker1", torch.mul, args=(ONE, ONE))
    return [event.name for event in profile.function_events]


# A thread that has served one profiled request must record the next one too.
@pytest.mark.parametrize(
    "times", [1, pytest.param(20, marks=needs_ucx("records a thread's first request only"))]
)
def test_profiler_shows_local_and_remote_events(times: int) -> None:
    with Group(2, options={"num_worker_threads": 2}) as group:
        for _ in range(times):
            names = group.run(profiled_events)
            assert any("rpc_sync#aten::mul(worker0 -> worker1)" in name for name in names), names
            assert any("#remote_op: aten::mul" in name for name in names), names


class OwnOperator:
    """Defines aten::rpc_test_own in this process, as a library would, and removes it again."""

    library: Any = None


def define_operator(factor: float) -> None:
    OwnOperator.library = torch.library.Library("aten", "FRAGMENT")
    OwnOperator.library.define("rpc_test_own(Tensor x) -> Tensor")
    OwnOperator.library.impl("rpc_test_own", lambda x: x * factor, "CPU")
    _builtins._register_builtin(torch.ops.aten.rpc_test_own, "aten::rpc_test_own")


def take_operator_away() -> None:
    OwnOperator.library._destroy()


def call_own_operator(to: str) -> float:
    return float(rpc.rpc_sync(to, torch.ops.aten.rpc_test_own, args=(torch.ones(1),)))


def test_an_operator_goes_away_and_comes_back() -> None:
    with Group(2) as group:
        group.run_all(define_operator, 2.0)
        assert [group[0].run(call_own_operator, "worker1") for _ in range(2)] == [2.0, 2.0]
        group[1].run(take_operator_away)
        with pytest.raises(RuntimeError, match="rpc_test_own"):
            group[0].run(call_own_operator, "worker1")
        group[1].run(define_operator, 3.0)
        assert group[0].run(call_own_operator, "worker1") == 3.0
