"""Attacks on the commands that join a group as a guest, by a worker of that group.

An attack has failed when the command of the attacker has not run in the process of the operator,
and the guest still does what it is there for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import service
from tests.process.group import Group
from tests.process.test_dynamic import init_one_by_one, leave, names
from tests.process.test_guest import end, run, running
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("is not what the commands join")


@pytest.fixture(scope="module")
def _group() -> Iterator[Group]:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        yield group
        for worker in group:
            worker.run(leave)


@pytest.fixture
def group(_group: Group) -> Group:
    _group.mark_used()
    return _group


@contextlib.contextmanager
def guest_of(group: Group, *arguments: str) -> Iterator[str]:
    """Run a command, and give the block the name of its guest; end the command by Ctrl-C."""
    with running(*arguments, "--init-method", group.init_method) as child:
        deadline = time.monotonic() + 40
        while not (guests := [name for name in group.run(names) if name.startswith("guest_")]):
            assert time.monotonic() < deadline and child.exitcode is None, child.output()
            time.sleep(0.05)
        yield guests[0]
        child.signal(signal.SIGINT)
        ended = end(child)
    assert ended.code in (0, 130) and "Traceback" not in ended.out, ended


def call_what_no_guest_offers(guest: str, path: str) -> None:
    from torch_rpc_ext import monitoring
    from torch_rpc_ext.errors import RefusedError

    command = (f"touch {path}",)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: rpc.rpc_sync(guest, os.system, args=command, timeout=20),
        lambda: rpc.remote(guest, os.system, args=command, timeout=20).to_here(),
        lambda: rpc.rpc_sync(guest, monitoring._take, args=(service.Evil(path),), timeout=20),
        lambda: rpc.rpc_sync(guest, torch.add, args=(torch.ones(1), 1), timeout=20),
    )
    for call in calls:
        with pytest.raises(RefusedError, match="allow_list"):
            call()


@pytest.mark.parametrize("command", ["top", "trace"])
def test_a_worker_runs_nothing_at_a_guest(group: Group, tmp_path: Path, command: str) -> None:
    arguments = {
        "top": ("--json",),
        "trace": ("--seconds", "100", "--no-operators", "--out", str(tmp_path / "trace.json")),
    }
    with guest_of(group, command, *arguments[command]) as guest:
        group.run(call_what_no_guest_offers, guest, str(tmp_path / "evil"))
    assert not (tmp_path / "evil").exists(), "the attack ran"


def send_too_much(guest: str) -> None:
    from torch_rpc_ext import monitoring
    from torch_rpc_ext.cli.guest import LARGEST_MESSAGE

    tensor = torch.empty(LARGEST_MESSAGE + 1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="takes at most"):
        rpc.rpc_sync(guest, monitoring._take, args=(tensor,), timeout=20)


def look_at_all() -> None:
    from torch_rpc_ext.cli import ping, poller
    from torch_rpc_ext.profiler import profile

    assert [state.state for state in poller.Poller(timeout=20).poll()] == ["alive"] * 3
    assert [answer.error for answer in ping.ping(calls=1, timeout=60)] == [None] * 2
    with profile(operators=False, timeout=60) as prof:
        pass
    assert len(prof.recordings) == 3 and not prof.missing


def test_a_guest_takes_no_large_message_and_can_be_looked_at(group: Group) -> None:
    with guest_of(group, "top", "--json") as guest:
        group.run(send_too_much, guest)
        group.run(look_at_all)


def answer_with(module: str, name: str, path: str) -> None:
    """Answer a function of the package by an object whose pickle runs a command; '' to stop."""
    import importlib

    owner = importlib.import_module(module)
    kept = f"_original_{name}"
    vars(owner).setdefault(kept, vars(owner)[name])
    setattr(owner, name, (lambda: service.Evil(path)) if path else vars(owner)[kept])


@pytest.mark.parametrize(
    ("command", "module", "name"),
    [
        ("top", "torch_rpc_ext.monitoring", "snapshot"),
        ("ping", "torch_rpc_ext.monitoring", "_nothing"),
        ("trace", "torch_rpc_ext.profiler.recorder", "describe"),
    ],
)
def test_an_answer_runs_nothing_at_a_guest(
    group: Group, tmp_path: Path, command: str, module: str, name: str
) -> None:
    arguments = {
        "top": ("--once", "--json"),
        "ping": ("--json", "--megabytes", "1"),
        "trace": ("--seconds", "0.1", "--out", str(tmp_path / "trace.json")),
    }
    group[1].run(answer_with, module, name, str(tmp_path / "evil"))
    try:
        ended = run(command, group, *arguments[command])
    finally:
        group[1].run(answer_with, module, name, "")
    assert not (tmp_path / "evil").exists(), "the attack ran"
    assert ended.code == 1 and "allow_list" in ended.out, ended


def fail_with(cls: type[Exception] | None) -> None:
    """Answer trace's question for the time by an error that colours the terminal; None to stop."""
    from torch_rpc_ext.profiler import recorder

    original = vars(recorder).setdefault("_original_now", recorder.now)

    def now() -> int:
        assert cls is not None
        raise cls("\x1b[31mno time")

    recorder.now = original if cls is None else now


@pytest.mark.parametrize("cls", [ValueError, TypeError, OSError, ImportError])
def test_trace_prints_an_error_without_control_characters(
    group: Group, tmp_path: Path, cls: type[Exception]
) -> None:
    group[1].run(fail_with, cls)
    try:
        out = str(tmp_path / "trace.json")
        ended = run("trace", group, "--no-operators", "--seconds", "0.1", "--out", out)
    finally:
        group[1].run(fail_with, None)
    said = f"trace: worker worker1 cannot be profiled: {cls.__name__}: \\x1b[31mno time"
    assert ended.code == 1 and said in ended.out and "\x1b" not in ended.out, ended
