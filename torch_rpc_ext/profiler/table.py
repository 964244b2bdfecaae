"""The table: one row for each function and callee."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy

from torch_rpc_ext.profiler.records import Call, Execution, Recording

__all__ = ["Row", "rows", "text"]


class Row(NamedTuple):
    """The calls of one function on one worker. Times in seconds; None where nothing is known.

    ::

        for row in prof.table():  # each a Row
            print(row.function, row.worker, row.calls, row.total_p50)

    Attributes:
        function: what was called.
        worker: name of the callee.
        calls: how many calls, those that failed or had not ended included.
        errors: how many calls failed.
        sent_bytes: of all requests; of operators and TorchScript the tensors only.
        result_bytes: of all results, see Execution; None where the callee's side is not known.
        total_p50: of the caller's time, from the call to its result.
        total_p99: as total_p50.
        queue_p50: of the time from the request's arrival until a thread of the callee took it up.
            This and those below are None where the callee's side is not known.
        queue_p99: as queue_p50.
        gil_wait_p50: of that thread's waits for the GIL, outside of the function.
        gil_wait_p99: as gil_wait_p50.
        execution_p50: of the function.
        execution_p99: as execution_p50.
        network_p50: of the rest: serialisation and wire, both ways. Without our agent on the callee
            queue and GIL wait are in it.
        network_p99: as network_p50.
    """

    function: str
    worker: str
    calls: int
    errors: int
    sent_bytes: int
    result_bytes: int | None
    total_p50: float | None
    total_p99: float | None
    queue_p50: float | None
    queue_p99: float | None
    gil_wait_p50: float | None
    gil_wait_p99: float | None
    execution_p50: float | None
    execution_p99: float | None
    network_p50: float | None
    network_p99: float | None


def rows(recordings: Mapping[str, Recording]) -> list[Row]:
    """Return the rows, the function that took longest in all first."""
    executions = {e.id: e for recording in recordings.values() for e in recording.executions}
    groups: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for recording in recordings.values():
        for call in recording.calls:
            groups[call.function, call.to].append(call)
    ordered = sorted(
        groups.items(), key=lambda item: -sum(_duration_ns(call) for call in item[1] if call.end_ns)
    )
    return [_row(function, to, calls, executions) for (function, to), calls in ordered]


def _row(function: str, to: str, calls: list[Call], executions: Mapping[int, Execution]) -> Row:
    ran = [executions[call.id] for call in calls if call.id in executions]
    ended = [e for e in ran if e.end_ns]
    known = [e for e in ran if e.arrival_ns]
    network = [
        # Of an asynchronous function a wait for the GIL may be part of its execution.
        max(0, _duration_ns(call) - e.queue_ns - e.gil_wait_ns - e.execution_ns)
        for call in calls
        if call.end_ns and (e := executions.get(call.id)) is not None and e.end_ns
    ]
    return Row(
        function,
        to,
        len(calls),
        sum(bool(call.error) for call in calls),
        sum(call.sent_bytes for call in calls),
        sum(e.result_bytes for e in ran) if ran else None,
        *_p50_p99(_duration_ns(call) for call in calls if call.end_ns),
        *_p50_p99(e.queue_ns for e in known),
        *_p50_p99(e.gil_wait_ns for e in known),
        *_p50_p99(e.execution_ns for e in ended),
        *_p50_p99(network),
    )


def _duration_ns(call: Call) -> int:
    return call.end_ns - call.begin_ns


def _p50_p99(times_ns: Iterable[int]) -> tuple[float | None, float | None]:
    values = list(times_ns)
    if not values:
        return None, None
    p50, p99 = numpy.percentile(values, [50, 99]) / 1e9
    return float(p50), float(p99)


_TITLES = (
    *("function", "worker", "calls", "errors", "sent", "result"),
    *("total p50", "p99", "queue p50", "p99", "GIL wait p50", "p99"),
    *("execution p50", "p99", "network p50", "p99"),
)


# Those that stand at the left of each part of a folded table.
_NAMES = 2


def text(table: Sequence[Row], width: int | None = None) -> str:
    """Return the table for people: bytes as kB, times as ms.

    Args:
        table: its rows.
        width: of the terminal, characters: a table that is wider is cut into parts, one below the
            other, each with the names at its left. None: it is not cut.
    """
    lines = [_TITLES, *(_cells(row) for row in table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_TITLES))]
    parts = [
        "\n".join(_aligned(line, widths, columns) for line in lines)
        for columns in _folded(widths, width)
    ]
    return "\n\n".join(parts)


def _folded(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Return the columns of each part; those that belong together (p50, p99) are not parted."""
    names, numbers = list(range(_NAMES)), range(_NAMES, len(widths), 2)
    if width is None:
        return [[*names, *range(_NAMES, len(widths))]]
    parts: list[list[int]] = []
    for first in numbers:
        pair = [first, first + 1]
        if parts and _taken(widths, [*parts[-1], *pair]) <= width:
            parts[-1] += pair
        else:
            parts.append([*names, *pair])
    return parts


def _taken(widths: Sequence[int], columns: Sequence[int]) -> int:
    return sum(widths[column] + 2 for column in columns) - 2


def _aligned(line: Sequence[str], widths: Sequence[int], columns: Sequence[int]) -> str:
    return "  ".join(
        line[column].ljust(widths[column])
        if column < _NAMES
        else line[column].rjust(widths[column])
        for column in columns
    ).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    def size(value: int | None) -> str:
        return "-" if value is None else f"{value / 1e3:.1f} kB"

    def time(value: float | None) -> str:
        return "-" if value is None else f"{value * 1e3:.3f} ms"

    return (
        *(row.function, row.worker, str(row.calls), str(row.errors)),
        *(size(row.sent_bytes), size(row.result_bytes)),
        *map(time, row[6:]),
    )
