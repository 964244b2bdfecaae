"""Runs what docs/profiling.md and docs/cli.md show."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group, workers
from tests.process.test_dynamic import leave
from tests.process.test_guest import command, unused_port, wait_longer  # noqa: F401  a fixture
from tests.support import script
from tests.support.backend import ROOT, needs_ucx
from tests.support.pages import programs
from tests.support.ports import free_port


def blocks(page: str, language: str) -> list[str]:
    found: list[str] = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert found
    return found


def train_step() -> None:
    rpc.rpc_sync("worker1", f.identity, args=(1,))


# The profiler and matplotlib take seconds of a core when they are first used.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", ["profiling.md", "cli.md"])
@workers(2, timeout=300)
def test_python(page: str, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    for block in blocks(page, "python"):
        if block.startswith("# watched.py"):  # has a test of its own
            continue
        exec(compile(block, page, "exec"), {"train_step": train_step})
    if page == "profiling.md":
        assert json.loads(Path("trace.json").read_text())["traceEvents"]
        assert Path("trace.png").exists()


@pytest.mark.timeout(400)  # five commands, with tensors of 64 MB
@needs_ucx("is not what the commands join")
def test_commands(
    tmp_path: Path,
    unused_port: int,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [line for block in blocks("cli.md", "sh") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("python")]
    assert {words[3] for words in commands} == {"ping", "top", "trace"}
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(unused_port))
    url = f"tcp://localhost:{unused_port}"
    with Group(2, dynamic=True, init_method=url) as group:
        for words in commands:
            assert words[:3] == ["python", "-m", "torch_rpc_ext"]
            ended = command(*in_folder(words[3:], tmp_path))
            expected = "2 workers" if words[3] == "trace" else "worker1"
            assert ended.code == 0 and expected in ended.out, ended
        for worker in reversed(group.workers):
            worker.run(leave)


def in_folder(words: Sequence[str], folder: Path) -> list[str]:
    return [str(folder / word) if word.endswith(".json") else word for word in words]


# Not the page's 6000 calls: on a busy machine `ping` may start when they are over.
@pytest.mark.parametrize("calls", [3, 1_000_000])
@pytest.mark.timeout(400)
@needs_ucx("is not what the commands join")
def test_a_group_to_watch(tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    [program] = [program for program in programs("docs/cli.md") if program.name == "watched.py"]
    path = tmp_path / program.name
    assert program.code.count("6000") == 1
    path.write_text(program.code.replace("6000", str(calls)))
    port = str(free_port())
    words = shlex.split(program.command.replace("29500", port))
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words[1:-1], str(path)]
    with script.running(torchrun) as group:
        if calls == 3:
            ended = group.end(350)
            assert ended.code == 0, ended
            return
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", port)
        deadline = time.monotonic() + 200
        try:
            while (found := command("ping", "worker1")).code:
                assert time.monotonic() < deadline, found
                time.sleep(0.2)
        finally:
            group.process.terminate()  # torchrun ends its workers, which are in other sessions
            group.end()
        assert "worker1" in found.out, found


@pytest.mark.timeout(400)  # as test_python
@needs_ucx("is not what the example runs on")
def test_the_training_step(tmp_path: Path) -> None:
    with Group(3, init=False) as group:
        calls = [worker.start(run_example, worker.rank, str(tmp_path)) for worker in group]
        for call in calls:
            call.result(300)
    trace = json.loads((tmp_path / "trace.json").read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    executions = [e["name"] for e in events if e.get("cat") == "rpc.execution"]
    assert executions.count("RRef.forward <- trainer") == 2
    backward = [name for name in executions if name.startswith("dist_autograd.backward")]
    steps = [name for name in executions if "_optimizer_step" in name]
    assert (len(backward), len(steps)) == (3, 2), executions
    named = {e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    assert named == {"trainer", "stage1", "stage2"}
    # The picture on the page shows the same three workers.
    assert (ROOT / "docs" / "profiling.png").stat().st_size > 10_000


def run_example(rank: int, folder: str) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    import profiling_example

    wait_longer()
    profiling_example.run(rank, f"{folder}/store", folder)
