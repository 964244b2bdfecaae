"""Waiting for ports in TIME_WAIT: what starts when, and what is not waited for."""

from __future__ import annotations

import pytest

from torch_rpc_ext import errors
from torch_rpc_ext._group import ports
from torch_rpc_ext._group.stores import Deadline


class Starts:
    """A start that finds too few ports so many times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise errors.OverloadedError("no port")
        return "started"


def leaving(monkeypatch: pytest.MonkeyPatch, looks: list[set[int]]) -> None:
    """Let the ports in TIME_WAIT be those of `looks`, one after the other; the last stays."""
    monkeypatch.setattr(
        ports, "in_time_wait", lambda _: looks.pop(0) if len(looks) > 1 else looks[0]
    )


def test_starts_again_when_a_port_has_left_time_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving(monkeypatch, [{1, 2}, {1, 2}, {2}, {2}, {2}, set()])
    start = Starts(2)
    assert ports.when_free(start, (1, 2), 60) == "started"
    assert start.calls == 3


def test_ports_that_others_have_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving(monkeypatch, [set()])
    start = Starts(1)
    with pytest.raises(errors.OverloadedError):
        ports.when_free(start, (1, 2), 60)
    assert start.calls == 1


def test_gives_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving(monkeypatch, [{1}])
    patience = Deadline(0.2)
    with pytest.raises(errors.OverloadedError):
        ports.when_free(Starts(1000), (1, 2), 0.2)
    assert patience.remaining() == 0


def test_other_errors_pass_at_once() -> None:
    def start() -> None:
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        ports.when_free(start, (0, 0), 60)
