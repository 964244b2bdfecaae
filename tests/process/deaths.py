"""What tests of deaths and of lost connections share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Worker
from tests.support.backend import on_ucx

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


def check_alive(to: str) -> None:
    for i in range(20):
        assert rpc.rpc_sync(to, f.identity, args=(i,), timeout=30) == i


def check_alive_again(to: str) -> None:
    """As check_alive(), after the connection to the worker broke: a lost worker is connected to
    again after a pause."""
    from torch_rpc_ext.errors import PeerLostError

    deadline = time.monotonic() + 30
    while True:
        try:
            check_alive(to)
            return
        except PeerLostError:
            assert time.monotonic() < deadline, "it stays lost"
            time.sleep(0.1)


def named(name: str, text: str) -> bool:
    """Whether an error text names the worker that died; TENSORPIPE never does, so any text
    passes."""
    return name in text or not on_ucx()


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


def wait_for_file(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not been made"
        time.sleep(0.01)


_running: list[Any] = []


def occupy(until: Path) -> None:
    """Run a function in the only thread for requests until a file exists."""
    me = rpc.get_worker_info().name
    _running.append(rpc.rpc_async(me, wait_for_file, args=(until, 120.0), timeout=0))


def open_sockets() -> int:
    """The number of sockets of this process."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket")
    return count


def wait_until_stopped(pid: int) -> None:
    """Wait: until the signal has its effect, the process may still answer a call."""
    deadline = time.monotonic() + 30
    tasks = Path(f"/proc/{pid}/task")
    while any(runs(task) for task in tasks.iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.01)


def runs(task: Path) -> bool:
    try:
        return "T (stopped)" not in (task / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has just ended
        return False
