"""The columns of ``top``: what they show and mean, and by which ones the workers can be sorted."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_rpc_ext.cli.poller import WorkerState

__all__ = ["COLUMNS", "ORDERS", "Column", "in_order", "meanings"]

_WIDTH = 78


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: the header.
        cell: returns the text for a worker.
        needed: priority: a narrow terminal leaves out the columns with the lowest.
        meaning: explanation for the user.
        rank: returns the number by which workers are sorted, the largest first; None where workers
            cannot be sorted by this column.
    """

    title: str
    cell: Callable[[WorkerState], str]
    needed: int
    meaning: str
    rank: Callable[[WorkerState], float | None] | None = None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B/s", "kB/s", "MB/s"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB/s"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


COLUMNS = (
    Column("worker", lambda s: s.worker, 9, "its name in the group"),
    Column(
        "state",
        lambda s: s.state,
        9,
        "alive; suspect: it does not answer as it should; dead; refuses: its allow_list leaves "
        "torch_rpc_ext.monitoring out",
    ),
    Column(
        "calls/s",
        lambda s: _number(s.calls_per_s),
        8,
        "calls that it makes",
        lambda s: s.calls_per_s,
    ),
    Column(
        "served/s",
        lambda s: _number(s.served_per_s),
        8,
        "calls of others that it answers",
        lambda s: s.served_per_s,
    ),
    Column(
        "sent", lambda s: _bytes(s.sent_per_s), 7, "bytes, tensors included", lambda s: s.sent_per_s
    ),
    Column(
        "received",
        lambda s: _bytes(s.received_per_s),
        7,
        "as sent",
        lambda s: s.received_per_s,
    ),
    Column(
        "latency",
        lambda s: _milliseconds(s.latency_ms),
        6,
        "of its calls since the last look, the median, within a factor of 2",
        lambda s: s.latency_ms,
    ),
    Column(
        "p99",
        lambda s: _milliseconds(s.latency_p99_ms),
        5,
        "of the same, the 99th percentile",
        lambda s: s.latency_p99_ms,
    ),
    Column(
        "queue p99",
        lambda s: _milliseconds(s.queue_p99_ms),
        4,
        "how long requests waited here for a thread, the 99th percentile",
        lambda s: s.queue_p99_ms,
    ),
    Column(
        "round trip",
        lambda s: _milliseconds(s.answer_ms),
        2,
        "from here to it and back, for this look",
    ),
    Column(
        "queued",
        lambda s: _number(s.queued),
        5,
        "requests that wait for a thread now",
        lambda s: s.queued,
    ),
    Column("running", lambda s: _number(s.running), 3, "requests that run now"),
    Column("pending", lambda s: _number(s.pending), 2, "its own calls that wait for an answer"),
    Column(
        "process", lambda s: "-" if s.pid is None else f"{s.host}:{s.pid}", 1, "host and process"
    ),
)
#: The orders that the key "s" goes through: titles of columns; '' is the order of the group.
ORDERS = ("", *(column.title for column in COLUMNS if column.rank is not None))


def meanings() -> list[str]:
    """Return lines that say what each column means."""
    left = max(len(column.title) for column in COLUMNS) + 2
    return [
        line
        for column in COLUMNS
        for line in textwrap.wrap(
            column.meaning,
            _WIDTH,
            initial_indent=f"  {column.title:<{left}}",
            subsequent_indent=" " * (left + 2),
        )
    ]


def in_order(states: Sequence[WorkerState], order: str) -> list[WorkerState]:
    """Return the workers sorted by a column, the largest value first, those without a value last.

    Args:
        states: of the workers.
        order: one of ORDERS.
    """
    rank = next((column.rank for column in COLUMNS if column.title == order), None)
    if rank is None:
        return list(states)

    def key(state: WorkerState) -> float:
        figure = rank(state)
        return float("inf") if figure is None else -figure

    return sorted(states, key=key)
