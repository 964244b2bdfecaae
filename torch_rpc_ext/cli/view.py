"""What ``top`` shows, drawn with rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_rpc_ext.cli import poller
from torch_rpc_ext.cli.poller import WorkerState

_COLOURS = {
    poller.ALIVE: "green",
    poller.SUSPECT: "yellow",
    poller.DEAD: "red",
    poller.REFUSES: "yellow",
}


@dataclass(frozen=True)
class _Column:
    """One column.

    Attributes:
        title: its header.
        cell: text of a worker's cell.
        needed: how much it is missed: in a narrow terminal the least needed goes first.
    """

    title: str
    cell: Callable[[WorkerState], str]
    needed: int


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


_COLUMNS = (
    _Column("worker", lambda s: s.worker, 9),
    _Column("state", lambda s: s.state, 9),
    _Column("calls/s", lambda s: _number(s.calls_per_s), 8),
    _Column("served/s", lambda s: _number(s.served_per_s), 8),
    _Column("sent", lambda s: _bytes(s.sent_per_s), 7),
    _Column("received", lambda s: _bytes(s.received_per_s), 7),
    _Column("latency", lambda s: _milliseconds(s.latency_ms), 6),
    _Column("p99", lambda s: _milliseconds(s.latency_p99_ms), 5),
    _Column("wait", lambda s: _milliseconds(s.queue_p99_ms), 4),
    _Column("answer", lambda s: _milliseconds(s.answer_ms), 2),
    _Column("queue", lambda s: _number(s.queued), 5),
    _Column("run", lambda s: _number(s.running), 3),
    _Column("pend", lambda s: _number(s.pending), 2),
    _Column("process", lambda s: "-" if s.pid is None else f"{s.host}:{s.pid}", 1),
)
_LEFT = ("worker", "state", "process")


def draw(states: Sequence[WorkerState], width: int, hint: str = "") -> RenderableType:
    """Return the picture of a group.

    Args:
        states: of its workers.
        width: of the terminal, characters; columns that do not fit are left out.
        hint: shown at the end of the first line, e.g. which key ends it.
    """
    title = Text(f"{time.strftime('%H:%M:%S')}  workers: ")
    for state, colour in _COLOURS.items():
        number = sum(s.state == state for s in states)
        if number or state == poller.ALIVE:
            title.append(f"{number} {state}  ", style=colour)
    title.append(hint, style="dim")
    parts: list[RenderableType] = [title, _table(states, width)]
    transports: dict[str, list[str]] = {}
    for s in states:
        for transport in s.transports:
            transports.setdefault(transport, []).append(s.worker)
    for transport, names in transports.items():
        parts.append(Text(f"control / bulk over {transport}: {', '.join(names)}"))
    for s in states:
        if s.why:
            parts.append(Text(f"{s.worker} is {s.state}: {s.why}", style=_COLOURS[s.state]))
        if s.lost:
            parts.append(Text(f"{s.worker} cannot reach {', '.join(s.lost)}"))
        if s.waiting:
            waiting = ", ".join(
                f"{requests} of {caller} ({size / 1e6:.0f} MB)"
                for caller, (requests, size) in sorted(s.waiting.items())
            )
            parts.append(Text(f"{s.worker} has no room yet for the tensors of requests: {waiting}"))
    return Group(*parts)


def _table(states: Sequence[WorkerState], width: int) -> Table:
    columns = [(column, [column.cell(s) for s in states]) for column in _COLUMNS]

    def taken() -> int:
        return sum(max(map(len, [c.title, *cells])) + 1 for c, cells in columns)

    while taken() > width and len(columns) > 2:
        columns.remove(min(columns, key=lambda entry: entry[0].needed))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column, _ in columns:
        side = "left" if column.title in _LEFT else "right"
        table.add_column(column.title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row, s in enumerate(states):
        styles = {"state": _COLOURS[s.state]}
        table.add_row(*(Text(cells[row], styles.get(c.title, "")) for c, cells in columns))
    return table
