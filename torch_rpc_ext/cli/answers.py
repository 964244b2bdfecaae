"""What a worker answers when ``top`` asks for its state.

The worker may run another release, or mean harm, so nothing of its answer is used before
Answer.of() has checked it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_rpc_ext._base.printable import printable

__all__ = ["Answer", "quantile"]

# Counters that only grow, of those that ``top`` shows.
_GROWING = ("agent.calls_sent", "agent.calls_served", "agent.bytes_sent", "agent.bytes_received")


@dataclass(frozen=True)
class Answer:
    """What monitoring.snapshot() has returned at another worker, as far as ``top`` shows it.

    Attributes:
        host: as in the snapshot, and so the following.
        pid: the worker's process.
        time: monotonic, s.
        transports: "control / bulk" of the connections, each pair once.
        counters: name -> value.
        histograms: name -> (upper bounds, counts); there is one count more than there are bounds.
        lost: names of workers.
        waiting: caller -> (number, bytes) of its requests that wait.
    """

    host: str
    pid: int
    time: float
    transports: tuple[str, ...]
    counters: dict[str, float]
    histograms: dict[str, tuple[list[float], list[float]]]
    lost: tuple[str, ...]
    waiting: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, answer: Any) -> Answer:
        """Check an answer.

        Raises:
            Exception: the answer is not what this release's monitoring.snapshot() returns.
        """
        return cls(
            host=_text(answer["host"]),
            pid=_int(answer["pid"]),
            time=_number(answer["time"]),
            transports=tuple(
                sorted({f"{_text(p['control'])} / {_text(p['bulk'])}" for p in answer["peers"]})
            ),
            counters={_text(name): _number(v) for name, v in answer["counters"].items()},
            histograms={
                _text(name): _histogram(bounds, counts)
                for name, (bounds, counts, _) in answer["histograms"].items()
            },
            lost=tuple(map(_text, answer["lost"])),
            waiting={
                _text(caller): (_int(requests), _int(size))
                for caller, (requests, size) in answer["waiting"].items()
            },
        )

    def continues(self, before: Answer) -> bool:
        """Return whether the worker has gone on counting since an earlier answer.

        A worker counts from 0 again in another process, and after rpc.shutdown() and init_rpc().
        """
        counts, earlier = self._counts(), before._counts()
        return (
            self.pid == before.pid
            and counts.keys() == earlier.keys()
            and all(count >= earlier[key] for key, count in counts.items())
        )

    def _counts(self) -> dict[tuple[str, int], float]:
        counts = {(name, 0): self.counters[name] for name in _GROWING if name in self.counters}
        for name, (_, buckets) in self.histograms.items():
            counts.update({(name, at): count for at, count in enumerate(buckets)})
        return counts


def _number(value: Any) -> float:
    # math.isfinite() raises for an int that no float can hold.
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"a {type(value).__name__} where a number belongs")
    return value


def _int(value: Any) -> int:
    return int(_number(value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text belongs")
    return printable(value)


def _histogram(bounds: Iterable[Any], counts: Iterable[Any]) -> tuple[list[float], list[float]]:
    checked = [_number(bound) for bound in bounds], [_number(count) for count in counts]
    if not 2 <= len(checked[0]) + 1 == len(checked[1]):
        raise ValueError("a histogram needs bounds, and one count more")
    return checked


def quantile(
    before: Sequence[float], now: Sequence[float], bounds: Sequence[float], share: float
) -> float:
    """Return a quantile of the values that have come to a histogram since an earlier look.

    Args:
        before: counts at the earlier look.
        now: counts; there is one more than there are bounds.
        bounds: upper ends of the buckets but the last, rising.
        share: which quantile, 0 to 1.

    Returns:
        The quantile, as if values were spread evenly within their bucket; in the unit of the
        bounds. NaN where no value has come.
    """
    counts = [new - old for new, old in zip(now, before, strict=True)]
    left = share * sum(counts)
    lower = 0.0
    for count, upper in zip(counts, [*bounds, 2 * bounds[-1]], strict=True):
        if count and left <= count:
            return lower + (upper - lower) * left / count
        left -= count
        lower = upper
    return float("nan")
