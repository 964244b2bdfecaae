"""Users' mistakes: each error is one sentence that names the value and the remedy."""

from __future__ import annotations

import math
import pickle
import re
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed import rpc

import torch_rpc_ext
from tests.process import functions as f
from tests.process.deaths import check_alive
from tests.process.group import Group, workers
from tests.support import script
from tests.support.backend import needs_ucx
from tests.support.ports import free_port
from torch_rpc_ext import scripting
from torch_rpc_ext.errors import RefusedError


def init_with(options: Any, backend: str, init_method: str, rank: int, name: str) -> str:
    """Call init_rpc as a program would; return the name, or raise init_rpc's error."""
    options.init_method = init_method
    rpc.init_rpc(
        name,
        backend=getattr(rpc.BackendType, backend),
        rank=rank,
        world_size=2,
        rpc_backend_options=options,
    )
    return name


def init_with_tensorpipe_options(backend: str, init_method: str, rank: int, name: str) -> str:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=5, rpc_timeout=8)
    return init_with(options, backend, init_method, rank, name)


def init_with_our_options(init_method: str, rank: int, name: str, seconds: float) -> str:
    from torch_rpc_ext import UcxRpcBackendOptions

    return init_with(UcxRpcBackendOptions(init_timeout=seconds), "UCX", init_method, rank, name)


def given_options() -> tuple[str, int, float]:
    options = rpc.api._get_current_rpc_agent()._get_backend_options()
    return type(options).__name__, options.num_worker_threads, rpc.get_rpc_timeout()


@needs_ucx("is what takes them")
def test_tensorpipes_options_are_good_for_ucx() -> None:
    with Group(2, init=False) as group:
        calls = [
            worker.start(
                init_with_tensorpipe_options, "UCX", group.init_method, worker.rank, worker.name
            )
            for worker in group
        ]
        assert [call.result() for call in calls] == ["worker0", "worker1"]
        assert group.run(given_options) == ("TensorPipeRpcBackendOptions", 5, 8.0)
        assert group.run(torch_adds) == 4


def torch_adds() -> float:
    return float(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).sum())


@needs_ucx("waits, or says that the address is in use")
@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_two_processes_that_are_rank_0(scheme: str) -> None:
    with Group(3, init=False) as group:
        method = group.init_method if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
        calls = [
            group[n].start(init_with_our_options, method, 0, f"twin{n}", 40.0) for n in range(2)
        ]
        # One worker gets the error while the other still waits for rank 1.
        done: list[int] = []
        while not done:
            done = [n for n, call in enumerate(calls) if call._worker.pipe.poll(0.05)]
        second, first = done[0], 1 - done[0]
        with pytest.raises(RuntimeError) as raised:
            calls[second].result()
        text = str(raised.value)
        assert f"Rank 0 is not unique: worker twin{first} (pid " in text, text
        assert "a rank of its own" in text and socket.gethostname() in text, text
        assert not calls[first].done(), "the first still waits for rank 1"
        # Now rank 1 comes.
        last = group[2].start(init_with_our_options, method, 1, "last", 40.0)
        assert (calls[first].result(), last.result()) == (f"twin{first}", "last")
        assert group[first].run(name_of_last) == "last"
        group[second].kill()
        group.broken = True  # its workers are not all in one RPC group
        for call in [group[n].start(shut_down) for n in (first, 2)]:
            call.result()


def name_of_last() -> str:
    return str(rpc.rpc_sync("last", f.name_here))


def shut_down() -> None:
    rpc.shutdown()


@needs_ucx("says nothing")
@pytest.mark.parametrize("ours", [0, 1])
def test_a_rank_on_tensorpipe_is_named(ours: int) -> None:
    theirs = 1 - ours
    with Group(2, init=False) as group:
        method = f"tcp://127.0.0.1:{free_port()}"
        # The TENSORPIPE worker keeps waiting in its rendezvous, and is killed.
        group[theirs].start(init_with_tensorpipe_options, "TENSORPIPE", method, theirs, "theirs")
        with pytest.raises(RuntimeError) as raised:
            group[ours].start(init_with_our_options, method, ours, "ours", 8.0).result()
        text = str(raised.value)
        assert f"rank(s) {theirs} of 2 have not joined" in text, text
        assert "TENSORPIPE" in text and "TORCH_RPC_BACKEND=ucx" in text, text
        group[theirs].kill()
        group.broken = True


def makes_local() -> Callable[[], None]:
    def local() -> None:
        pass

    return local


CALLS: dict[str, Callable[..., Any]] = {
    "rpc_sync": rpc.rpc_sync,
    "rpc_async": rpc.rpc_async,
    "remote": lambda *args, **kwargs: rpc.remote(*args, **kwargs),
}


@workers(2)
@pytest.mark.parametrize("how", CALLS)
@needs_ucx("says what pickle says")
def test_a_function_that_has_no_name_of_its_own(how: str) -> None:
    for function, kind in ((lambda: None, "lambda"), (makes_local(), "function within a function")):
        with pytest.raises((pickle.PicklingError, AttributeError)) as raised:
            CALLS[how]("worker1", function)
        text = str(raised.value)
        assert kind in text and __name__ in text and "top level of a module" in text, text
        assert "\n" not in text
    assert torch_adds() == 4


@workers(2)
@pytest.mark.parametrize("how", CALLS)
@needs_ucx("says what to do")
def test_a_torchscript_function_that_the_callee_does_not_have(how: str) -> None:
    @torch.jit.script
    def only_here(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(RefusedError) as raised:
        result = CALLS[how]("worker1", only_here, args=(torch.ones(1),))
        result.to_here() if how == "remote" else result.wait()
    text = str(raised.value)
    assert 'worker "worker1" attempted to get undefined function only_here' in text, text
    assert f"Import the module that defines the function, {__name__}, there" in text, text
    assert raised.value.worker == "worker1" and "\n" not in text
    assert torch_adds() == 4


@workers(2)
@pytest.mark.parametrize("how", CALLS)
@needs_ucx("takes the tensor apart")
def test_args_without_the_comma(how: str) -> None:
    for args, kind in (
        (torch.ones(2), "Tensor"),
        (torch.ones(()), "Tensor"),
        (numpy.zeros(2), "ndarray"),
        ("ab", "str"),
        (5, "int"),
    ):
        for function in (f.identity, torch.neg):
            with pytest.raises(TypeError, match=f"got a {kind}: write args=\\(value,\\)"):
                CALLS[how]("worker1", function, args=args)
    # Upstream accepts these.
    for args in ([1], (1,), range(1)):
        value = CALLS[how]("worker1", f.identity, args=args)
        value = value.to_here() if how == "remote" else value
        assert (value.wait() if how == "rpc_async" else value) in (0, 1)
    value = CALLS[how]("worker1", f.nothing, args=None)


def all_with(workers: Any, function: Any, args: Any) -> list[Any]:
    calls = torch_rpc_ext.rpc_async_all(workers, function, args=args)
    return [call.wait() for call in calls]


GROUP_CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "rpc_async_all": all_with,
    "gather": lambda to, function, args: scripting.gather(to, function, args),
    "broadcast": lambda to, function, args: scripting.broadcast(to, function, args),
    "first_of": lambda to, function, args: scripting.first_of(to, function, args),
    "map_reduce": lambda to, function, args: scripting.map_reduce(
        to, function, [1], torch.add, args
    ),
}


@workers(2)
@pytest.mark.parametrize("how", GROUP_CALLS)
def test_args_of_a_group_call_without_the_comma(how: str) -> None:
    for args, kind in (
        (torch.ones(2), "Tensor"),
        (torch.zeros(1), "Tensor"),
        (torch.ones(()), "Tensor"),
        (numpy.zeros(1), "ndarray"),
        ("abc", "str"),
        (5, "int"),
    ):
        for function in (f.nothing, max):
            with pytest.raises(TypeError, match=f"got a {kind}: write args=\\(value,\\)"):
                GROUP_CALLS[how](["worker1"], function, args)
    for args in ([2], (2,), range(2, 3), None, ()):
        GROUP_CALLS[how](["worker1"], f.nothing, args)


@workers(2)
@pytest.mark.parametrize("how", GROUP_CALLS)
def test_workers_of_a_group_call_that_are_no_list(how: str) -> None:
    for to in ("worker1", 1, rpc.get_worker_info("worker1"), None):
        with pytest.raises(ValueError, match=f"needs a list of .*got {re.escape(repr(to))}"):
            GROUP_CALLS[how](to, f.nothing, ())


@workers(2)
@pytest.mark.parametrize("how", GROUP_CALLS)
def test_workers_of_a_group_call_without_indices(how: str) -> None:
    for to in ({"worker1"}, frozenset({1}), {"worker1": 0}, {"worker1": 0}.keys()):
        GROUP_CALLS[how](to, f.nothing, ())


@workers(2)
def test_items_that_are_no_list() -> None:
    for items, kind in (
        ({"a": 1}, "dict"),
        ({1}, "set"),
        ((item for item in [1]), "generator"),
        ({"a": 1}.values(), "dict_values"),
        (1, "int"),
    ):
        with pytest.raises(TypeError, match=f"needs a list of .*, got a {kind}: pass a list or a"):
            scripting.map_reduce(["worker1"], torch.neg, items, torch.add)
    for some in (torch.ones(2), range(2), numpy.ones(2)):
        assert scripting.map_reduce(["worker1"], f.identity, some, lambda a, b: a + b) > 0


class Unpicklable:
    def __reduce__(self) -> Any:
        raise LookupError("not to be pickled")


@workers(2)
def test_a_worker_of_a_group_call_that_is_none() -> None:
    """The call to it does not begin; those to the others give their results."""
    for wrong in (None, 1.5, torch.tensor(1)):
        wanted: list[Any] = [wrong, "worker1"]
        named = re.escape(f"1 of 2 workers failed: {wrong!s}: ")
        assert scripting.first_of(wanted, f.identity, (7,)) == 7
        with pytest.raises(scripting.GroupError, match=named) as one:
            scripting.gather(wanted, f.identity, (7,))
        assert one.value.results == {"worker1": 7}
        with pytest.raises(scripting.GroupError, match="workers failed: worker1: LookupError: not"):
            scripting.map_reduce(["worker1"], f.identity, [1, Unpicklable()], lambda a, b: a + b)


def gather_from_nobody() -> None:
    scripting.gather(["nobody"], f.identity, (7,))


@needs_ucx("makes an exception of its text alone")
@workers(2)
def test_a_group_error_of_a_remote_function() -> None:
    with pytest.raises(scripting.GroupError, match="nobody") as raised:
        rpc.rpc_sync("worker1", gather_from_nobody)
    assert raised.value.worker == "nobody" and raised.value.errors == {}


@needs_ucx("tries for five minutes, and names no file")
def test_a_store_in_a_file_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for path, problem in (
        (tmp_path / "missing" / "store", f"there is no folder {tmp_path}/missing"),
        (tmp_path / "a file" / "store", f"there is no folder {tmp_path}/a file"),
        (tmp_path, "that is a folder"),
    ):
        code = f"""
    import torch_rpc_ext
    from torch.distributed import rpc
    options = torch_rpc_ext.UcxRpcBackendOptions(init_method="file://{path}")
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
"""
        ended = script.python(code)
        assert f"ValueError: init_method is file://{path}, and {problem}" in ended.err, ended


@needs_ucx("names neither the option nor the value")
@pytest.mark.parametrize(
    ("given", "port", "text"),
    [
        ("foo", "", "init_method must be env://, tcp://host:port or file:///path, got 'foo'"),
        ("localhost:29500", "", "init_method must be env://.*got 'localhost:29500'"),
        ("tcp://host:99999", "", "init_method is 'tcp://host:99999': Port out of range"),
        ("env://", "99999", "MASTER_PORT must be a port, from 0 to 65535, got '99999'"),
        ("env://", "port", "MASTER_PORT must be a port, from 0 to 65535, got 'port'"),
    ],
)
def test_a_store_that_cannot_be(
    given: str, port: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port or "29500")
    options = torch_rpc_ext.UcxRpcBackendOptions(init_method=given)
    with pytest.raises(ValueError, match=text):
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)


def calls_with(timeout: Any) -> list[Callable[[], Any]]:
    to = ["worker1"]
    adds = (torch.ones(2), 1)
    return [
        lambda: rpc.rpc_sync("worker1", f.nothing, timeout=timeout),
        lambda: rpc.rpc_sync("worker1", torch.add, args=adds, timeout=timeout),
        lambda: rpc.rpc_async("worker1", f.nothing, timeout=timeout),
        lambda: rpc.remote("worker1", f.nothing, timeout=timeout),
        lambda: rpc.remote("worker1", torch.add, args=adds, timeout=timeout),
        lambda: torch_rpc_ext.rpc_async_all(to, f.nothing, timeout=timeout),
        lambda: scripting.gather(to, f.nothing, timeout=timeout),
        lambda: scripting.first_of(to, f.nothing, timeout=timeout),
        lambda: scripting.map_reduce(to, torch.neg, [1], torch.add, timeout=timeout),
    ]


@workers(2)
@needs_ucx("prints the signature of a C++ function")
@pytest.mark.parametrize("timeout", ["5", None, timedelta(seconds=5)], ids=str)
def test_a_timeout_that_is_no_number(timeout: Any) -> None:
    for way in calls_with(timeout):
        with pytest.raises(TypeError, match=r"timeout must be a number of seconds") as raised:
            way()
        assert f"got {timeout!r}" in str(raised.value)


@workers(2)
@needs_ucx("takes them for what they are not")
@pytest.mark.parametrize("seconds", [-5.0, -0.5, math.nan, -math.inf], ids=str)
def test_a_timeout_that_is_none(seconds: float) -> None:
    rref = rpc.remote("worker1", f.identity, args=(1,))
    assert rref.to_here() == 1
    ways = [
        *calls_with(seconds),
        lambda: rref.to_here(timeout=seconds),
        lambda: rref.rpc_sync(timeout=seconds).bit_length(),
    ]
    for number, way in enumerate(ways):
        with pytest.raises(ValueError, match=r"timeout must be a number of seconds") as raised:
            way()
        assert f"got {seconds:g}" in str(raised.value), number
    before = rpc.get_rpc_timeout()
    with pytest.raises(ValueError, match="rpc_timeout"):
        rpc._set_rpc_timeout(seconds)
    assert rpc.get_rpc_timeout() == before
    # Upstream allows these.
    for fine in (0, 0.0, -1, -1.0, 5, math.inf, 1e9):
        assert rpc.rpc_sync("worker1", f.identity, args=(1,), timeout=fine) == 1
    rpc._set_rpc_timeout(0)
    assert rpc.rpc_sync("worker1", f.identity, args=(1,)) == 1


@workers(2, options={"rpc_timeout": 1e10})
@needs_ucx("is over at once")
def test_a_timeout_of_centuries() -> None:
    """It ends no call: 292 years are the most that a clock of C++ counts."""
    assert rpc.get_rpc_timeout() > 3e9
    assert rpc.rpc_sync("worker1", f.sleep, args=(0.2,)) == 0.2
    for seconds in (1e10, 1e38, math.inf):
        assert rpc.rpc_sync("worker1", f.sleep, args=(0.2,), timeout=seconds) == 0.2
        rref = rpc.remote("worker1", f.sleep, args=(0.2,), timeout=seconds)
        assert rref.to_here(timeout=seconds) == 0.2


def lock() -> Any:
    return {"lock": threading.Lock()}


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lock_later() -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(threading.Lock())
    return future


@workers(2)
@needs_ucx("gives the C++ stack")
def test_a_result_that_cannot_be_pickled() -> None:
    for to in ("worker1", "worker0"):
        ways: list[Callable[[], Any]] = [
            lambda to=to: rpc.rpc_sync(to, lock),
            lambda to=to: rpc.rpc_async(to, lock).wait(),
            lambda to=to: rpc.rpc_sync(to, lock_later),
        ]
        if to == "worker1":
            ways.append(lambda to=to: rpc.remote(to, lock).to_here())
        for number, way in enumerate(ways):
            with pytest.raises(RuntimeError) as raised:
                way()
            text = str(raised.value)
            assert f"worker {to!r}" in text and "cannot be pickled" in text, text
            assert "rpc.remote()" in text and "frame #" not in text and ".cpp" not in text, text
            if number < 2:
                assert f"{__name__}.lock on worker" in text, text
        assert rpc.rpc_sync(to, f.identity, args=(1,)) == 1


@needs_ucx("has no options of ours")
def test_options_show_no_knobs_for_tests() -> None:
    from torch_rpc_ext import UcxRpcBackendOptions

    shown = repr(UcxRpcBackendOptions())
    assert "messages_to" not in shown and "num_fail_sends" not in shown
    assert "keepalive=2.0" in shown and "device_maps={}" in shown
    with pytest.raises(AttributeError) as raised:
        UcxRpcBackendOptions().keep_alive = 1  # type: ignore[attr-defined]
    assert "keepalive" in str(raised.value) and "messages_to" not in str(raised.value)


@needs_ucx("does not read the variable")
@pytest.mark.parametrize("level", ["debugging", "inof"])
def test_a_log_level_that_does_not_exist(level: str) -> None:
    with (
        Group(1, init=False, env={"TORCH_RPC_EXT_LOG": level}) as group,
        pytest.raises(ValueError, match=f"TORCH_RPC_EXT_LOG='{level}' means nothing: .*'debug'"),
    ):
        group[0].init(1).result()


@needs_ucx("does not read the variable")
def test_a_log_level_in_capitals() -> None:
    with Group(2, env={"TORCH_RPC_EXT_LOG": "DEBUG"}) as group:
        group[0].run(check_alive, "worker1")
        assert "[torch_rpc_ext debug" in group.output()
