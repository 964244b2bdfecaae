"""The death of a worker is noticed at once, the errors name the worker, and other workers are not
disturbed."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import (
    QUICK,
    call_error,
    check_alive,
    check_alive_again,
    kill,
    named,
    open_sockets,
    peer_lost,
    wait_for_file,
    wait_until_serving,
    wait_until_stopped,
)
from tests.process.group import Group, shutdown
from tests.support.backend import needs_ucx, on_ucx
from tests.support.script import running


def call_errors_of_threads(to: str, count: int) -> list[tuple[str, float]]:
    """As call_error(), in ``count`` threads at once: only one of them leads
    (csrc/agent/answer_wait.h)."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call_error, [to] * count))


def error_of_call_to(to: str) -> str:
    """The text of the error of one call, which fails long before its time-out."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, f.identity, args=(1,), timeout=3 * QUICK)
    assert time.monotonic() - start < QUICK, raised.value
    return str(raised.value)


def test_a_running_call_fails_quickly_with_the_name() -> None:
    with Group(3) as group:
        call = group[0].start(call_error, "worker1")
        group[2].run(check_alive, "worker0")
        wait_until_serving(group[1])
        killed = kill(group[1])
        text, failed = call.result()
        assert failed - killed < QUICK and named("worker1", text), (text, failed - killed)
        group[0].run(check_alive, "worker2")
        group[2].run(check_alive, "worker0")


def test_the_calls_of_all_threads_fail_quickly() -> None:
    with Group(2) as group:
        calls = group[0].start(call_errors_of_threads, "worker1", 4)
        wait_until_serving(group[1], 4)
        killed = kill(group[1])
        for text, failed in calls.result():
            assert failed - killed < QUICK and named("worker1", text), (text, failed - killed)


def test_calls_to_a_dead_worker_fail_quickly() -> None:
    with Group(3) as group:
        group.run(check_alive, "worker1")
        group[1].kill()
        for _ in range(3):
            assert named("worker1", group.run(error_of_call_to, "worker1"))
        # The other worker had no connection to it before.
        assert named("worker1", group[2].run(error_of_call_to, "worker1"))
        group[2].run(check_alive, "worker0")


def suicide_error() -> str:
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync("worker1", f.kill_self, timeout=20)
    return str(raised.value)


def test_a_function_that_kills_its_worker() -> None:
    with Group(2) as group:
        group[1].killed = True
        start = time.monotonic()
        assert named("worker1", group.run(suicide_error))
        assert time.monotonic() - start < QUICK


_echoes = 0


def echo(tensor: torch.Tensor) -> torch.Tensor:
    global _echoes
    _echoes += 1
    return tensor


def echoes() -> int:
    return _echoes


def echo_large_tensors(to: str, count: int) -> None:
    """Each comes back as it was sent, and the sent one stays as it was."""
    sent = torch.arange(10_000_000, dtype=torch.float32)
    try:
        for _ in range(count):
            assert torch.equal(rpc.rpc_sync(to, echo, args=(sent,), timeout=60), sent)
    finally:
        assert torch.equal(sent, torch.arange(10_000_000, dtype=torch.float32))


def stream(to: str) -> str:
    """Send large tensors until the receiver dies."""
    with pytest.raises(RuntimeError) as raised:
        echo_large_tensors(to, 1_000_000)
    return str(raised.value)


@pytest.mark.parametrize("after", [0.0, 0.02, 0.05])
def test_killed_in_the_middle_of_bulk(after: float) -> None:
    with Group(3) as group:
        call = group[0].start(stream, "worker1")
        deadline = time.monotonic() + 60
        while group[1].run(echoes) < 3:
            assert not call.done(), call.result()
            assert time.monotonic() < deadline, "the tensors do not come"
        time.sleep(after)  # kill it in the middle of anything: it comes or goes
        group[1].kill()
        text = call.result()
        assert named("worker1", text) and ("died" in text or not on_ucx()), text
        group[0].run(echo_large_tensors, "worker2", 3)


@needs_ucx("the others wait for ever")
def test_graceful_shutdown_after_a_death_is_bounded() -> None:
    with Group(3) as group:
        group[1].kill()
        start = time.monotonic()
        calls = [group[rank].start(shutdown_error) for rank in (0, 2)]
        texts = [call.result(60) for call in calls]
        # Upstream waits once and this package waits once; QUICK is for a loaded machine.
        assert time.monotonic() - start < 2 * SHUTDOWN_TIMEOUT + QUICK, texts
        assert any("worker1" in text for text in texts), texts


SHUTDOWN_TIMEOUT = 4.0


def shutdown_error() -> str:
    try:
        rpc.shutdown(timeout=SHUTDOWN_TIMEOUT)
    except RuntimeError as error:
        return str(error)
    return ""


def lose_while_it_sleeps(began: str) -> None:
    start = rpc.rpc_async("worker1", f.begin_and_sleep, args=(began, 50.0))
    peer_lost(start.wait, "functions.begin_and_sleep")
    builtin = torch.ones(2)
    # Later calls get such an error too, of whatever kind they are.
    for call, word in (
        (lambda: rpc.rpc_sync("worker1", f.nothing), "functions.nothing"),
        (lambda: rpc.rpc_async("worker1", torch.add, args=(builtin, 1)).wait(), "aten::add"),
        (lambda: rpc.remote("worker1", f.nothing), "functions.nothing"),
        (lambda: rpc.remote("worker1", torch.add, args=(builtin, 1)), "aten::add"),
    ):
        assert peer_lost(call, word) < QUICK


@needs_ucx("its errors are RuntimeErrors without names")
def test_errors_are_typed_and_say_what_happened(tmp_path: Path) -> None:
    with Group(2) as group:
        call = group[0].start(lose_while_it_sleeps, str(tmp_path / "began"))
        wait_for_file(tmp_path / "began")
        group[1].kill()
        call.result()


def begin_to_connect() -> None:
    f.HELD["call"] = rpc.rpc_async("worker1", f.nothing)
    rpc.api._get_current_rpc_agent().get_debug_info()  # waits for what was posted


def lose_while_connecting() -> None:
    peer_lost(f.HELD.pop("call").wait, "functions.nothing")


@needs_ucx("its errors are RuntimeErrors without names")
def test_one_that_dies_before_it_answers_an_introduction() -> None:
    with Group(2) as group:
        group[1].signal(signal.SIGSTOP)
        wait_until_stopped(group[1].child.pid)
        group[0].run(begin_to_connect)
        group[1].kill()
        group[0].run(lose_while_connecting)


def state_of(pid: int) -> str:
    """The state of a process, as in ps: R, S, T, Z, ...; '' when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


ZOMBIE = """
    import sys, threading
    from torch.distributed import rpc
    from torch_rpc_ext import UcxRpcBackendOptions
    print("imported", flush=True)
    rpc.init_rpc("worker1", backend=rpc.BackendType.UCX, rank=1, world_size=2,
                 rpc_backend_options=UcxRpcBackendOptions(init_method=sys.argv[1]))
    threading.Event().wait()
"""


@needs_ucx("its errors are RuntimeErrors without names")
def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    """The worker is killed, and its parent, this process, does not wait for it."""
    store = f"file://{tmp_path / 'store'}"
    code = textwrap.dedent(ZOMBIE)
    with Group(1, init=False, init_method=store) as group:
        with running([sys.executable, "-c", code, store]) as script:
            script.wait_for("imported")  # which may take longer than init_rpc waits
            group[0].init(2).result()
            call = group[0].start(lose_while_it_sleeps, str(tmp_path / "began"))
            wait_for_file(tmp_path / "began")
            pid = script.process.pid
            os.kill(pid, signal.SIGKILL)
            call.result()
            assert state_of(pid) == "Z"
        group[0].run(leave_alone)


def leave_alone() -> None:
    rpc.shutdown(graceful=False)


def call_the_dead(times: int) -> None:
    for _ in range(times):
        peer_lost(lambda: rpc.rpc_sync("worker1", f.nothing, timeout=30))


@needs_ucx("its errors are RuntimeErrors without names")
def test_calls_to_a_dead_worker_open_nothing() -> None:
    with Group(2) as group:
        group.run(check_alive, "worker1")
        group[1].kill()
        group.run(call_the_dead, 1)
        before = group.run(open_sockets)
        group.run(call_the_dead, 200)
        assert group.run(open_sockets) < before + 10


def time_out() -> None:
    from torch_rpc_ext.errors import CallTimeoutError

    with pytest.raises(CallTimeoutError) as raised:
        rpc.rpc_sync("worker1", f.nothing, timeout=1.5)
    assert raised.value.worker == "worker1"


@needs_ucx("its errors are RuntimeErrors without names")
def test_a_stopped_worker_is_not_dead() -> None:
    with Group(2, options={"keepalive": 0.5}) as group:
        group.run(check_alive, "worker1")
        group[1].signal(signal.SIGSTOP)
        wait_until_stopped(group[1].child.pid)
        group.run(time_out)
        group[1].signal(signal.SIGCONT)
        group.run(check_alive, "worker1")


@needs_ucx("its errors are those of its sockets")
def test_calls_to_a_worker_that_has_left_fail_at_once() -> None:
    with Group(2) as group:
        group[0].run(check_alive, "worker1")
        group[1].run(shutdown, graceful=False)
        for _ in range(2):
            assert "the peer shut down" in group[0].run(error_of_call_to, "worker1")
        group[0].run(shutdown, graceful=False)


def meet_a_connection_that_broke(to: str) -> None:
    from torch_rpc_ext.errors import PeerLostError

    check_alive(to)
    # The fault makes the other end lose the connection when it answers a builtin.
    with pytest.raises(PeerLostError, match="worker1.*the connection broke at the other end"):
        rpc.rpc_sync(to, torch.add, args=(torch.ones(1), 1), timeout=30)
    check_alive_again(to)


@needs_ucx("upstream's fault injection cannot break one end")
@pytest.mark.parametrize("encryption", ["off", "on"])
@pytest.mark.parametrize("env", [{}, {"UCX_TLS": "tcp"}], ids=["default", "tcp"])
def test_a_connection_that_broke_at_one_end_only(env: dict[str, str], encryption: str) -> None:
    """UCX would let the other end go on sending to nobody, so the agent has to tell the other
    end."""
    faults: dict[str, Any] = {"messages_to_lose": ["SCRIPT_RET"], "num_fail_sends": 1}
    options = [{"encryption": encryption}, {"encryption": encryption, **faults}]
    with Group(2, env=env, options=options) as group:
        group[0].run(meet_a_connection_that_broke, "worker1")
