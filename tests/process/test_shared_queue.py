"""A worker is killed while it writes into the shared memory of another worker: the other worker
goes on.

In UCX, all senders of a host share one queue of the receiver: a sender that dies between taking a
slot and marking it as full stops the queue for all senders. Kills during a flood of calls sometimes
cause that; these tests take a slot on purpose.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import rpc

import torch_rpc_ext
from tests.process import functions as f
from tests.process.deaths import QUICK
from tests.process.group import Group, Worker
from tests.support.backend import needs_ucx

#: Sizes of UCX's queue; see csrc/transport/ucx/abandoned_slots.cpp.
BYTES = 9 * 4096
WAKE = 1 << 63

pytestmark = needs_ucx("has no such queue")


def own_queue() -> Path:
    """The path of the file behind this worker's queue, by which a file without a name can be
    opened."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"(\w+)-(\w+) rw-s .*/ucx_shm_posix_", line)
        if found and int(found[2], 16) - int(found[1], 16) == BYTES:
            path = Path(f"/proc/{os.getpid()}/map_files/{found[1]}-{found[2]}")
            with path.open("rb") as file:
                if struct.unpack_from("i", file.read(192), 136)[0] == os.getpid():
                    return path
    raise LookupError("none of the mappings of this worker looks like a queue")


def control_path(to: str) -> str:
    """What UCX carries the calls to a worker over."""
    rpc.rpc_sync(to, f.nothing)
    (peer,) = torch_rpc_ext.info()["agent"]["peers"]
    return str(peer["control"])


@pytest.fixture(scope="module", autouse=True)
def _shared_memory() -> None:
    with Group(2) as group:
        path = group.run(control_path, "worker1")
        if "posix" not in path:
            pytest.skip(f"the workers have no queue in shared memory, but {path}")


def take_slots(count: int = 1) -> None:
    """Take ``count`` slots, as a sender does that then dies. 0: imitate a sender that died before
    it woke this worker."""
    with own_queue().open("r+b") as file, mmap.mmap(file.fileno(), 0) as queue:
        head = struct.unpack_from("Q", queue)[0]
        struct.pack_into("Q", queue, 0, (head & ~WAKE) + count)


def name_of_queue() -> str:
    return str(own_queue())


def ask(to: str) -> float:
    """Make a call, which would time out if the queue had stopped; return the seconds that the call
    took."""
    start = time.monotonic()
    assert rpc.rpc_sync(to, f.identity, args=(1,), timeout=60) == 1
    return time.monotonic() - start


def ask_quickly(to: str) -> None:
    """A queue is held up for a second at most; QUICK is for a loaded machine."""
    assert (seconds := ask(to)) < QUICK, f"held up for {seconds:.1f} s"


def wait_for_output(worker: Worker, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in worker.child.output():
        assert time.monotonic() < deadline, worker.child.output()
        time.sleep(0.05)


def flood(to: str) -> None:
    tensor = torch.ones(16)
    while True:
        torch.futures.wait_all([rpc.rpc_async(to, torch.add, args=(tensor, 1)) for _ in range(50)])


@pytest.mark.parametrize("count", [1, 3])
def test_slots_that_dead_senders_took(count: int) -> None:
    with Group(3) as group:
        group.run(ask_quickly, "worker1")
        for _ in range(2):
            group[1].run(take_slots, count)
            group.run(ask_quickly, "worker1")
            group[1].run(ask_quickly, "worker2")
        assert "died while it was writing" in group.output()


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("count", [0, 1])
def test_it_dies_before_it_wakes_the_receiver(count: int, connected: bool) -> None:
    with Group(2) as group:
        if connected:
            group.run(ask_quickly, "worker1")
            time.sleep(0.1)
        group[1].run(take_slots, count)
        group.run(ask_quickly, "worker1")


def test_it_was_the_only_other_worker() -> None:
    with Group(2, dynamic=True) as group:
        for _ in range(3):
            group[1].run(ask_quickly, "worker0")
            group[0].run(take_slots)
            group[1].kill()
            group.start_again(1).run(ask_quickly, "worker0")


SENDER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as queue:
    print(flush=True)
    while True:
        pass
"""


def wait_until_it_computes(pid: int) -> None:
    """Wait until SENDER has left its last system call: stopped within it, it would not be writing.

    Until it has computed for some ticks, it may have lost its core when its output was read.
    """

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11])  # in user mode

    until, deadline = ticks() + 3, time.monotonic() + 60
    while ticks() < until:
        assert time.monotonic() < deadline, "SENDER got no core"
        time.sleep(0.01)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """As container engines pause a container; the kernel then says that the process sleeps."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    root = next((Path(at) for _, at, kind, *_ in mounts if kind == "cgroup2"), None)
    if root is None:
        pytest.skip("there are no cgroups of version 2")
    group = root / f"torch_rpc_ext_{pid}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    try:
        (group / "cgroup.freeze").write_text("1")
        deadline = time.monotonic() + 10
        while "frozen 1" not in (group / "cgroup.events").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield
    finally:
        (root / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@pytest.mark.parametrize("stop", [stopped, frozen])
def test_the_slot_of_a_process_that_is_stopped_stays_its_own(
    stop: Callable[[int], AbstractContextManager[None]],
) -> None:
    with Group(2) as group:
        group.run(ask_quickly, "worker1")
        queue = group[1].run(name_of_queue)
        sender = subprocess.Popen([sys.executable, "-c", SENDER, queue], stdout=subprocess.PIPE)
        try:
            assert sender.stdout is not None
            sender.stdout.readline()
            wait_until_it_computes(sender.pid)
            with stop(sender.pid):
                group[1].run(take_slots)
                call = group[0].start(ask, "worker1")
                wait_for_output(group[1], f"process {sender.pid}, which is stopped")
                time.sleep(3)  # some more looks at the slot
                assert not call.done()
            assert call.result() > 3
        finally:
            sender.kill()
            sender.wait()


def test_killed_again_and_again_in_a_flood() -> None:
    with Group(3, dynamic=True) as group:
        for _ in range(10):
            group[2].start(flood, "worker0")
            time.sleep(random.uniform(0, 0.05))
            group[2].kill()
            group[1].run(ask_quickly, "worker0")
            group.start_again(2)
