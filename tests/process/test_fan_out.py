"""Calls to several workers whose tensors are copied once: rpc_async_all(), and the group calls of
torch_rpc_ext.scripting."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

import torch_rpc_ext
from tests.process import functions as f
from tests.process.deaths import check_alive
from tests.process.group import Group, workers
from tests.process.test_handover import region_of
from tests.process.test_network import Hosts, group_on, received
from tests.support.backend import needs_ucx
from torch_rpc_ext import scripting
from torch_rpc_ext._calls import fan_out

SIZE = 600_000  # floats
OTHERS = ["worker1", "worker2", "worker3"]
NO_LIST = needs_ucx("has no allow-list")
kept: list[Tensor] = []


def numbers(start: float) -> Tensor:
    return torch.arange(SIZE, dtype=torch.float32) + start


def warm_up() -> None:
    for name in OTHERS:
        rpc.rpc_sync(name, f.identity, args=(numbers(0),))


def keep(tensor: Tensor) -> int:
    kept.append(tensor)
    return region_of(tensor)


def write_and_sum(tensor: Tensor, value: float) -> tuple[float, float]:
    """Write to a part of the tensor; return the sum before, and the sum of what was kept."""
    before = float(tensor.double().sum())
    tensor[100:200] = value
    return before, float(tensor[:300].sum())


def sum_of_kept() -> float:
    return float(kept[-1].double().sum())


def forget() -> None:
    kept.clear()


def wait_all(futures: list[Any]) -> list[Any]:
    return [future.wait() for future in futures]


@workers(4)
def test_each_call_has_its_own_answer() -> None:
    x = numbers(1)
    sums = wait_all(torch_rpc_ext.rpc_async_all([*OTHERS, 2], torch.sum, args=(x,)))
    assert all(one.equal(x.sum()) for one in sums) and len(sums) == 4
    assert wait_all(torch_rpc_ext.rpc_async_all(OTHERS, f.name_here)) == OTHERS
    with pytest.raises(RuntimeError, match="nobody"):
        torch_rpc_ext.rpc_async_all(["worker1", "nobody"], f.nothing)
    assert torch_rpc_ext.rpc_async_all([], f.nothing) == []
    futures = torch_rpc_ext.rpc_async_all(OTHERS, f.raise_value_error)
    for future in futures:
        with pytest.raises(ValueError, match="was wrong"):
            future.wait()


@needs_ucx("sends a copy to each")
@workers(4)
def test_all_receivers_map_one_block() -> None:
    warm_up()
    x = numbers(5)
    regions = wait_all(torch_rpc_ext.rpc_async_all(OTHERS, keep, args=(x,)))
    assert len(set(regions)) == 1 and regions[0] != 0
    # What was sent may be written to, and the block is not used again while somebody has it.
    total = float(x.double().sum())
    x.zero_()
    for _ in range(20):
        rpc.rpc_sync("worker1", f.identity, args=(numbers(0),))
    assert wait_all([rpc.rpc_async(name, sum_of_kept) for name in OTHERS]) == [total] * 3
    for name in OTHERS:
        rpc.rpc_sync(name, forget)


@workers(4)
def test_a_receiver_sees_its_own_writes_only() -> None:
    warm_up()
    x = numbers(5)
    total = float(x.double().sum())
    for _ in range(3):
        # worker1 is called twice: each call has a tensor of its own.
        to = ["worker1", "worker1", "worker2", "worker3"]
        sums = wait_all(torch_rpc_ext.rpc_async_all(to, write_and_sum, args=(x, 7.0)))
        expected = x[:300].clone()
        expected[100:200] = 7.0
        assert sums == [(total, float(expected.sum()))] * 4
        assert x.equal(numbers(5))


@workers(4)
def test_what_was_common_can_be_returned() -> None:
    warm_up()
    x = numbers(3)
    for _ in range(3):
        for back in wait_all(torch_rpc_ext.rpc_async_all(OTHERS, f.identity, args=(x,))):
            assert back.equal(x)
            back.zero_()  # nobody else's
        assert x.equal(numbers(3))


@needs_ucx("sends a copy to each")
@workers(2)
def test_memory_that_begins_where_shared_memory_begins() -> None:
    array = np.arange(SIZE, dtype=np.float32)
    whole, half = torch.from_numpy(array), torch.from_numpy(array[: SIZE // 2])
    with fan_out.one_copy():
        futures = [
            rpc.rpc_async("worker1", f.identity, args=(whole,)),
            rpc.rpc_async("worker1", f.identity, args=((whole, half),)),
        ]
    first, (second, part) = wait_all(futures)
    assert first.equal(whole) and second.equal(whole) and part.equal(half)


@workers(4)
def test_tensors_of_many_kinds() -> None:
    warm_up()
    x = numbers(0)
    value = {
        "small": torch.ones(3),
        "view": x[10:500_000:2],
        "same": [x, x],
        "half": x.half(),
        "parameter": torch.nn.Parameter(x.clone()),
        "sparse": torch.eye(4).to_sparse(),
    }
    for back in wait_all(torch_rpc_ext.rpc_async_all(OTHERS, f.identity, args=(value,))):
        assert back["view"].equal(value["view"]) and back["half"].equal(value["half"])
        assert back["same"][0].data_ptr() == back["same"][1].data_ptr()
        assert back["parameter"].equal(value["parameter"])
        assert back["sparse"].to_dense().equal(torch.eye(4))


def fork_and_sum(tensor: Tensor) -> list[float]:
    """The sum in a child of a fork that lives on after this function has returned."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        time.sleep(0.5)
        os.write(theirs, str(float(tensor.double().sum())).encode())
        os._exit(0)
    kept.append(torch.tensor(ours))
    return [float(tensor.double().sum()), float(ours)]


def read_from(descriptor: int) -> float:
    return float(os.read(descriptor, 100))


@needs_ucx("sends a copy to each")
@workers(4)
def test_a_fork_keeps_the_value() -> None:
    warm_up()
    x = numbers(11)
    total = float(x.double().sum())
    forked = wait_all(torch_rpc_ext.rpc_async_all(OTHERS, fork_and_sum, args=(x,)))
    assert [before for before, _ in forked] == [total] * 3
    for i in range(20):
        wait_all(torch_rpc_ext.rpc_async_all(OTHERS, f.nothing, args=(numbers(i),)))
    for name, (_, descriptor) in zip(OTHERS, forked, strict=True):
        assert rpc.rpc_sync(name, read_from, args=(int(descriptor),)) == total


def receive_and_die(tensor: Tensor, name: str) -> float:
    if f.name_here() == name:
        os._exit(3)
    kept.append(tensor)
    return float(tensor[0])


@needs_ucx("notices a death late")
def test_a_receiver_that_dies_fails_its_own_call() -> None:
    with Group(4) as group:
        group[0].run(warm_up)
        group[2].killed = True  # it will end by itself
        group[0].run(check_others_live)


def check_others_live() -> None:
    x = numbers(9)
    futures = torch_rpc_ext.rpc_async_all(OTHERS, receive_and_die, args=(x, "worker2"))
    assert futures[0].wait() == futures[2].wait() == 9.0
    with pytest.raises(RuntimeError, match="worker2"):
        futures[1].wait()
    total = float(x.double().sum())
    for i in range(10):
        rpc.rpc_sync("worker1", f.nothing, args=(numbers(i),))
    for name in ("worker1", "worker3"):
        assert rpc.rpc_sync(name, sum_of_kept) == total
        check_alive(name)


@workers(4)
def test_group_calls_of_scripting() -> None:
    warm_up()
    x = numbers(2)
    assert all(one.equal(x) for one in scripting.gather(OTHERS, f.identity, args=(x,)))
    scripting.broadcast(OTHERS, f.nothing, args=(x,))
    assert scripting.first_of(OTHERS, f.identity, args=(x,)).equal(x)
    items = [torch.full((SIZE,), float(i)) for i in range(7)]
    total = scripting.map_reduce(OTHERS, torch.add, items, torch.add, args=(x,))
    assert total.equal(x * 7 + 21)
    with pytest.raises(scripting.GroupError, match="nobody"):
        scripting.gather(["worker1", "nobody"], f.identity, args=(x,))


# ---- between hosts ---------------------------------------------------------


def sent_bytes() -> int:
    with open("/sys/class/net/eth0/statistics/tx_bytes", encoding="utf-8") as file:
        return int(file.read())


def caller_of(_: Tensor) -> str:
    return torch_rpc_ext.current_call().caller


THERE = ["worker1", "worker3", "worker5"]  # odd ranks: the other host
LARGE = 20_000_000  # bytes


def check_the_link_carries_once() -> tuple[int, list[Any]]:
    x = torch.arange(LARGE // 4, dtype=torch.float32)
    for name in THERE:
        check_alive(name)
    before = sent_bytes()
    sums = wait_all(torch_rpc_ext.rpc_async_all(THERE, torch.sum, args=(x,)))
    used = sent_bytes() - before
    assert all(one.equal(x.sum()) for one in sums)
    return used, wait_all(torch_rpc_ext.rpc_async_all(THERE, caller_of, args=(x,)))


@needs_ucx("sends a copy to each")
def test_the_link_carries_the_tensors_once(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4, size=6) as group:
        used, callers = group[0].run(check_the_link_carries_once)
        assert LARGE < used < 1.3 * LARGE
        assert callers == ["worker1"] * 3 or callers == ["worker0", "worker1", "worker1"]
        assert received(hosts[1], "eth0") > LARGE


def fail_on(name: str, text: str, _: Tensor) -> str:
    if f.name_here() == name:
        raise ValueError(text)
    return f.name_here()


def raise_on(name: str, kind: str, _: Tensor) -> str:
    if f.name_here() != name:
        return f.name_here()
    raise {
        "KeyError": KeyError("key"),
        "CannotBeBuilt": f.CannotBeBuilt(7, "here"),
        "PlainError": f.PlainError("text"),
        "OSError": FileNotFoundError(errno.ENOENT, "none", "file"),
        "Group": ExceptionGroup("two", [ValueError("v"), KeyError("k")]),
    }[kind]


def name_and_sum(tensor: Tensor) -> tuple[str, float]:
    return f.name_here(), float(tensor.double().sum())


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def second_of_all(tensor: Tensor) -> Any:
    return torch_rpc_ext.rpc_async_all(THERE, fail_on, args=("worker3", "on purpose", tensor))[1]


def check_errors_of_passed_on_calls() -> None:
    x = torch.ones(LARGE // 4)
    futures = torch_rpc_ext.rpc_async_all(THERE, fail_on, args=("worker3", "on purpose", x))
    assert futures[0].wait() == "worker1" and futures[2].wait() == "worker5"
    with pytest.raises(ValueError, match="on purpose"):
        futures[1].wait()
    with pytest.raises(ValueError, match="on purpose"):  # and not a ValueError as the result
        rpc.rpc_sync("worker2", second_of_all, args=(x,))
    with pytest.raises(RuntimeError, match="set timeout"):
        wait_all(torch_rpc_ext.rpc_async_all(THERE, f.sleep, args=(20.0, x), timeout=1.0))
    for timeout in (-5.0, math.nan):
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            torch_rpc_ext.rpc_async_all(THERE, f.nothing, args=(x,), timeout=timeout)
    # The error is that of one call only, and as that of a direct call.
    for kind in ("KeyError", "CannotBeBuilt", "OSError", "Group"):
        passed_on = error_of_one(kind, x)
        with pytest.raises(Exception) as direct:  # noqa: PT011  compared below
            rpc.rpc_sync("worker3", raise_on, args=("worker3", kind, torch.ones(1)))
        assert type(passed_on).__mro__[1:] == type(direct.value).__mro__[1:], kind
        assert known(passed_on) == known(direct.value)
        assert "Traceback" in text_of(passed_on) and "in raise_on" in text_of(passed_on)


def error_of_one(kind: str, x: Tensor) -> BaseException:
    futures = torch_rpc_ext.rpc_async_all(THERE, raise_on, args=("worker3", kind, x))
    assert futures[0].wait() == "worker1" and futures[2].wait() == "worker5"
    with pytest.raises(Exception) as raised:  # noqa: PT011  the caller looks at it
        futures[1].wait()
    return raised.value


def known(error: BaseException) -> dict[str, Any]:
    """What an exception holds beside its text."""
    fields = {name: getattr(error, name, None) for name in ("errno", "filename", "code")}
    inner = [repr(one) for one in getattr(error, "exceptions", ())]
    return {**fields, "name": type(error).__name__, "inner": inner}


def text_of(error: BaseException) -> str:
    return "".join([str(error), *getattr(error, "__notes__", ())]).replace("\\n", "\n")


def check_an_error_that_the_caller_cannot_have() -> None:
    error = error_of_one("PlainError", torch.ones(LARGE // 4))
    assert type(error) is RuntimeError and "PlainError: text" in str(error)


@needs_ucx("has no allow-list")
def test_one_error_that_the_caller_refuses(hosts: Hosts) -> None:
    each: list[dict[str, Any]] = [{"allow_list": ["torch.add"]}, *({} for _ in range(5))]
    # The first worker there passes calls on: its list has the function that does it, and the error.
    passed = [__name__, f"{f.__name__}.PlainError", "torch_rpc_ext._calls.fan_out.pass_on"]
    each[1] = {"allow_list": passed}
    with group_on(hosts, hosts[0].ipv4, size=6, each=each) as group:
        group[0].run(check_an_error_that_the_caller_cannot_have)


@needs_ucx("sends a copy to each")
def test_errors_of_calls_that_are_passed_on(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4, size=6) as group:
        group[0].run(check_errors_of_passed_on_calls)


@needs_ucx("has no allow-list")
def test_workers_that_do_not_pass_calls_on(hosts: Hosts) -> None:
    allowed = [__name__]
    with group_on(hosts, hosts[0].ipv4, size=6, allow_list=allowed) as group:
        group[0].run(check_sums)


def tenfold(tensor: Tensor) -> Tensor:
    return tensor * 10


def check_gradients() -> None:
    with dist_autograd.context() as context:
        x = torch.ones(SIZE, requires_grad=True)
        made = wait_all(torch_rpc_ext.rpc_async_all(THERE, tenfold, args=(x,)))
        made += scripting.gather(THERE, tenfold, args=(x,))
        dist_autograd.backward(context, [torch.stack(made).sum()])
        assert dist_autograd.get_gradients(context)[x].equal(torch.full((SIZE,), 60.0))


@pytest.mark.parametrize("passing_on", ["allowed", pytest.param("refused", marks=NO_LIST)])
def test_gradients_from_another_host(passing_on: str, hosts: Hosts) -> None:
    options = {"allow_list": [__name__]} if passing_on == "refused" else {}
    with group_on(hosts, hosts[0].ipv4, size=6, **options) as group:
        group[0].run(check_gradients)


def first_number(tensor: Tensor) -> float:
    return float(tensor[0])


def check_numbers(block: torch.dtype | None | str) -> None:
    x = torch.full((SIZE,), 1 / 3)
    chosen = contextlib.nullcontext() if isinstance(block, str) else torch_rpc_ext.wire_dtype(block)
    with chosen:
        together = torch_rpc_ext.rpc_async_all(THERE, first_number, args=(x,))
        apart = [rpc.rpc_async(name, first_number, args=(x,)) for name in THERE]
    assert wait_all(together) == wait_all(apart)


NARROW = torch.bfloat16
NONE: dict[str, Any] = {}


@needs_ucx("has no narrow dtypes")
@pytest.mark.parametrize(
    "each",
    [
        pytest.param([{"wire_dtype": {"worker1": NARROW}}, *5 * [NONE]], id="for-one-receiver"),
        pytest.param([NONE, {"wire_dtype": NARROW}, *4 * [NONE]], id="of-the-first-receiver"),
        pytest.param(
            [{"wire_dtype": NARROW}, *5 * [{"allow_list": [__name__]}]], id="not-passed-on"
        ),
    ],
)
def test_numbers_that_another_host_gets(each: list[dict[str, Any]], hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4, size=6, each=each) as group:
        for block in ("none", None, torch.float16):
            group[0].run(check_numbers, block)


def keep_and_return_owned(tensor: Tensor) -> f.Owned:
    kept.append(tensor)
    return f.Owned()


def count_kept() -> int:
    return len(kept)


def check_refused_answers() -> None:
    x = torch.ones(LARGE // 4)
    for future in torch_rpc_ext.rpc_async_all(THERE, keep_and_return_owned, args=(x,)):
        with pytest.raises(RuntimeError, match='"worker0" refused tests.process.functions.Owned'):
            future.wait()
    assert [rpc.rpc_sync(name, count_kept) for name in THERE] == [1, 1, 1]


@needs_ucx("has no allow-list")
def test_answers_that_the_caller_refuses(hosts: Hosts) -> None:
    each: list[dict[str, Any]] = [{"allow_list": ["torch.add"]}, *({} for _ in range(5))]
    with group_on(hosts, hosts[0].ipv4, size=6, each=each) as group:
        group[0].run(check_refused_answers)


def check_sums() -> None:
    x = torch.ones(LARGE // 4)
    for one in wait_all(torch_rpc_ext.rpc_async_all(THERE, name_and_sum, args=(x,))):
        assert one in [(name, LARGE / 4) for name in THERE]


def check_dead_host() -> None:
    x = torch.ones(LARGE // 4)
    futures = torch_rpc_ext.rpc_async_all(THERE, receive_and_die, args=(x, "worker1"))
    for future in futures:
        with pytest.raises(RuntimeError, match="worker1") as raised:
            future.wait()
        assert "by way of worker 'worker1'" in "".join(raised.value.__notes__)
    check_alive("worker3")


@needs_ucx("notices a death late")
def test_a_worker_that_dies_while_it_passes_calls_on(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4, size=6) as group:
        group[1].killed = True  # it will end by itself
        group[0].run(check_dead_host)
