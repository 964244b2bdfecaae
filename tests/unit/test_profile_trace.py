"""profiler/chrome.py: how entries are placed on tracks, and what torch.profiler's trace may be."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from torch_rpc_ext.profiler import chrome
from torch_rpc_ext.profiler.clocks import Clock, Sample
from torch_rpc_ext.profiler.records import Call, Recording


class Time(int):
    """A time that counts how often times are compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Time.compared += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        Time.compared += 1
        return int(self) <= int(other)

    def __sub__(self, other: int) -> Time:
        return Time(int(self) - int(other))


def tracks(*times: tuple[int, int]) -> list[int]:
    """Return the track of each call, of which (begin, end) are given."""
    calls = [
        Call(id, 0, "async", "function", "worker1", begin, end, 0, "")
        for id, (begin, end) in enumerate(times)
    ]
    to_ours: Any = Time
    placed = chrome.spans(calls, to_ours, 0, 10_000_000)
    return [placed[call.id].track for call in calls]


def test_an_entry_gets_the_first_track_that_is_free() -> None:
    assert tracks((1, 9), (2, 4), (3, 5), (4, 7), (5, 6), (6, 8), (9, 9)) == [0, 1, 2, 1, 2, 2, 0]
    assert tracks((5, 6), (1, 5)) == [0, 0]
    assert tracks((1, 0), (2, 3), (3, 4)) == [0, 1, 1], "a call that has not ended"


def test_many_calls_in_flight_are_placed_soon() -> None:
    many = 2000
    Time.compared = 0
    assert tracks(*((n + 1, n + many + 1) for n in range(2 * many))) == [*range(many)] * 2
    assert Time.compared < 100 * many, f"{Time.compared} comparisons of times"


def operators(packed: bytes) -> list[chrome.Event]:
    recording = Recording("worker1", "host", 1, [], [], 0, 0, packed, [], [])
    return list(chrome.operator_events(recording, Clock(Sample(0, 0, 0), Sample(0, 0, 0)), 0))


def test_a_workers_operators_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"traceEvents": [{"ph": "X", "pid": 1, "ts": 2, "dur": 1}]}).encode()
    monkeypatch.setattr(chrome, "_MOST_OPERATOR_BYTES", 1 << 20)
    assert len(operators(zlib.compress(text))) == 1
    with pytest.raises(ValueError, match="operators of worker worker1 take more than 1 MiB"):
        operators(zlib.compress(text.ljust((1 << 20) + 1)))
    with pytest.raises(ValueError, match="operators of worker worker1"):
        operators(zlib.compress(text)[:-1])
    with pytest.raises(ValueError, match="operators of worker worker1"):
        operators(b"no zlib")
