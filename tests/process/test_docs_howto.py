"""The how-to pages, the start page and the README: their programs run and print what the pages
show, and the claims that no other test covers hold."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import platform
import re
import shlex
import socket
import struct
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group, workers
from tests.process.test_hostile import listening_ports
from tests.support import netns, script
from tests.support.backend import ROOT, needs_ucx
from tests.support.pages import Program, blocks, fragments, programs
from tests.support.ports import free_port, free_ports

pytestmark = needs_ucx("is not what the pages are about")
HOWTO = "docs/howto/torchrun_slurm.md"
PAGES = [
    "README.md",
    "docs/index.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "howto").glob("*.md")),
]
PROGRAMS = [program for page in PAGES for program in programs(page) if program.command]
TORCHRUN = re.compile(r"torchrun --nproc-per-node (\d+) ")
PYTHON = re.compile(r"((?:\w+=\w+ )*)python \S+$")


def of_kind(kind: re.Pattern[str]) -> list[Any]:
    return [
        pytest.param(program, id=program.name)
        for program in PROGRAMS
        if kind.match(program.command)
    ]


def execute(code: str) -> str:
    """Run the program in this process as its main module, which remote functions are found in."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, vars(main))
    return printed.getvalue()


@pytest.mark.parametrize("program", of_kind(TORCHRUN))
def test_program_of_several_ranks(program: Program) -> None:
    match = TORCHRUN.match(program.command)
    assert match is not None
    size = int(match[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    env = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    with Group(size, init=False, env=env) as group:
        printed = group.run_all(execute, program.code)
    assert "".join(printed) == program.prints


@pytest.mark.parametrize("program", of_kind(PYTHON))
def test_program(program: Program, tmp_path: Path) -> None:
    match = PYTHON.match(program.command)
    assert match is not None
    if not match[1]:  # runs in a process that has already imported torch
        with Group(1, init=False) as group:
            assert group.run(execute, program.code) == program.prints
        return
    env = dict(word.split("=") for word in shlex.split(match[1]))
    ended = script.run([sys.executable, str(program.write(tmp_path))], env)
    assert ended.code == 0 and ended.out == program.prints, ended


def test_every_program_is_run_by_a_test() -> None:
    left = [
        p.name for p in PROGRAMS if not TORCHRUN.match(p.command) and not PYTHON.match(p.command)
    ]
    assert left == ["both.py"]  # tested below
    assert len(PROGRAMS) > 6


@pytest.mark.parametrize("page", PAGES)
def test_fragments(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_rpc_ext

    assert callable(torch_rpc_ext.take_over)
    # A takeover would stay in force in this process, and in those that other tests start.
    monkeypatch.setattr(torch_rpc_ext, "take_over", lambda: None)
    names = {
        "UcxRpcBackendOptions": torch_rpc_ext.UcxRpcBackendOptions,
        "torch_rpc_ext": torch_rpc_ext,
    }
    for code in fragments(page):
        exec(compile(code, page, "exec"), dict(names))


# ---- torchrun, SLURM -------------------------------------------------------


@pytest.mark.timeout(400)  # four interpreters import torch
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    [program] = [program for program in programs(HOWTO) if program.name == "both.py"]
    path = program.write(tmp_path)
    line = program.command.replace("host0", "127.0.0.1").replace("29500", str(free_port()))
    words = shlex.split(line)
    assert words[3:5] == ["--node-rank", "0"]
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:-1], str(path)]
    other = [*command[:6], "1", *command[7:]]
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    with script.running(command, env) as first, script.running(other, env) as second:
        ends = [one.end(350) for one in (first, second)]
    assert [ended.code for ended in ends] == [0, 0], ends
    assert [ended.out for ended in ends] == [program.prints, ""], ends


SRUN = """#!/bin/sh
# Stands in for SLURM's: starts each task here.
rank=0
while [ $rank -lt $SLURM_NTASKS ]; do
    SLURM_PROCID=$rank "$@" &
    pids="$pids $!"
    rank=$((rank + 1))
done
for pid in $pids; do wait $pid || exit 1; done
"""
SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames node[1-2]" ] && echo 127.0.0.1 && echo 127.0.0.2
"""


def test_slurm(tmp_path: Path) -> None:
    [program] = [program for program in programs(HOWTO) if program.name == "slurm_train.py"]
    program.write(tmp_path)
    [batch] = [text for language, text in blocks(HOWTO) if "#SBATCH" in text]
    python = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": python}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(batch)
    env = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    ended = script.run(["sh", "-c", f"cd '{tmp_path}' && sh job.sh"], env)
    assert ended.code == 0 and ended.out == program.prints, ended


# ---- Ports -----------------------------------------------------------------

BY_TCP = {"use_shared_memory": False, "use_cma": False}


def echo_bulk() -> None:
    sent = torch.ones(1_000_000)
    assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(sent,)), sent)


def test_ports_are_within_the_range() -> None:
    low, high = free_ports(6)
    with Group(2, options={"port_range": (low, high), **BY_TCP}) as group:
        group.run(echo_bulk)
        for worker in group:
            ports = [port for _, port in listening_ports(worker.child.pid)]
            assert len(ports) == 3 and all(low <= port <= high for port in ports), ports


@pytest.mark.parametrize("free", [0, 1])
def test_a_used_up_range_is_named(free: int) -> None:
    """One free port is too few for one worker: at the first large tensor it would need another."""
    low, high = free_ports(3)
    with contextlib.ExitStack() as kept:
        for port in range(low + free, high + 1):
            kept.enter_context(socket.create_server(("", port)))
        with (
            pytest.raises(RuntimeError, match=f"ports {low} to {high}.* are free"),
            Group(1, options={"port_range": (low, high)}),
        ):
            pass


def test_a_range_that_other_workers_use_up_is_named() -> None:
    low, high = free_ports(3)
    with (
        pytest.raises(RuntimeError, match=f"ports {low} to {high}.* are free"),
        Group(2, options={"port_range": (low, high)}),
    ):
        pass


def test_the_free_ports_of_a_range_are_found() -> None:
    low, high = free_ports(32)
    with contextlib.ExitStack() as kept:
        for port in range(low, high + 1):
            if port not in (low + 3, high - 2):
                kept.enter_context(socket.create_server(("", port)))
        with Group(1, options={"port_range": (low, high)}) as group:
            ports = {port for _, port in listening_ports(group[0].child.pid)}
    assert ports == {low + 3, high - 2}


def left_in_time_wait(port: int) -> None:
    """Leave the port as a worker leaves one that ends while it has a connection there."""
    with (
        socket.create_server(("", port)) as listener,
        socket.create_connection(("127.0.0.1", port)) as peer,
        listener.accept()[0] as accepted,
    ):
        accepted.close()  # who closes first has the port in TIME_WAIT
        peer.recv(1)


def test_ports_of_ended_workers_are_waited_for() -> None:
    low, high = free_ports(2)
    left_in_time_wait(high)
    with Group(1, init=False) as group:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=f"ports {low} to {high}.* are free"):
            group[0].init(1, port_range=(low, high), init_timeout=2).result()
        assert time.monotonic() - start >= 2
        assert "1 of them are in TIME_WAIT: waiting up to 2 s for them" in group.output()


# ---- Containers ------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[netns.Host]:
    try:
        with netns.two_hosts() as (one, _):
            yield one
    except netns.NotPossible as reason:
        pytest.skip(str(reason))


def test_a_small_dev_shm(host: netns.Host) -> None:
    host.run("mount", "-o", "remount,size=1m", "/dev/shm")
    with Group(2, hosts=[host, host], init_method=f"tcp://{host.ipv4}:29512") as group:
        group.run(echo_bulk)
        assert "sysv" in group.run(peer, "worker1")["control"]


def peer(name: str) -> dict[str, str]:
    import torch_rpc_ext

    [found] = [p for p in torch_rpc_ext.info()["agent"]["peers"] if p["worker"] == name]
    return dict(found)


PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}


def forbid_direct_copies() -> None:
    """Make process_vm_readv() fail with EPERM in this thread and its future threads, as a
    container's seccomp filter does."""
    load_number, jump_if_equal, end = 0x20, 0x15, 0x06
    allow, eperm = 0x7FFF0000, 0x00050001
    steps = [
        (load_number, 0, 0, 0),
        (jump_if_equal, 0, 1, PROCESS_VM_READV[platform.machine()]),
        (end, 0, 0, eperm),
        (end, 0, 0, allow),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    kept = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0


def test_direct_copies_are_forbidden() -> None:
    with Group(2, init=False) as group:
        group.run_all(forbid_direct_copies)
        group.init_all()
        group.run(echo_bulk)
        found = group.run(peer, "worker1")
        assert found["control"].startswith("posix") and found["bulk"] == "ucx: posix (memory)"
        assert "no permission to read the peer's memory" in found["why"], found


# ---- Tuning ----------------------------------------------------------------


def call_everybody() -> None:
    names = [f"worker{rank}" for rank in range(24)]
    calls = [rpc.rpc_async(name, f.name_here) for name in names]
    assert [call.wait() for call in calls] == names


def test_24_workers_call_each_other() -> None:
    with Group(24) as group:
        group.run_all(call_everybody)


@workers(2, options={"max_message_bytes": 1_000_000})
def test_a_message_that_is_too_large() -> None:
    with pytest.raises(RuntimeError, match="max_message_bytes"):
        rpc.rpc_sync("worker1", f.identity, args=(torch.ones(1_000_000),))
    assert rpc.rpc_sync("worker1", f.identity, args=(1,)) == 1


def many_ones(count: int) -> torch.Tensor:
    return torch.ones(count)


@workers(2, options=[{"max_message_bytes": 1_000_000}, {}])
def test_an_answer_that_is_too_large() -> None:
    refusal = 'worker "worker1" could not send its result: .* bytes.*max_message_bytes'
    for function, args in ((many_ones, (1_000_000,)), (bytes, (2_000_000,))):
        with pytest.raises(RuntimeError, match=refusal):
            rpc.rpc_sync("worker1", function, args=args, timeout=0)
    assert rpc.rpc_sync("worker1", f.identity, args=(1,)) == 1


@workers(2, options={"max_message_bytes": 100})
def test_small_messages_are_never_too_large() -> None:
    assert rpc.rpc_sync("worker1", f.identity, args=("a" * 1000,), timeout=0) == "a" * 1000
