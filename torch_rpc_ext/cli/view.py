"""The live view of ``top``, drawn with rich."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_rpc_ext.cli import columns as table_columns
from torch_rpc_ext.cli import poller
from torch_rpc_ext.cli.poller import WorkerState

__all__ = ["draw", "explain"]

_COLOURS = {
    poller.ALIVE: "green",
    poller.SUSPECT: "yellow",
    poller.DEAD: "red",
    poller.REFUSES: "yellow",
}


_LEFT = ("worker", "state", "process")
_KEYS = """\
  q  ends it        s  sorts by the next column, the greatest first
  ?  shows this     any key goes back
"""


def explain() -> RenderableType:
    """Return the help of the live view."""
    return Text("\n".join([_KEYS, *table_columns.meanings()]))


def draw(
    states: Sequence[WorkerState], width: int, hint: str = "", order: str = ""
) -> RenderableType:
    """Return the picture of a group.

    Args:
        states: of the group's workers.
        width: of the terminal, characters; columns that do not fit are left out.
        hint: shown at the end of the first line, such as which key ends the view.
        order: one of columns.ORDERS, by which the workers are sorted.
    """
    states = table_columns.in_order(states, order)
    title = Text(f"{time.strftime('%H:%M:%S')}  workers: ")
    for state, colour in _COLOURS.items():
        number = sum(s.state == state for s in states)
        if number or state == poller.ALIVE:
            title.append(f"{number} {state}  ", style=colour)
    if order:
        title.append(f"by {order}  ")
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
        if s.unsent[0]:
            messages, size = s.unsent
            parts.append(
                Text(
                    f"{s.worker} has {messages} messages ({size / 1e6:.0f} MB) that wait until "
                    "receivers let go of memory that they were lent"
                )
            )
    return Group(*parts)


def _table(states: Sequence[WorkerState], width: int) -> Table:
    columns = [(column, [column.cell(s) for s in states]) for column in table_columns.COLUMNS]

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
