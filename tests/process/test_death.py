"""The death of a worker is noticed at once, the errors name the worker, and other workers are not
disturbed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc
from torch.distributed.rpc import RRef

from tests.process import functions as f
from tests.process.group import Group, Worker, shutdown
from tests.support.backend import needs_ucx, on_ucx
from tests.support.script import running

QUICK = 15.0  # s, on a loaded machine; without the death the calls would take 20 s or 50 s


def call_error(to: str) -> tuple[str, float]:
    """Make a long call to a worker that will die; return the text of its error, and when it came
    (s)."""
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, f.sleep, args=(50.0,))
    return str(raised.value), time.monotonic()


def served() -> int:
    """The number of calls that this worker is running."""
    metrics: dict[str, Any] = rpc.api._get_current_rpc_agent().get_metrics()
    return int(metrics["agent.server_active_calls"])


def wait_until_serving(worker: Worker, count: int = 1) -> None:
    deadline = time.monotonic() + 30
    while on_ucx() and worker.run(served) < count:
        assert time.monotonic() < deadline, "the call has not arrived"
        time.sleep(0.01)
    if not on_ucx():
        time.sleep(0.5)  # TENSORPIPE has no such metric


def kill(worker: Worker) -> float:
    """Kill the worker; return the time of that (s)."""
    moment = time.monotonic()
    worker.kill()
    return moment


def call_errors_of_threads(to: str, count: int) -> list[tuple[str, float]]:
    """As call_error(), in ``count`` threads at once: only one of them leads
    (csrc/agent/answer_wait.h)."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call_error, [to] * count))


def error_of_call_to(to: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, f.identity, args=(1,), timeout=10)
    return str(raised.value)


def check_alive(to: str) -> None:
    for i in range(20):
        assert rpc.rpc_sync(to, f.identity, args=(i,), timeout=10) == i


def named(name: str, text: str) -> bool:
    """Whether an error text names the worker that died; TENSORPIPE never does, so any text
    passes."""
    return name in text or not on_ucx()


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
        start = time.monotonic()
        for _ in range(3):
            assert named("worker1", group.run(error_of_call_to, "worker1"))
        assert time.monotonic() - start < 2 * QUICK
        assert named(
            "worker1", group[2].run(error_of_call_to, "worker1")
        )  # had no connection to it before
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


def stream(to: str, count: int) -> str:
    """Send large tensors until the receiver dies."""
    tensor = torch.ones(10_000_000)
    with pytest.raises(RuntimeError) as raised:
        for _ in range(count):
            rpc.rpc_sync(to, f.identity, args=(tensor,), timeout=20)
    return str(raised.value)


@pytest.mark.parametrize("after", [0.0, 0.2, 0.5])
def test_killed_in_the_middle_of_bulk(after: float) -> None:
    with Group(3) as group:
        group.run(check_alive, "worker1")
        call = group[0].start(stream, "worker1", 10_000)
        time.sleep(after)  # kill it in the middle of anything
        group[1].kill()
        text = call.result()
        assert named("worker1", text) and ("died" in text or not on_ucx()), text
        group[0].run(check_alive, "worker2")


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


def peer_lost(call: Callable[[], Any], *words: str) -> float:
    """Check that the error has its type, and says which worker was called, for what, and what
    happened. Return the seconds that the call took."""
    from torch_rpc_ext.errors import PeerLostError

    start = time.monotonic()
    with pytest.raises(PeerLostError) as raised:
        call()
    assert raised.value.worker == "worker1", repr(raised.value)
    for word in ("worker1", "died", *words):
        assert word in str(raised.value), str(raised.value)
    return time.monotonic() - start


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


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, "the call has not arrived"
        time.sleep(0.01)


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
    rpc.init_rpc("worker1", backend=rpc.BackendType.UCX, rank=1, world_size=2,
                 rpc_backend_options=UcxRpcBackendOptions(init_method=sys.argv[1]))
    print("ready", flush=True)
    threading.Event().wait()
"""


@needs_ucx("its errors are RuntimeErrors without names")
def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    """The worker is killed, and its parent, this process, does not wait for it."""
    store = f"file://{tmp_path / 'store'}"
    code = textwrap.dedent(ZOMBIE)
    with Group(1, init=False, init_method=store) as group:
        with running([sys.executable, "-c", code, store]) as script:
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


def use_lost_rrefs() -> None:
    owned, tensor = f.HELD["owned"], f.HELD["tensor"]
    for call in (
        owned.to_here,
        tensor.to_here,
        lambda: owned.rpc_sync().hello(),
        lambda: owned.rpc_async().hello().wait(),
        lambda: owned.remote().hello(),
    ):
        assert peer_lost(call) < QUICK
    f.HELD.clear()


@needs_ucx("its errors are RuntimeErrors without names")
def test_rrefs_of_a_dead_owner_raise_at_once() -> None:
    with Group(3) as group:
        group.run(f.hold_rrefs)
        group[1].kill()
        group.run(use_lost_rrefs)
        group[2].run(check_alive, "worker0")


def fetch(rref: Any) -> Any:
    return rref.to_here()


@torch.jit.script
def fetch_in_script(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here()


def pass_on_lost_rref() -> None:
    tensor = f.HELD["tensor"]
    for call in (
        lambda: rpc.rpc_sync("worker2", fetch, args=(tensor,)),
        lambda: rpc.remote("worker2", fetch, args=(tensor,)).to_here(),
    ):
        assert peer_lost(call) < QUICK
    with pytest.raises(RuntimeError, match='on worker "worker1" failed .*died'):
        rpc.rpc_sync("worker2", fetch_in_script, args=(tensor,))
    f.HELD.clear()


@needs_ucx("does not begin, as the owner never confirms that the RRef has one user more")
def test_a_function_begins_with_an_rref_of_a_dead_owner() -> None:
    with Group(3) as group:
        group.run(f.hold_rrefs)
        group[2].run(check_alive, "worker1")
        group[1].kill()
        group.run(pass_on_lost_rref)
        assert group[2].run(pending_users) == 0
        group[2].run(check_alive, "worker0")


def pass_on_rref_of_an_unknown_dead_owner() -> None:
    from torch_rpc_ext.errors import PeerLostError

    with pytest.raises(PeerLostError) as raised:
        rpc.rpc_sync("worker2", fetch, args=(f.HELD["tensor"],))
    assert raised.value.worker == "worker1", repr(raised.value)
    f.HELD.clear()


@pytest.mark.slow  # 13 s: worker2 tries to reach the owner as long as torch would
@needs_ucx("does not begin, as the owner never confirms that the RRef has one user more")
def test_a_function_begins_with_an_rref_of_a_dead_owner_that_was_never_called() -> None:
    with Group(3) as group:
        group.run(f.hold_rrefs)
        group[1].kill()
        group.run(pass_on_rref_of_an_unknown_dead_owner)
        assert group[2].run(pending_users) == 0
        group[2].run(check_alive, "worker0")


def pending_users() -> int:
    return int(rpc._get_debug_info()["num_pending_users"])


def contexts() -> int:
    return int(autograd._get_debug_info()["num_autograd_contexts"])


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def begin_pass() -> None:
    """Begin a forward pass over all other workers, and never end it."""
    autograd._new_context()
    tensor = torch.ones(2, requires_grad=True)
    for worker in ("worker0", "worker2"):
        tensor = rpc.rpc_sync(worker, double, args=(tensor,))


def wait_for_contexts(count: int) -> None:
    end = time.monotonic() + 10
    while contexts() != count:
        assert time.monotonic() < end, f"{contexts()} autograd contexts instead of {count}"
        time.sleep(0.01)


@needs_ucx("keeps them (pytorch issue 26379)")
def test_autograd_contexts_of_a_dead_worker_are_released() -> None:
    with Group(3) as group:
        group[1].run(begin_pass)
        group[0].run(begin_own)
        assert group[0].run(contexts) == 2 and group[2].run(contexts) == 2
        group[1].kill()
        for rank in (0, 2):
            group[rank].run(wait_for_contexts, 1)


def owned_values() -> int:
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


def hold_values_of_worker0() -> None:
    f.HELD["theirs"] = [rpc.remote("worker0", f.identity, args=(i,)) for i in range(5)]
    f.HELD["tensors"] = [rpc.remote("worker0", torch.neg, args=(torch.ones(3),)) for _ in range(3)]
    for rref in f.HELD["theirs"] + f.HELD["tensors"]:
        rref.to_here()
    rpc.rpc_sync("worker2", take_over_rref, args=(f.HELD["theirs"][4],))


def take_over_rref(rref: Any) -> None:
    f.HELD["passed on"] = rref


def use_passed_on() -> int:
    return int(f.HELD["passed on"].to_here())


@needs_ucx("keeps them")
def test_values_that_a_dead_worker_held_are_released() -> None:
    with Group(3) as group:
        group[1].run(hold_values_of_worker0)
        assert group[0].run(owned_values) == 8
        group[1].kill()
        deadline = time.monotonic() + 10
        while group[0].run(owned_values) != 1:
            assert time.monotonic() < deadline, group[0].run(owned_values)
            time.sleep(0.05)
        assert group[2].run(use_passed_on) == 4  # it was passed on, and a live worker holds it


def begin_own() -> None:
    """Begin a forward pass that does not involve worker1: its context must stay."""
    autograd._new_context()
    rpc.rpc_sync("worker2", double, args=(torch.ones(2, requires_grad=True),))


def create_rrefs_until_it_dies() -> None:
    from torch_rpc_ext.errors import PeerLostError

    with pytest.raises(PeerLostError):
        while True:
            for _ in range(20):
                rpc.remote("worker1", f.sleep, args=(0.05,))
            rpc.remote("worker1", f.nothing).to_here()


@needs_ucx("its errors are RuntimeErrors without names")
def test_killed_while_it_creates_rrefs() -> None:
    """The callers survive."""
    with Group(3, dynamic=True) as group:
        calls = [group[rank].start(create_rrefs_until_it_dies) for rank in (0, 2)]
        time.sleep(0.5)
        group[1].kill()
        for call in calls:
            call.result(30)
        group[0].run(check_alive, "worker2")
        group.close(gently=False)


def create_rrefs_too_late(to: str) -> None:
    rrefs = [rpc.remote(to, f.sleep, args=(0.5,), timeout=0.1) for _ in range(3)]
    for rref in rrefs:
        with pytest.raises(RuntimeError, match="has not answered"):
            rref._get_future().wait()
        with pytest.raises(RuntimeError, match="timed out"):
            rref.to_here(timeout=10)
    right = rpc.remote(to, f.identity, args=(1,))
    assert right.to_here() == 1


def create_rrefs_late_and_use_them_at_once(count: int) -> None:
    """Whoever gets the error uses the RRef before anything else can happen."""
    wrong: list[str] = []
    # On a single core, a woken thread may run before the thread that woke it goes on.
    core = {min(os.sched_getaffinity(0))}
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), core)

    def create() -> None:
        for _ in range(count):
            rref = rpc.remote("worker0", f.sleep, args=(0.05,), timeout=0.002)
            try:
                rref._get_future().wait()
            except RuntimeError:
                try:
                    rref.to_here()
                    wrong.append("has a value")
                except RuntimeError as error:
                    if "timed out" not in str(error):
                        wrong.append(str(error))

    threads = [threading.Thread(target=create, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        if thread.is_alive():
            wrong.append("to_here() waits for ever")
    assert not wrong, wrong


@needs_ucx("the error may be there before the RRef knows of it")
def test_an_rref_of_ones_own_whose_creation_timed_out_is_used_at_once() -> None:
    with Group(1) as group:
        group[0].run(create_rrefs_late_and_use_them_at_once, 100)
        group.close(gently=False)


@needs_ucx("marks the first one only, for each of them (static handlers of RRef::handleError)")
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_each_rref_whose_creation_timed_out_says_so(to: str) -> None:
    with Group(2) as group:
        group[0].run(create_rrefs_too_late, to)


def lose_an_rref() -> None:
    rref = rpc.remote("worker1", f.kill_self)
    with pytest.raises(RuntimeError):
        rref.to_here()


@needs_ucx("an RRef that was never confirmed is waited for")
def test_leaving_after_an_rref_failed_is_quick() -> None:
    with Group(2, dynamic=True) as group:
        group[1].killed = True
        group[0].run(lose_an_rref)
        start = time.monotonic()
        group[0].run(rpc.shutdown)
        assert time.monotonic() - start < 60  # torch waits for 100 s


def open_sockets() -> int:
    """The number of sockets of this process."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket")
    return count


def call_the_dead(times: int) -> None:
    for _ in range(times):
        peer_lost(lambda: rpc.rpc_sync("worker1", f.nothing, timeout=10))


@needs_ucx("its errors are RuntimeErrors without names")
def test_calls_to_a_dead_worker_open_nothing() -> None:
    with Group(2) as group:
        group.run(check_alive, "worker1")
        group[1].kill()
        group.run(call_the_dead, 1)
        before = group.run(open_sockets)
        group.run(call_the_dead, 200)
        assert group.run(open_sockets) < before + 10


def wait_until_stopped(pid: int) -> None:
    """Wait: until the signal has its effect, the process may still answer a call."""
    deadline = time.monotonic() + 10
    tasks = Path(f"/proc/{pid}/task")
    while any(runs(task) for task in tasks.iterdir()):
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.01)


def runs(task: Path) -> bool:
    try:
        return "T (stopped)" not in (task / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has just ended
        return False


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
    deadline = time.monotonic() + 30
    while True:  # a lost worker is connected to again after a pause
        try:
            check_alive(to)
            return
        except PeerLostError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


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
