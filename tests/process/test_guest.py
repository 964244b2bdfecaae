"""`ping` and `top`: these commands join a running dynamic group as a guest, look at it, and leave
it as it was."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group, workers
from tests.process.test_busy_members import wait_for_names
from tests.process.test_dynamic import init_one_by_one, leave, names
from tests.support.backend import needs_ucx
from tests.support.child import Child
from tests.support.ports import free_port

pytestmark = needs_ucx("is not what the commands join")
COMMAND = [sys.executable, "-m", "torch_rpc_ext"]
MEMBERS = ["worker0", "worker1"]
PATIENCE = 150.0  # s, for a command's start in a new interpreter and its end, on a busy machine
ANSWER = 60.0  # s, for a worker's answer on a busy machine; without one the worker is suspect
# Options of the commands for such a machine. Of an option that comes twice, the later one counts.
JOIN = ["--join-timeout", str(ANSWER)]
PATIENT = {"ping": [*JOIN, "--timeout", str(ANSWER)], "top": JOIN, "trace": JOIN}


@pytest.fixture(scope="module")
def _group() -> Iterator[Group]:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        yield group
        for worker in group:
            worker.run(leave)


@pytest.fixture
def group(_group: Group) -> Iterator[Group]:
    """Two workers of a dynamic group. After the test no guest may be left."""
    _group.mark_used()
    yield _group
    _group.run_all(wait_for_names, *MEMBERS)  # a busy worker hears later that a guest has left


@dataclass
class Ended:
    """The exit code of a command, and all its output."""

    code: int | None
    out: str


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Child]:
    """Run a command in a forked process, which starts faster than one that has to import torch."""
    child = Child(enter, (arguments,), name=f"command {arguments[0]}")
    child.start()
    try:
        yield child
    finally:
        child.close()


def enter(arguments: Sequence[str]) -> None:
    from torch_rpc_ext.__main__ import main

    wait_longer()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name, *others = arguments
    sys.exit(main([name, *PATIENT[name], *others]))


def wait_longer() -> None:
    """Let this process wait longer for the answers that `top` and the profiler of `trace` wait for:
    the commands have no option for it."""
    from torch_rpc_ext import profiler
    from torch_rpc_ext.cli import poller
    from torch_rpc_ext.profiler import clocks

    clocks._TIMEOUT = ANSWER
    poller.Poller = functools.partial(poller.Poller, timeout=ANSWER)  # type: ignore[assignment,misc]
    profiler.profile = functools.partial(profiler.profile, timeout=ANSWER)  # type: ignore[assignment,misc]


def end(child: Child) -> Ended:
    child.process.join(PATIENCE)
    return Ended(child.exitcode, child.log.read_text())


def command(*arguments: str) -> Ended:
    with running(*arguments) as child:
        ended = end(child)
    assert "Traceback" not in ended.out, ended.out
    return ended


def run(name: str, group: Group, *arguments: str) -> Ended:
    return command(name, "--init-method", group.init_method, *arguments)


def wait_for_output(child: Child) -> None:
    deadline = time.monotonic() + PATIENCE
    while not child.log.stat().st_size:
        assert time.monotonic() < deadline and child.exitcode is None, child.output()
        time.sleep(0.05)


def test_ping_measures_all_workers(group: Group) -> None:
    ended = run("ping", group, "--json", "--count", "10", "--megabytes", "2")
    assert ended.code == 0, ended
    answers = json.loads(ended.out)
    assert [answer["worker"] for answer in answers] == MEMBERS
    for answer in answers:
        assert 0 < answer["latency_p50_us"] <= answer["latency_p99_us"] < ANSWER * 1e6, answer
        assert answer["bandwidth_gb_s"] > 0 and answer["control"] and answer["bulk"], answer


def test_ping_for_people(group: Group) -> None:
    ended = run("ping", group, "worker1", "--count", "3", "--megabytes", "1")
    assert ended.code == 0, ended
    assert ended.out.startswith("worker1 ") and "worker0" not in ended.out, ended
    assert "us" in ended.out and "GB/s" in ended.out and "bulk over" in ended.out, ended


def test_ping_names_a_worker_that_is_not_there(group: Group) -> None:
    ended = run("ping", group, "worker1", "nobody")
    assert ended.code == 2, ended
    assert "'nobody'" in ended.out and "worker0, worker1" in ended.out, ended


def call_without(to: str, path: str) -> None:
    """Call without a pause until the file exists."""
    while not os.path.exists(path):
        rpc.rpc_sync(to, f.identity, args=(1,))


def look_at_calls(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `top` says of worker0, which calls, and of worker1, which serves, between two
    looks with a call in between."""
    # On a busy machine the first interval may pass without a call.
    for interval in ("1", "5", "25"):
        ended = run("top", group, "--once", "--json", "--interval", interval)
        assert ended.code == 0, ended
        caller, callee = json.loads(ended.out)["workers"]
        sent = [caller[key] for key in ("calls_per_s", "sent_per_s", "latency_ms")]
        served = [callee[key] for key in ("served_per_s", "received_per_s", "queue_p99_ms")]
        if all(sent) and all(served):
            return caller, callee
    raise AssertionError(f"no call was counted: {ended}")


@pytest.mark.timeout(400)
def test_top_counts_calls(group: Group, tmp_path: Path) -> None:
    busy = group[0].start(call_without, "worker1", str(tmp_path / "done"))
    try:
        caller, callee = look_at_calls(group)
    finally:
        (tmp_path / "done").touch()
        busy.result()
    assert (caller["worker"], callee["worker"]) == ("worker0", "worker1")
    assert caller["state"] == callee["state"] == "alive"
    assert caller["calls_per_s"] > 0 and callee["served_per_s"] > 0, (caller, callee)
    assert caller["sent_per_s"] > 0 and callee["received_per_s"] > 0, (caller, callee)
    # A histogram is right within a factor of 2, and a call may take ANSWER seconds.
    most = 2 * ANSWER * 1e3
    assert 0 < caller["latency_ms"] <= caller["latency_p99_ms"] < most, caller
    assert 0 <= callee["queue_p99_ms"] < most, callee
    assert caller["queued"] == 0 and caller["transports"], caller


def test_a_guest_that_was_killed_is_swept_out(group: Group) -> None:
    with running("top", "--json", "--init-method", group.init_method) as top:
        wait_for_output(top)
        assert len(group[1].run(names)) == 3
        top.terminate()
        top.process.join(ANSWER)
    assert run("ping", group, "worker1", "--count", "1", "--megabytes", "1").code == 0
    # The fixture `group` checks that no guest is left.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_properly(group: Group, number: signal.Signals) -> None:
    with running("top", "--json", "--init-method", group.init_method) as top:
        wait_for_output(top)
        top.signal(number)
        ended = end(top)
    assert ended.code == (0 if number == signal.SIGINT else 128 + number), ended
    assert "Traceback" not in ended.out, ended


class Terminal:
    """Runs a command in a pseudo-terminal, and keeps what a person would see there."""

    def __init__(self, argv: list[str], env: Mapping[str, str] | None = None) -> None:
        size = (24, 80)
        environment = {**os.environ, **(env or {}), "TERM": "xterm-256color"}
        self.process = pexpect.spawn(
            argv[0], argv[1:], dimensions=size, env=environment, timeout=PATIENCE
        )
        self.output = b""
        self._screen = pyte.Screen(size[1], size[0])
        self._stream = pyte.ByteStream(self._screen)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display)

    def wait_for(self, *words: str, without: str = "", seconds: float = 60) -> str:
        """Wait until the screen shows all the words, in this order, and not `without`; return it.

        The output arrives in pieces, so the returned screen may show half of a picture: a test must
        not look there for anything but these words.
        """
        end = time.monotonic() + seconds
        in_order = re.compile(".*".join(map(re.escape, words)), re.DOTALL)
        while not in_order.search(self.text()) or (without and without in self.text()):
            assert time.monotonic() < end, f"no {words}, or {without!r}, in\n{self.text()}"
            with contextlib.suppress(pexpect.TIMEOUT):
                self._feed(self.process.read_nonblocking(10_000, timeout=0.2))
        return self.text()

    def _feed(self, output: bytes) -> None:
        self.output += output
        self._stream.feed(output)

    def end(self) -> int:
        """Wait for the end and return the exit code. The rest of the output goes to the screen."""
        self._feed(self.process.read())
        self.process.wait()
        return int(self.process.exitstatus)


@contextlib.contextmanager
def live_top(group: Group, *arguments: str) -> Iterator[Terminal]:
    options = [*JOIN, "--init-method", group.init_method, "--interval", "0.3", *arguments]
    terminal = Terminal([*COMMAND, "top", *options])
    try:
        terminal.wait_for("alive", seconds=PATIENCE)
        yield terminal
    finally:
        terminal.process.close(force=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "ctrl-c"])
def test_top_in_a_terminal(group: Group, key: str) -> None:
    with live_top(group) as terminal:
        shown = terminal.wait_for("2 alive", "worker0", "worker1", "control / bulk over")
        for title in ("calls/s", "served/s", "sent", "received", "latency", "queued"):
            assert title in shown, shown
        assert "…" not in shown, shown
        terminal.process.send(key)
        assert terminal.end() == 0, terminal.text()
        # The terminal is back on its former screen, with the cursor.
        assert terminal.output.rindex(b"\x1b[?1049l") > terminal.output.rindex(b"\x1b[?1049h")
        assert terminal.output.rindex(b"\x1b[?25h") > terminal.output.rindex(b"\x1b[?25l")
        assert b"Traceback" not in terminal.output


@pytest.mark.timeout(400)
def test_keys_of_top(group: Group, tmp_path: Path) -> None:
    busy = group[1].start(call_without, "worker0", str(tmp_path / "done"))
    try:
        press_keys(group)
    finally:
        (tmp_path / "done").touch()
        busy.result()


def press_keys(group: Group) -> None:
    with live_top(group) as terminal:
        terminal.wait_for("?: help", "worker0", "worker1")
        terminal.process.send("?")
        terminal.wait_for("s  sorts", "requests that wait for a thread now", without="worker0")
        with pytest.raises(AssertionError):  # later updates do not scroll it away
            terminal.wait_for("2 alive", seconds=1)
        terminal.process.send("x")
        terminal.wait_for("2 alive", "worker0")
        terminal.process.send("s")
        terminal.wait_for("by calls/s", "worker1", "worker0")  # worker1 makes the calls
        terminal.process.send("q")
        assert terminal.end() == 0


@pytest.mark.timeout(400)
def test_trace_folds_its_table_to_the_terminal(group: Group, tmp_path: Path) -> None:
    busy = group[1].start(call_without, "worker0", str(tmp_path / "done"))
    arguments = ["--seconds", "0.3", "--no-operators", "--out", str(tmp_path / "trace.json")]
    terminal = Terminal([*COMMAND, "trace", *JOIN, "--init-method", group.init_method, *arguments])
    try:
        assert terminal.end() == 0, terminal.text()
    finally:
        terminal.process.close(force=True)
        (tmp_path / "done").touch()
        busy.result()
    lines = terminal.output.decode().splitlines()
    tables = [line for line in lines if line.startswith("function")]
    assert len(tables) > 1 and all(len(line) <= 80 for line in tables), lines


def test_the_columns_sort_what_has_no_figure_last() -> None:
    from torch_rpc_ext.cli import columns
    from torch_rpc_ext.cli.poller import WorkerState

    states = [
        WorkerState(name, "alive", queued=queued)
        for name, queued in (("a", None), ("b", 1), ("c", 2))
    ]
    assert [s.worker for s in columns.in_order(states, "queued")] == ["c", "b", "a"]
    assert columns.in_order(states, "") == states


@pytest.mark.timeout(400)
def test_top_shows_suspects_and_dead() -> None:
    with Group(3, dynamic=True, init=False) as group:
        init_one_by_one(group)
        group[0].run(f.nested, 2, 3)
        with live_top(group) as terminal:
            terminal.wait_for("3 alive")
            group[1].signal(signal.SIGSTOP)
            terminal.wait_for("1 suspect", "worker1 is suspect")
            group[1].signal(signal.SIGCONT)
            group[2].kill()
            terminal.wait_for("2 alive", "1 dead", "worker2 is dead")
            terminal.process.send("q")
            assert terminal.end() == 0
        ended = run("top", group, "--once")
        assert ended.code == 1 and "worker2 is dead" in ended.out, ended
        for worker in group.workers[:2]:
            worker.run(leave)


def test_a_static_group_cannot_be_joined() -> None:
    with Group(2) as group:
        ended = run("top", group, "--once")
        assert ended.code == 3, ended
        assert "is static" in ended.out and "From inside" in ended.out, ended
        group.run(look_from_inside)


def look_from_inside() -> None:
    from torch_rpc_ext.cli import ping, poller

    (answer,) = ping.ping(calls=3, tensor_bytes=1000, timeout=ANSWER)
    assert answer.worker == "worker1" and answer.error is None
    assert [state.state for state in poller.Poller(timeout=ANSWER).poll()] == ["alive", "alive"]


def test_env_finds_the_group(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"tcp://127.0.0.1:{unused_port}"
    with Group(1, dynamic=True, init_method=url) as group:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.delenv("MASTER_PORT", raising=False)
        argv = ["ping", "--count", "1", "--megabytes", "1"]
        missing = command(*argv)
        assert missing.code == 2 and "MASTER_PORT must be set" in missing.out, missing
        for port in ("abc", "-1", "65536"):
            monkeypatch.setenv("MASTER_PORT", port)
            wrong = command(*argv)
            said = f"MASTER_PORT must be a port, from 1 to 65535, got '{port}'"
            assert wrong.code == 2 and said in wrong.out, wrong
        monkeypatch.setenv("MASTER_PORT", str(unused_port))
        ended = command(*argv)
        assert ended.code == 0 and "worker0" in ended.out, ended
        group[0].run(leave)


@pytest.fixture
def unused_port() -> int:
    return free_port()


def test_where_there_is_no_group(tmp_path: Any, unused_port: int) -> None:
    (tmp_path / "empty").touch()
    for url, code, words in [
        (f"file://{tmp_path}/none", 3, "no such file"),
        (f"file://{tmp_path}/empty", 3, "no RPC group on UCX"),
        (f"tcp://127.0.0.1:{unused_port}", 3, f"no store answers at 127.0.0.1:{unused_port}"),
        ("http://host", 2, "'http://host'"),
    ]:
        ended = command("ping", "--init-method", url, "--join-timeout", "0.5")
        assert ended.code == code and words in ended.out, ended


@pytest.mark.parametrize("name", ["ping", "top"])
def test_help_shows_an_example(name: str) -> None:
    ended = command(name, "--help")
    assert ended.code == 0 and f"python -m torch_rpc_ext {name}" in ended.out, ended
    assert "examples:" in ended.out and "exit status:" in ended.out, ended


def test_mistakes_are_sentences() -> None:
    for arguments, words in [
        (["top"], "needs a terminal"),
        (["ping", "--count", "0"], "at least 1"),
        (["ping", "--megabytes", "-1"], "more than 0"),
    ]:
        ended = command(*arguments)
        assert ended.code == 2 and words in ended.out, ended


def test_quantiles_of_a_histogram() -> None:
    from torch_rpc_ext.cli.answers import quantile

    bounds = [10, 20, 40]
    assert quantile([5, 0, 0, 0], [5, 4, 0, 0], bounds, 0.5) == 15  # only what is new counts
    assert quantile([0] * 4, [1, 0, 1, 0], bounds, 0.99) == pytest.approx(39.6)
    assert quantile([0] * 4, [0, 0, 0, 2], bounds, 1.0) == 80  # as if bounds went on doubling
    assert math.isnan(quantile([3, 0, 0, 0], [3, 0, 0, 0], bounds, 0.5))


@workers(2)
def test_ping_from_inside_names_what_is_wrong() -> None:
    from torch_rpc_ext.cli import ping

    with pytest.raises(ValueError, match="'nobody'.*worker0, worker1"):
        ping.ping(["nobody"])
    with pytest.raises(ValueError, match="calls must be positive, got 0"):
        ping.ping(calls=0)
    with pytest.raises(ValueError, match="tensor_bytes must be 0 or more bytes, got -1"):
        ping.ping(tensor_bytes=-1)


@workers(2, options=[{}, {"allow_list": ["torch_rpc_ext.monitoring"]}])
def test_a_worker_with_an_allow_list_answers() -> None:
    check_allow_list("alive", None)


@workers(2, options=[{}, {"allow_list": []}])
def test_a_worker_that_allows_nothing_says_so() -> None:
    check_allow_list("refuses", "torch_rpc_ext.monitoring")


def check_allow_list(state: str, error: str | None) -> None:
    from torch_rpc_ext.cli import ping, poller

    (answer,) = ping.ping(calls=2, tensor_bytes=1000, timeout=ANSWER)
    assert answer.error is None if error is None else error in str(answer.error)
    assert [worker.state for worker in poller.Poller(timeout=ANSWER).poll()] == ["alive", state]
