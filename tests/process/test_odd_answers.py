"""`top` and `ping` beside workers that answer with anything: those of another release, and those
that mean harm."""

from __future__ import annotations

import argparse
import io
import threading
from typing import Any

import pytest
from torch.distributed import rpc

from tests.process.group import Group, workers
from tests.process.test_dynamic import init_one_by_one, leave
from tests.support.backend import needs_ucx
from torch_rpc_ext import monitoring

_snapshot = monitoring.snapshot
_answer: Any = None


def answer_oddly(changes: dict[str, Any] | None, answer: Any = None) -> None:
    """Let monitoring.snapshot() return, or raise, something else here.

    ``changes`` is what to replace in the snapshot, ... for what to leave out; None for `answer` in
    place of the whole snapshot.
    """

    def odd() -> Any:
        if isinstance(answer, Exception):
            raise answer
        if changes is None:
            return answer
        return {name: v for name, v in {**_snapshot(), **changes}.items() if v is not ...}

    monitoring.snapshot = odd  # type: ignore[assignment]


ODD: dict[str, tuple[Any, ...]] = {
    "None": (None, None),
    "a text": (None, "alive"),
    "an exception": (None, ValueError("no such counter")),
    "a RuntimeError": (None, RuntimeError("no more memory")),
    "no peers": ({"peers": ...},),
    "peers of another form": ({"peers": [{"worker": "worker0"}]},),
    "a text for a number": ({"counters": {"agent.queued_requests": "many"}},),
    "no number": ({"counters": {"agent.queued_requests": float("nan")}},),
    "a number without an end": ({"pid": 10**5000},),
    "a number for a text": ({"host": 7},),
    "half a load": ({"waiting": {"worker0": (1,)}},),
    "texts for times": ({"time": "noon"},),
    "a histogram of another form": ({"histograms": {"agent.latency": ([], [1, 2], 3)}},),
}


@workers(2)
def test_a_worker_with_an_odd_answer_is_suspect() -> None:
    from torch_rpc_ext.cli import poller

    asker = poller.Poller(timeout=30)
    for odd, answer in ODD.items():
        assert [state.state for state in asker.poll()] == ["alive"] * 2, odd
        rpc.rpc_sync("worker1", answer_oddly, args=answer)
        for _ in range(2):
            _, state = asker.poll()
            assert state.state == "suspect" and state.why, (odd, state)
        rpc.rpc_sync("worker1", answer_oddly, args=({},))


GO_ON = threading.Event()


WAITS: list[Any] = []


def wait_to_go_on() -> None:
    GO_ON.wait()


def look_without_room() -> None:
    from torch_rpc_ext.cli import poller

    WAITS.append(rpc.rpc_async("worker1", wait_to_go_on))
    _, state = poller.Poller(timeout=0.5).poll()
    assert state.state == "suspect" and "max_calls_in_flight" in state.why, state


def go_on() -> None:
    GO_ON.set()


def wait_for_it() -> None:
    WAITS.pop().wait()


@needs_ucx("has no such option")
def test_a_worker_without_room_for_a_call_is_suspect() -> None:
    with Group(2, options={"max_calls_in_flight": 1}) as group:
        group[0].run(look_without_room)
        group[1].run(go_on)
        group[0].run(wait_for_it)


EVIL = "\x1b]0;title\x07\x1b[2J\x9b1m\r\n\u202e"
HOSTILE: dict[str, tuple[Any, ...]] = {
    "an exception": (None, ValueError(EVIL)),
    "texts": (
        {
            "host": EVIL,
            "lost": [EVIL, "x" * 1_000_000],
            "waiting": {EVIL: (1, 2)},
            "peers": [{"control": EVIL, "bulk": EVIL}],
        },
    ),
}


@workers(2)
def test_no_answer_writes_to_the_terminal_as_it_likes() -> None:
    from rich.console import Console

    from torch_rpc_ext.cli import poller, view

    for hostile, answer in HOSTILE.items():
        rpc.rpc_sync("worker1", answer_oddly, args=answer)
        screen = Console(file=io.StringIO(), width=300)
        screen.print(view.draw(poller.Poller(timeout=30).poll(), 300))
        shown = screen.file.getvalue()  # type: ignore[attr-defined]
        assert all(c.isprintable() for c in shown.replace("\n", "")), (hostile, shown)
        assert "\\x1b[2J" in shown and len(shown) < 10_000, (hostile, shown)
        rpc.rpc_sync("worker1", answer_oddly, args=({},))


class Profile:
    """A profile of a group in which a worker has recorded a function with such a name."""

    missing = ()

    def summary(self, width: int | None) -> str:
        return f"function  worker\n{EVIL}  worker1"


def test_ping_and_trace_print_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_rpc_ext.cli import ping, trace

    ping._show(
        [ping.Ping("worker1", error=EVIL), ping.Ping("worker2", None, 1, 2, 3, "tcp", "tcp", EVIL)]
    )
    trace._print(Profile(), argparse.Namespace(json=False, out="trace.json"))  # type: ignore[arg-type]
    captured = capsys.readouterr()
    for lines in (captured.out, captured.err):
        assert "\\x1b[2J" in lines and all(c.isprintable() for c in lines.replace("\n", ""))


def test_a_refusal_names_what_it_refuses_without_control_characters() -> None:
    from torch_rpc_ext._security.allow_list import AllowList

    refusal = str(AllowList.of([], "worker0").refusal(EVIL))
    assert "\\x1b[2J" in refusal and refusal.isprintable()


def call_worker0(calls: int) -> None:
    for _ in range(calls):
        rpc.rpc_sync("worker0", monitoring._nothing)


ASKER: list[Any] = []


def look() -> Any:
    """Look again, by the poller of this process; return the state of worker1."""
    from torch_rpc_ext.cli import poller

    if not ASKER:
        ASKER.append(poller.Poller(timeout=30))
    return next(state for state in ASKER[0].poll() if state.worker == "worker1")


@needs_ucx("counts no calls and no bytes")
def test_a_worker_that_counts_from_0_again_has_no_rates_yet() -> None:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        group[1].run(call_worker0, 100)
        group[0].run(look)
        group[1].run(call_worker0, 100)
        assert group[0].run(look).calls_per_s > 0
        group[1].run(leave)
        group[1].init(None).result()
        group[1].run(call_worker0, 10)
        state = group[0].run(look)
        assert state.state == "alive" and state.pid is not None
        assert (state.calls_per_s, state.sent_per_s, state.latency_ms) == (None, None, None)
        group[1].run(call_worker0, 10)
        assert group[0].run(look).calls_per_s > 0
        for worker in group:
            worker.run(leave)


def lack_a_function() -> None:
    del monitoring._take


@workers(2)
def test_ping_says_what_a_worker_of_another_release_lacks() -> None:
    from torch_rpc_ext.cli import ping

    rpc.rpc_sync("worker1", lack_a_function)
    (answer,) = ping.ping(calls=1, timeout=60)
    assert answer.error is not None and "_take" in answer.error, answer
