"""profile() records the calls of a whole group from one worker, with right times and links."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.process import functions as f
from tests.process import remote_functions, script_operators
from tests.process.deaths import wait_until_stopped
from tests.process.group import Group, workers
from tests.process.test_dynamic import init_one_by_one, leave
from tests.process.test_guest import call_without, command
from tests.support.backend import needs_ucx, on_ucx

PAUSE = 0.05


def pause(tensor: torch.Tensor) -> torch.Tensor:
    time.sleep(PAUSE)
    return tensor * 2


def pause_through(worker: str, tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync(worker, pause, args=(tensor,))
    return result


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def pause_later(worker: str, tensor: torch.Tensor) -> Any:
    return rpc.rpc_async(worker, pause, args=(tensor,)).then(lambda done: done.value() + 1)


def wait_for_file(path: str) -> None:
    Path(f"{path}.begun").touch()
    while not os.path.exists(path):
        time.sleep(0.01)


def profiled(**options: Any) -> Any:
    from torch_rpc_ext.profiler import profile

    return profile(**{"operators": False, **options})


def hooks() -> list[Any]:
    names = ("_invoke_rpc", "PythonUDF", "_invoke_rpc_python_udf", "_invoke_remote_python_udf")
    return [getattr(rpc.api, name) for name in names]


def rows(prof: Any) -> dict[tuple[str, str], Any]:
    return {(row.function.rpartition(".")[2], row.worker): row for row in prof.table()}


@workers(3)
def test_calls_of_all_workers_are_recorded() -> None:
    tensor = torch.ones(1000)
    with profiled() as prof:
        rpc.rpc_sync("worker1", pause_through, args=("worker2", tensor))
        rpc.rpc_async("worker2", pause, args=(tensor,)).wait()
        rpc.remote("worker1", pause, args=(tensor,)).to_here()
        rpc.rpc_sync("worker1", torch.add, args=(tensor, 1))
        rpc.rpc_sync("worker1", f.script_add, args=(tensor, tensor))
        if on_ucx():
            rpc.rpc_sync("worker1", torch.ops.aten.mul, args=(tensor, 2))
            rpc.rpc_async("worker1", torch.ops.aten.sub.Scalar, args=(tensor, 2)).wait()
        with pytest.raises(ValueError):
            rpc.rpc_sync("worker2", f.raise_value_error)
    found = rows(prof)
    through, there = found["pause_through", "worker1"], found["pause", "worker2"]
    assert (through.calls, there.calls, found["pause", "worker1"].calls) == (1, 2, 1)
    assert (there.errors, found["raise_value_error", "worker2"].errors) == (0, 1)
    # The time in the function counts as execution, not as network.
    for row in (through, there):
        assert PAUSE <= row.execution_p50 < row.total_p50, row
        assert 0 < row.network_p50 <= row.total_p99 - PAUSE, row
        assert (row.queue_p50 is not None) == on_ucx(), row
    assert there.result_bytes == 2 * tensor.nbytes and there.sent_bytes > 2 * tensor.nbytes
    for name in ("aten::add", "script_add", *(["aten::mul", "aten::sub"] if on_ucx() else [])):
        row = found[name, "worker1"]
        assert row.calls == 1 and row.total_p50 > 0, row
        assert row.sent_bytes in (tensor.nbytes, 2 * tensor.nbytes)
        if on_ucx():
            assert 0 < row.execution_p50 < row.total_p50 and row.result_bytes > tensor.nbytes, row
        else:  # recorded only at the caller
            assert row.execution_p50 is None, row
    assert "pause_through" in prof.summary() and "aligned within" in prof.summary()


def merged(prof: Any, tmp_path: Path) -> list[dict[str, Any]]:
    """Write the trace, check its format, and return its events."""
    prof.export_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    error_us = max(trace["otherData"]["clock_error_us"].values())
    check_format(trace["traceEvents"], 2 * error_us)
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def span_ns(event: dict[str, Any]) -> tuple[int, int]:
    """Begin and end of a slice, in ns: with floats in us, begin plus duration may miss an equal
    end."""
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event["dur"] * 1000)


def check_format(events: list[dict[str, Any]], error_us: float) -> None:
    """Check the rules of the Trace Event Format, as Perfetto reads it."""
    timed = [e for e in events if e["ph"] != "M"]
    assert {e["ph"] for e in events} <= set("MXstfi")
    times = [e["ts"] for e in timed]
    assert times == sorted(times) and all(e["dur"] >= 0 for e in timed if e["ph"] == "X")
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for e in timed:
        assert e["pid"] in processes, e
        if e["ph"] == "X":
            assert (e["pid"], e["tid"]) in threads, e
            tracks.setdefault((e["pid"], e["tid"]), []).append(e)
    flows: dict[tuple[str, str, Any], list[dict[str, Any]]] = {}
    for e in timed:
        if e["ph"] in "stf":
            flows.setdefault((e["cat"], e["name"], e["id"]), []).append(e)
            around = [
                x
                for x in tracks[e["pid"], e["tid"]]
                if span_ns(x)[0] <= round(e["ts"] * 1000) <= span_ns(x)[1]
            ]
            assert around, f"an arrow's end in no slice: {e}"
    for key, ends in flows.items():
        phases = "".join(e["ph"] for e in sorted(ends, key=lambda e: "stf".index(e["ph"])))
        assert phases in ("sf", "stf"), (key, phases)
        at = {e["ph"]: e["ts"] for e in ends}
        assert at["s"] <= at["f"] + error_us, (key, at)


@workers(3)
def test_arrows_link_caller_and_callee(tmp_path: Path) -> None:
    with profiled() as prof:
        rpc.rpc_sync("worker1", pause_through, args=("worker2", torch.ones(2)))
    events = merged(prof, tmp_path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    arrows = {(e["id"], e["ph"]): e for e in events if e["ph"] in "sf"}
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "rpc.queue"]
    assert len(arrows) == 8 and len(slices) == 4  # there and back, for two calls
    # The time in the callee's queue lies right before the execution.
    queues = [e for e in events if e.get("cat") == "rpc.queue"]
    assert len(queues) == len([e for e in events if e["ph"] == "t"]) == (2 if on_ucx() else 0)
    for queue in queues:
        (execution,) = [
            e
            for e in slices
            if e["cat"] == "rpc.execution" and e["args"]["call"] == queue["args"]["call"]
        ]
        assert span_ns(queue)[1] <= span_ns(execution)[0], (queue, execution)
        assert (queue["pid"], queue["tid"]) == (execution["pid"], execution["tid"])

    def slice_of(arrow: dict[str, Any]) -> str:
        """The one slice in which the end of an arrow lies, as "worker: name"."""
        place = (arrow["pid"], arrow["tid"])
        (found,) = [
            e
            for e in slices
            if (e["pid"], e["tid"]) == place
            and span_ns(e)[0] <= round(arrow["ts"] * 1000) < span_ns(e)[1]
        ]
        function = found["name"].rpartition(".")[2]
        return f"{names[found['pid']].split()[0]}: {function}"

    links = {
        (id.split()[0], slice_of(arrows[id, "s"]), slice_of(arrows[id, "f"])) for id, _ in arrows
    }
    outer = ("worker0: pause_through -> worker1", "worker1: pause_through <- worker0")
    inner = ("worker1: pause -> worker2", "worker2: pause <- worker1")
    assert links == {
        *(("request", call, execution) for call, execution in (outer, inner)),
        *(("response", execution, call) for call, execution in (outer, inner)),
    }
    # Each slice lies within that of its caller, also across processes, as exactly as the clocks
    # agree.
    error = 2e-3 * max(clock.error_ns for clock in prof.clocks.values())
    times = {e["name"].rpartition(".")[2]: (e["ts"], e["ts"] + e["dur"]) for e in slices}
    order = ["pause_through -> worker1", "pause_through <- worker0", "pause -> worker2"]
    for wide, narrow in zip(order, [*order[1:], "pause <- worker1"], strict=True):
        assert times[wide][0] <= times[narrow][0] + error, (wide, narrow)
        assert times[narrow][1] <= times[wide][1] + error, (wide, narrow)


def queued() -> int:
    return int(rpc.api._get_current_rpc_agent().get_metrics()["agent.queued_requests"])


KEPT: list[Any] = []


def begin_profile_behind(path: str) -> None:
    """Begin calls of all kinds behind one that ends when the file ``path`` exists, and profile
    them."""
    rpc.rpc_sync("worker1", pause, args=(torch.ones(1),))  # imports this module on worker1
    prof = profiled()
    prof.__enter__()
    calls = [rpc.rpc_async("worker1", wait_for_file, args=(path,))]
    calls += [rpc.rpc_async("worker1", pause, args=(torch.ones(1),)) for _ in range(3)]
    calls.append(rpc.rpc_async("worker1", f.script_add, (torch.ones(1), torch.ones(1))))
    KEPT.append((prof, calls))


def end_profile() -> dict[tuple[str, str], Any]:
    prof, calls = KEPT.pop()
    torch.futures.wait_all(calls)
    prof.__exit__(None, None, None)
    return rows(prof)


@needs_ucx("does not say when a request came and was taken up")
def test_queue_time_is_told_from_the_network(tmp_path: Path) -> None:
    free = tmp_path / "free"
    with Group(2, options={"num_worker_threads": 1}) as group:
        group.run(begin_profile_behind, str(free))
        deadline = time.monotonic() + 30
        while group[1].run(queued) < 4:
            assert time.monotonic() < deadline, "the calls do not arrive"
        free.touch()
        found = group.run(end_profile)
    paused, script = found["pause", "worker1"], found["script_add", "worker1"]
    # The third call waits for the two before it; the TorchScript function waits for all three.
    assert 1.9 * PAUSE < paused.queue_p99 < paused.total_p99, paused
    assert script.queue_p50 > 2.9 * PAUSE and script.execution_p50 < script.queue_p50, script
    # The network time of a call does not contain its time in the queue.
    assert script.network_p50 <= script.total_p50 - script.queue_p50, script


@needs_ucx("does not tell waits for the GIL of single calls")
@workers(2)
def test_waits_for_the_gil_are_told_apart() -> None:
    rpc.rpc_sync("worker1", f.identity, args=(1,))
    rpc.rpc_sync("worker1", script_operators.loaded)
    with profiled() as prof, remote_functions.gil_held("worker1"):
        waits = rpc.rpc_async("worker1", f.identity, args=(1,))
        # TorchScript, which needs no GIL, says when it waits: the other call holds the GIL.
        end = time.monotonic() + 30
        while script_operators.numbers.sync("worker1")["agent.server_active_calls"] < 3:
            assert time.monotonic() < end, "the call has not arrived"
        rpc.rpc_sync("worker1", f.script_add, (torch.ones(1), torch.ones(1)))
        time.sleep(1.5)
    assert waits.wait() == 1
    found = rows(prof)
    waited = found["identity", "worker1"]
    assert waited.gil_wait_p50 > 1 and waited.execution_p50 < 1, waited
    assert found["script_add", "worker1"].gil_wait_p50 < 1
    # Profiling of the GIL is off again, as before.
    counted = rpc.rpc_sync("worker1", agent_metrics)
    assert "agent.gil_average_wait_time_us" not in counted


def agent_metrics() -> set[str]:
    return set(rpc.api._get_current_rpc_agent().get_metrics())


class Stage:
    def __init__(self, inputs: int, outputs: int) -> None:
        self.layer = torch.nn.Linear(inputs, outputs)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(batch)
        return result


@needs_ucx("does not show what begins in C++")
@workers(3)
def test_a_training_step(tmp_path: Path) -> None:
    stages = [rpc.remote("worker1", Stage, (8, 16)), rpc.remote("worker2", Stage, (16, 2))]
    with profiled(operators=True) as prof, dist_autograd.context() as context:
        hidden = stages[0].rpc_sync().forward(torch.rand(4, 8))
        output = stages[1].rpc_sync().forward(hidden)
        dist_autograd.backward(context, [output.sum()])
        rpc.remote("worker1", torch.add, args=(torch.ones(1), 1)).to_here()
    found = rows(prof)
    for worker in ("worker1", "worker2"):
        # The backward pass goes from the trainer to the last stage, and from there to the first.
        assert found["forward", worker].calls == 1
        assert found["backward", worker].execution_p50 > 0, found
    assert found["to_here", "worker1"].execution_p50 > 0
    events = merged(prof, tmp_path)
    names = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    backward = {
        (names[e["pid"]], e["name"])
        for e in events
        if e["ph"] == "X" and "dist_autograd" in e["name"] and e["cat"].startswith("rpc.")
    }
    assert {("worker0", "dist_autograd.backward -> worker2")} <= backward, backward
    assert {("worker1", "dist_autograd.backward <- worker2")} <= backward or {
        ("worker1", "dist_autograd.backward <- worker0")
    } <= backward, backward


@needs_ucx("does not name the function")
@workers(2)
def test_a_timeout_names_the_users_function() -> None:
    from tests.process import remote_functions as r

    with profiled() as prof:
        for name, call in {
            "tests.process.functions.sleep": lambda: rpc.rpc_sync(
                "worker1", f.sleep, args=(0.5,), timeout=0.1
            ),
            "tests.process.remote_functions.nap": lambda: r.nap.sync(
                "worker1", 0.5, rpc_timeout=0.1
            ),
        }.items():
            with pytest.raises(RuntimeError, match=f"with an error: {name} on worker"):
                call()
    assert {row.function for row in prof.table()} == {
        "tests.process.functions.sleep",
        "tests.process.remote_functions.nap",
    }


@workers(2)
def test_clocks_are_as_exact_as_they_say() -> None:
    with profiled() as prof:
        pass
    for clock in prof.clocks.values():
        # All workers are on one host, so the true offset is 0.
        assert abs(clock.first.offset_ns) <= clock.first.error_ns
        assert abs(clock.last.offset_ns) <= clock.last.error_ns
        assert 0 < clock.error_ns < 1e9


def test_a_drifting_clock_is_followed() -> None:
    from torch_rpc_ext.profiler.clocks import Clock, Sample

    clock = Clock(Sample(0, 1_000, 5), Sample(1_000_000, 3_000, 7))
    assert [clock.to_ours(theirs) for theirs in (1_000, 502_000, 1_003_000)] == [
        *(0, pytest.approx(500_000, abs=5), pytest.approx(1_000_000, abs=10))
    ]
    assert clock.error_ns == 7


@workers(2)
def test_nothing_stays_when_it_is_off() -> None:
    before = hooks()
    there = rpc.rpc_sync("worker1", hook_names)
    with profiled():
        assert hooks() != before
        assert rpc.rpc_sync("worker1", hook_names) != there
    assert all(now is then for now, then in zip(hooks(), before, strict=True))
    assert rpc.rpc_sync("worker1", hook_names) == there
    with pytest.raises(KeyError), profiled() as prof:
        rpc.rpc_sync("worker1", f.identity, args=(1,))
        raise KeyError  # passes through profile(), which keeps its recording
    assert rows(prof)["identity", "worker1"].calls == 1
    assert all(now is then for now, then in zip(hooks(), before, strict=True))


def hook_names() -> list[str]:
    return [str(getattr(hook, "__qualname__", "hooked")) for hook in hooks()]


@workers(2)
def test_unfinished_and_asynchronous_calls(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with profiled() as prof:
        slow = rpc.rpc_async("worker1", wait_for_file, args=(str(done),))
        rpc.rpc_sync("worker1", pause_later, args=("worker0", torch.ones(1)))
        while not (tmp_path / "done.begun").exists():
            time.sleep(0.01)
    done.touch()
    slow.wait()
    found = rows(prof)
    unfinished = found["wait_for_file", "worker1"]
    assert unfinished.calls == 1 and unfinished.total_p50 is None, unfinished
    # Until its future is done.
    assert found["pause_later", "worker1"].execution_p50 >= PAUSE
    events = merged(prof, tmp_path)
    open_ones = [e for e in events if e.get("args", {}).get("outcome") == "had not ended"]
    assert len(open_ones) == 2, open_ones
    assert all("wait_for_file" in e["name"] for e in open_ones), open_ones
    # The slices of one track do not overlap.
    tracks: dict[Any, list[tuple[int, int]]] = {}
    for e in events:
        if e["ph"] == "X":
            tracks.setdefault((e["pid"], e["tid"]), []).append(span_ns(e))
    for spans in tracks.values():
        spans.sort()
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))


@workers(2)
def test_a_limit_keeps_the_first_and_counts_the_rest() -> None:
    with profiled(max_entries=10) as prof:
        for _ in range(25):
            rpc.rpc_sync("worker1", f.nothing)
    assert rows(prof)["nothing", "worker1"].calls == 10
    assert [prof.recordings[name].dropped for name in ("worker0", "worker1")] == [15, 15]


def profile_and_wait(entered: str, leave_when: str) -> None:
    with profiled():
        Path(entered).touch()
        while not Path(leave_when).exists():
            time.sleep(0.01)


def test_one_at_a_time(tmp_path: Path) -> None:
    entered, done = tmp_path / "entered", tmp_path / "done"
    with Group(2) as group:
        first = group[1].start(profile_and_wait, str(entered), str(done))
        while not entered.exists():
            time.sleep(0.01)
        message = group[0].run(error_of_profile)
        done.touch()
        first.result()
        assert "worker worker0 is being profiled already, by worker1" in message, message
        group[0].run(expect_it_works)


def error_of_profile(**options: Any) -> str:
    with pytest.raises((RuntimeError, ValueError)) as raised, profiled(**options):
        pass
    return str(raised.value)


def expect_it_works() -> None:
    with profiled() as prof:
        rpc.rpc_sync("worker1", f.nothing)
    assert rows(prof)["nothing", "worker1"].calls == 1 and not prof.missing


def set_torch_version(version: str) -> None:
    torch.__version__ = version  # type: ignore[assignment]


@workers(3)
def test_mistakes_are_named() -> None:
    message = error_of_profile(workers=["worker1", "nobody"])
    assert "'nobody'" in message and "worker0, worker1, worker2" in message
    for limit, must in {
        0: "be more than 0 s, got 0",
        1e300: r"be at most \d+ s, got 1e\+300",
    }.items():
        with pytest.raises(ValueError, match=f"limit must {must}"):
            profiled(limit=limit)
    with pytest.raises(TypeError, match="list of names, got the text 'worker1'"):
        profiled(workers="worker1")
    with profiled(workers=["worker1", "worker1"]) as prof:
        pass
    assert list(prof.recordings) == ["worker1"]
    version = torch.__version__
    rpc.rpc_sync("worker2", set_torch_version, args=("1.2.3",))
    message = error_of_profile()
    assert "1.2.3 on worker2" in message and "on worker0, worker1" in message
    with profiled(workers=["worker0", "worker1"]) as prof:
        rpc.rpc_sync("worker1", f.nothing)
        rpc.rpc_sync("worker2", f.nothing)  # worker2 does not record the call, but runs it
    assert rows(prof)["nothing", "worker1"].execution_p50 is not None
    assert rows(prof)["nothing", "worker2"].execution_p50 is None
    rpc.rpc_sync("worker2", set_torch_version, args=(str(version),))


@workers(2)
def test_a_recording_ends_by_itself_at_its_limit() -> None:
    with profiled(limit=0.2) as prof:
        end = time.monotonic() + 30
        while "hooked" in hook_names() + rpc.rpc_sync("worker1", hook_names):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert set(prof.missing) == {"worker0", "worker1"}
    assert "limit" in prof.missing["worker1"]
    expect_it_works()


@needs_ucx("does not notice a death")
def test_a_worker_that_dies_is_left_out(tmp_path: Path) -> None:
    entered, done = tmp_path / "entered", tmp_path / "done"
    with Group(3) as group:
        call = group[0].start(profile_a_death, str(entered), str(done))
        while not entered.exists():
            time.sleep(0.01)
        group[2].kill()
        done.touch()
        missing, recorded = call.result()
        assert missing == ["worker2"] and recorded == ["worker0", "worker1"]
        group.close(gently=False)


def profile_a_death(entered: str, died: str) -> tuple[list[str], list[str]]:
    with profiled() as prof:
        rpc.rpc_sync("worker1", f.nothing)
        Path(entered).touch()
        while not Path(died).exists():
            time.sleep(0.01)
    return list(prof.missing), sorted(prof.recordings)


def test_a_stopped_worker_is_left_out(tmp_path: Path) -> None:
    entered, stopped = tmp_path / "entered", tmp_path / "stopped"
    with Group(3) as group:
        call = group[0].start(profile_a_silent_one, str(entered), str(stopped))
        while not entered.exists():
            time.sleep(0.01)
        group[2].signal(signal.SIGSTOP)
        wait_until_stopped(group[2].child.pid)
        stopped.touch()
        try:
            missing, recorded = call.result()
        finally:
            group[2].signal(signal.SIGCONT)
        assert list(missing) == ["worker2"] and recorded == ["worker0", "worker1"]
        assert "did not answer for 6 s" in missing["worker2"], missing


def profile_a_silent_one(entered: str, stopped: str) -> tuple[dict[str, str], list[str]]:
    with profiled(timeout=6.0) as prof:  # the others have to answer within it
        rpc.rpc_sync("worker1", f.nothing)
        Path(entered).touch()
        while not Path(stopped).exists():
            time.sleep(0.01)
        begin = time.monotonic()
    assert time.monotonic() - begin < 40  # not the minutes that a call may take
    assert "missing: worker2" in prof.summary()
    return prof.missing, sorted(prof.recordings)


def profiled_names(kind: str, call: Any, times: int = 1) -> list[str]:
    """The names that one of torch's profilers records for calls."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler: Any = profiler_legacy.profile()  # type: ignore[no-untyped-call]
    if kind == "kineto":
        profiler = torch.profiler.profile(activities=activities)
    with profiler as prof:
        for _ in range(times):
            made = call()
            if kind == "legacy" and isinstance(made, rpc.PyRRef):
                made._get_profiling_future().wait()
    events = prof.events() if kind == "kineto" else prof.function_events
    # Without the callee's operators, whose names the legacy profiler prefixes with the call.
    names = [e.name for e in events or () if e.name.startswith("rpc_")]
    return sorted(name for name in names if "#remote_op" not in name)


@workers(2)
def test_torchs_profilers_record_calls_of_torchscript() -> None:
    tensor = torch.ones(2)
    args = (tensor, tensor)
    there = f"{torch._jit_internal._qualified_name(f.script_add)}(worker0 -> worker1)"
    in_cpp = f"rpc_async_jit#{there}"
    for call, name in {
        lambda: rpc.rpc_sync("worker1", f.script_add, args): "sync",
        lambda: rpc.rpc_async("worker1", f.script_add, args).wait(): "async",
        lambda: rpc.remote("worker1", f.script_add, args): "remote",
    }.items():
        # As upstream: Python code tells the legacy profiler, which knows RPC, of a call; the other
        # profilers record what C++ does.
        seen = profiled_names("legacy", call)
        assert seen == [f"rpc_{name}#{there}"], seen
        if name == "remote":
            assert profiled_names("kineto", call) == []
        elif on_ucx():
            assert profiled_names("kineto", call, times=2) == [in_cpp] * 2
    if not on_ucx():  # TENSORPIPE records only the first such call
        assert profiled_names("kineto", lambda: rpc.rpc_sync("worker1", f.script_add, args)) == [
            in_cpp
        ]


@workers(2)
def test_operators_and_picture(tmp_path: Path) -> None:
    with profiled(operators=True) as prof:
        rpc.rpc_sync("worker1", pause, args=(torch.ones(100),))
        thread = threading.Thread(target=torch.mm, args=(torch.ones(9, 9), torch.ones(9, 9)))
        thread.start()
        thread.join()
    events = merged(prof, tmp_path)
    pids = {e["args"]["name"].split()[0]: e["pid"] for e in events if e["name"] == "process_name"}
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    # The operators also come from threads other than the profiling one, here and at the callee.
    assert any(e["name"] == "aten::mm" and e["pid"] == pids["worker0"] for e in operators)
    (multiplied,) = [
        e for e in operators if e["name"] == "aten::mul" and e["pid"] == pids["worker1"]
    ]
    # The operator lies within the execution to which it belongs, on one time axis.
    (execution,) = [e for e in events if e.get("cat") == "rpc.execution" and "pause" in e["name"]]
    begin, end = execution["ts"], execution["ts"] + execution["dur"]
    assert begin + PAUSE * 1e6 / 2 < multiplied["ts"] < end + 10_000, (execution, multiplied)
    figure = prof.plot(tmp_path / "trace.png")
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["worker0", "calls"] and "serves" in labels and "operators" in labels
    assert (tmp_path / "trace.png").stat().st_size > 5000


SERVED = ["tests.process.functions", "tests.process.remote_functions"]
ALLOWED = ["tests.process.functions", "torch_rpc_ext.profiler.recorder"]


@needs_ucx("has no allow_list")
@workers(2, options={"allow_list": ALLOWED})
def test_with_an_allow_list() -> None:
    expect_it_works()


@needs_ucx("has no allow_list")
@workers(3, options=[{}, *[{"allow_list": SERVED}] * 2])
def test_workers_that_are_not_recorded_are_left_alone() -> None:
    rref = rpc.remote("worker1", f.Owned)
    with profiled(workers=["worker0"]) as prof:
        assert rpc.rpc_sync("worker1", f.identity, args=(1,)) == 1
        assert rpc.rpc_async("worker1", f.identity, args=(2,)).wait() == 2
        assert rpc.remote("worker2", f.identity, args=(3,)).to_here() == 3
        assert rref.rpc_sync().hello() == "hello"
        assert remote_functions.nap.sync("worker2", 0.0, 4) == 4
        # A call to oneself among the others is recorded at both ends.
        assert rpc.remote("worker0", f.identity, args=(5,)).to_here() == 5
    found = rows(prof)
    assert found["identity", "worker1"].calls == 2
    assert found["identity", "worker2"].calls == found["hello", "worker1"].calls == 1
    assert found["nap", "worker2"].calls == 1
    assert [e.function for e in prof.recordings["worker0"].executions] == [
        "tests.process.functions.identity",
    ]


@needs_ucx("has no allow_list")
@workers(2, options={"allow_list": ["tests.process.functions"]})
def test_an_allow_list_without_it_says_so() -> None:
    assert "torch_rpc_ext.profiler.recorder" in error_of_profile()


@contextlib.contextmanager
def busy_group() -> Iterator[Group]:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        yield group
        for worker in group:
            worker.run(leave)


@needs_ucx("is not what the commands join")
def test_trace_from_the_command_line(tmp_path: Path) -> None:
    out, plot = tmp_path / "trace.json", tmp_path / "trace.png"
    with busy_group() as group:
        done = tmp_path / "done"
        busy = group[0].start(call_without, "worker1", str(done))
        arguments = ["--init-method", group.init_method, "--seconds", "0.5", "--no-operators"]
        ended = command("trace", *arguments, "--json", "--out", str(out), "--plot", str(plot))
        assert ended.code == 0, ended
        answer = json.loads(ended.out)
        assert answer["seconds"] > 0.4 and not answer["missing"], answer
        (row,) = [row for row in answer["rows"] if row["function"].endswith("identity")]
        assert row["worker"] == "worker1" and row["calls"] > 0 and row["execution_p50"] > 0
        assert json.loads(out.read_text())["traceEvents"] and plot.stat().st_size > 5000
        done.touch()
        busy.result()
        first = group[1].start(profile_and_wait, str(tmp_path / "in"), str(tmp_path / "out"))
        while not (tmp_path / "in").exists():
            time.sleep(0.01)
        refused = command("trace", *arguments, "--out", str(out))
        assert refused.code == 1 and "profiled already, by worker1" in refused.out, refused
        (tmp_path / "out").touch()
        first.result()
        unknown = command("trace", *arguments, "nobody", "--out", str(out))
        assert unknown.code == 2 and "'nobody'" in unknown.out, unknown
    folder = command("trace", "--out", os.path.join(tmp_path, "none", "trace.json"))
    assert folder.code == 2 and "cannot be written" in folder.out, folder
