"""profile() when a worker answers oddly, at Ctrl-C, after a shutdown and after a fork."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import init, shutdown, workers
from tests.process.test_profiler import hook_names, profiled, rows
from tests.support.backend import needs_ucx
from torch_rpc_ext.profiler import recorder

ALLOWED = ["torch.mm", "torch_rpc_ext.profiler.recorder"]

SPOILED: dict[str, Any] = {}


@torch.jit.script
def script_difference(to: torch.Tensor, name: torch.Tensor) -> torch.Tensor:
    return to - name


def odd(answer: Any, kind: str) -> Any:
    if kind == "raises":
        raise ValueError("odd")
    if kind == "a text":
        return "12:00"
    if kind == "a short tuple":
        return answer[:-1]
    if kind == "a short call":
        return (*answer[:3], [(1, 2)], *answer[4:])
    assert kind == "a text for a time"
    return (*answer[:6], "12:00", *answer[7:])


def spoil(name: str, kind: str) -> None:
    """Let a function of this worker's recorder answer oddly, until mend()."""
    original = SPOILED[name] = getattr(recorder, name)
    setattr(recorder, name, lambda *args: odd(original(*args), kind))


def mend() -> None:
    for name, original in SPOILED.items():
        setattr(recorder, name, original)
    SPOILED.clear()
    if recorder._active is not None:
        recorder.stop(recorder._active.session)


def is_recording() -> bool:
    return bool(json.loads(recorder.describe())["busy"])


@workers(3)
def test_a_worker_that_answers_oddly_is_left_out() -> None:
    for name, kind, said in [
        ("now", "raises", "ValueError"),
        ("now", "a text", "shows a str"),
        ("stop", "raises", "ValueError"),
        ("stop", "a text", "no valid Recording"),
        ("stop", "a short tuple", "no valid Recording"),
        ("stop", "a short call", "no valid Call"),
        ("stop", "a text for a time", "no valid Recording"),
    ]:
        with profiled() as prof:
            rpc.rpc_sync("worker2", f.nothing)
            rpc.rpc_sync("worker1", spoil, args=(name, kind))
        assert list(prof.missing) == ["worker1"] and said in prof.missing["worker1"], prof.missing
        assert rows(prof)["nothing", "worker2"].execution_p50 is not None
        rpc.rpc_sync("worker1", mend)


def interrupt_and_wait(pid: int, done: str) -> None:
    """Let this worker send SIGINT when it is asked for the time, and not answer before `done`."""

    def now() -> int:
        os.kill(pid, signal.SIGINT)
        while not os.path.exists(done):
            time.sleep(0.01)
        return 0

    SPOILED["now"] = recorder.now
    recorder.now = now


@workers(3)
def test_ctrl_c_at_the_end_stops_all_recordings(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with pytest.raises(KeyboardInterrupt), profiled(timeout=50.0):
        rpc.rpc_sync("worker1", interrupt_and_wait, args=(os.getpid(), str(done)))
    try:
        assert not is_recording()
        for worker in ("worker1", "worker2"):
            assert not rpc.rpc_sync(worker, is_recording), worker
    finally:
        done.touch()
        rpc.rpc_sync("worker1", mend)


@needs_ucx("does not show executions of operators, nor refuses calls")
@workers(2, options={"allow_list": ALLOWED})
def test_the_execution_of_a_failed_call_has_failed() -> None:
    with profiled() as prof:
        for function, args in {
            torch.mm: (torch.ones(2, 3), torch.ones(2, 3)),
            eval: ("1",),
        }.items():
            with pytest.raises(RuntimeError):
                rpc.rpc_sync("worker1", function, args=args)
    outcomes = {e.function: e.error for e in prof.recordings["worker1"].executions}
    assert outcomes == {"aten::mm": "RuntimeError", "builtins.eval": "RefusedError"}


running: list[Any] = []


def begin_own_profiler() -> None:
    running.append(torch.profiler.profile())
    running[-1].start()


def warm_own_profiler_up() -> None:
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    running.append(torch.profiler.profile(schedule=schedule))
    running[-1].start()


def end_own_profiler() -> None:
    torch.ones(3).add(1)
    running.pop().stop()


def operators_are_missing(prof: Any) -> bool:
    """Whether the calls of worker0 are there, and the profile says why its operators are not."""
    why = prof.without_operators.get("worker0", "")
    assert not prof.missing and rows(prof)["nothing", "worker0"].calls == 1
    assert (prof.recordings["worker0"].operators == b"") == bool(why)
    assert (f"no operators: worker0, {why}" in prof.summary()) == bool(why)
    return "a torch.profiler of its program" in why


@workers(1)
def test_a_torch_profiler_of_the_program_runs_already() -> None:
    for begin in (begin_own_profiler, warm_own_profiler_up):
        begin()
        with profiled(operators=True) as prof:
            rpc.rpc_sync("worker0", f.nothing)
        assert operators_are_missing(prof), begin
        end_own_profiler()
    with profiled(operators=True) as prof:
        rpc.rpc_sync("worker0", f.nothing)
    assert not operators_are_missing(prof)


@workers(1)
def test_a_torch_profiler_of_the_program_begins_meanwhile() -> None:
    with profiled(operators=True) as prof:
        begin_own_profiler()
        rpc.rpc_sync("worker0", f.nothing)
        end_own_profiler()
    assert operators_are_missing(prof)
    with profiled(operators=True) as prof:
        begin_own_profiler()
        rpc.rpc_sync("worker0", f.nothing)
    assert operators_are_missing(prof)
    end_own_profiler()


def join_alone(store: Path) -> None:
    init("worker0", 0, 1, f"file://{store}", {})


def expect_it_works_alone() -> None:
    with profiled() as prof:
        rpc.rpc_sync("worker0", f.nothing)
    assert rows(prof)["nothing", "worker0"].calls == 1 and not prof.missing


@workers(1)
def test_a_shutdown_ends_a_recording(tmp_path: Path) -> None:
    before = hook_names()
    former = profiled(operators=True)
    former.__enter__()
    shutdown()
    join_alone(tmp_path / "store")
    expect_it_works_alone()
    assert hook_names() == before
    former.__exit__(None, None, None)
    assert list(former.missing) == ["worker0"]


@needs_ucx("hangs in a fork beside a live agent")
@workers(1)
def test_a_fork_leaves_the_recording_to_the_parent(tmp_path: Path) -> None:
    before = hook_names()
    with profiled() as prof:
        with recorder._lock:  # as another thread that starts or ends a recording
            child = os.fork()
        if child == 0:
            try:
                signal.alarm(170)
                join_alone(tmp_path / "store")
                assert not is_recording()
                expect_it_works_alone()
                shutdown()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        rpc.rpc_sync("worker0", f.nothing)
    assert rows(prof)["nothing", "worker0"].calls == 1
    assert hook_names() == before


@workers(2)
def test_arguments_are_named_as_the_function_names_them() -> None:
    rpc.rpc_sync("worker1", is_recording)  # imports this module there
    arguments = {"to": torch.ones(2), "name": torch.ones(2)}
    with profiled() as prof:
        there = rpc.remote("worker1", script_difference, kwargs=arguments).to_here()
    assert torch.equal(there, torch.zeros(2))
    assert rows(prof)["script_difference", "worker1"].calls == 1
