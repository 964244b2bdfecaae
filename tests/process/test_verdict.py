"""There is one verdict on a death: whatever notices it first, calls get the same error, and the
same memory is freed.

These tests stop the peer, then cut its TCP connections from outside, as UCX sees it when the kernel
is ending a process. Then they kill the peer, or do not.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import check_alive, wait_until_stopped
from tests.process.group import Group, Worker
from tests.process.test_docs_howto import forbid_direct_copies
from tests.support.backend import on_ucx
from tests.support.cut import cut_connections

pytestmark = pytest.mark.skipif(not on_ucx(), reason="upstream lends no memory and names no death")

DEBUG = {"TORCH_RPC_EXT_LOG": "debug"}
#: TCP connections can be cut. Over shared memory, UCX only checks once a second whether a peer is
#: there.
TCP = {"UCX_TLS": "tcp", **DEBUG}
ELEMENTS = 1_000_000
SEEN: list[float] = []


def keep(tensor: torch.Tensor) -> None:
    """Runs on worker1, which so keeps the memory that it was lent."""
    f.HELD.setdefault("kept", []).append(tensor)
    SEEN.append(float(tensor.double().mean()))


def seen() -> list[float]:
    return SEEN


def lend_and_wait(value: float) -> None:
    rpc.rpc_sync("worker1", keep, args=(torch.full((ELEMENTS,), value),))


def lend(value: float) -> None:
    f.HELD["future"] = rpc.rpc_async(
        "worker1", keep, args=(torch.full((ELEMENTS,), value),), timeout=60
    )


def error_of_the_call() -> tuple[str, str]:
    with pytest.raises(RuntimeError) as raised:
        f.HELD["future"].wait()
    return type(raised.value).__name__, str(raised.value)


def regions() -> int:
    """The number of blocks of shared memory in this process."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        count += target.startswith("/memfd:torch_rpc_ext")
    return count


def used_bytes() -> int:
    metrics: dict[str, Any] = rpc.api._get_current_rpc_agent().get_metrics()
    return int(metrics["agent.receive_cache_used_bytes"])


def wait_until_all_is_freed() -> None:
    deadline = time.monotonic() + 30
    while regions() != 0 or used_bytes() != 0:
        assert time.monotonic() < deadline, (regions(), used_bytes())
        time.sleep(0.02)


def lend_to_a_stopped_worker(group: Group) -> Worker:
    """Lend worker1 one block that it keeps; stop worker1, and lend one that it has not looked at.
    Return worker1."""
    group.run(check_alive, "worker1")
    group.run(lend_and_wait, 1.0)
    group[1].signal(signal.SIGSTOP)
    wait_until_stopped(group[1].child.pid)
    group.run(lend, 2.0)
    assert group.run(regions) == 2
    return group[1]


def cut_and_wait_until_noticed(group: Group) -> None:
    """Cut the connections, and wait until UCX, and not the pidfd, has reported the loss."""
    assert cut_connections(group[1].child.pid) > 0
    deadline = time.monotonic() + 30
    while "open -> doubted (path lost)" not in group[0].child.output():
        assert time.monotonic() < deadline, "UCX has not noticed it"
        time.sleep(0.01)


@pytest.mark.parametrize("first", ["pidfd", "UCX"])
def test_who_died_is_said_and_its_memory_is_freed(first: str) -> None:
    with Group(2, env=TCP if first == "UCX" else DEBUG) as group:
        worker = lend_to_a_stopped_worker(group)
        pid = worker.child.pid
        if first == "UCX":
            cut_and_wait_until_noticed(group)
        worker.kill()
        kind, text = group.run(error_of_the_call)
        assert kind == "PeerLostError" and f"process {pid} died" in text, text
        group.run(wait_until_all_is_freed)
        assert "-> dead (process ended)" in group[0].child.output()


def test_a_connection_that_breaks_while_the_process_lives() -> None:
    """The peer may still read the memory that it was lent: so this memory is neither freed nor
    reused before its process ends."""
    with Group(2, env=TCP) as group:
        worker = lend_to_a_stopped_worker(group)
        cut_and_wait_until_noticed(group)
        kind, text = group.run(error_of_the_call)
        assert kind == "PeerLostError" and "broke" in text and "died" not in text, text
        # The block that worker1 keeps has been unmapped here; the block at which it may still look
        # has not.
        assert group.run(regions) == 1 and group.run(used_bytes) > 0
        worker.signal(signal.SIGCONT)
        group.run(call_until_it_answers)
        assert set(worker.run(seen)) <= {1.0, 2.0, 3.0}
        worker.kill()
        group.run(wait_until_all_is_freed)


def call_until_it_answers() -> None:
    from torch_rpc_ext.errors import PeerLostError

    deadline = time.monotonic() + 30
    while True:
        try:
            return lend_and_wait(3.0)
        except PeerLostError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def path_to_worker1() -> dict[str, str]:
    info: dict[str, str] = rpc.api._get_current_rpc_agent().get_debug_info()
    return {key.rpartition(".")[2]: info[key] for key in info if ".worker1." in key}


def test_one_host_where_nobody_may_read_the_others_memory() -> None:
    """A socket proves that both are on one host. Bulk travels through UCX, deaths are noticed, and
    what does not leave the host is not encrypted."""
    options = {"encryption": "between_hosts"}
    with Group(2, options=options, env=DEBUG, init=False) as group:
        group.run_all(forbid_direct_copies)
        group.init_all()
        group.run(lend_and_wait, 1.0)
        path = group.run(path_to_worker1)
        assert path["bulk"].startswith("ucx") and "encrypted" not in path["control"], path
        assert group[1].run(seen) == [1.0]
        pid = group[1].child.pid
        group[1].signal(signal.SIGSTOP)
        wait_until_stopped(pid)
        group.run(lend, 2.0)
        group[1].kill()
        kind, text = group.run(error_of_the_call)
        assert kind == "PeerLostError" and f"process {pid} died" in text, text


def begin_a_call(to: str) -> None:
    f.HELD["future"] = rpc.rpc_async(to, f.nothing)


def test_a_worker_dies_while_its_first_message_waits_at_a_peer() -> None:
    """UCX cannot answer the first message of a peer whose shared memory is gone. A worker must not
    end for that."""
    with Group(4) as group:
        for dying in (3, 2):
            group[1].signal(signal.SIGSTOP)
            wait_until_stopped(group[1].child.pid)
            group[dying].run(begin_a_call, "worker1")
            group[dying].kill()
            group[1].signal(signal.SIGCONT)
            group[0].run(check_alive, "worker1")
            group[1].run(check_alive, "worker0")
        assert group[1].exitcode is None
