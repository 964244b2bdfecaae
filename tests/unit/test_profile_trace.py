"""profiler/chrome.py: how entries are placed on tracks, and what torch.profiler's trace may be."""

from __future__ import annotations

from typing import Any

from torch_rpc_ext.profiler import chrome
from torch_rpc_ext.profiler.records import Call


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
