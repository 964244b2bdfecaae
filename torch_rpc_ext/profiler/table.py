"""The table: one row for each function and callee."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy

from torch_rpc_ext.profiler.records import Call, Execution, Recording


class Row(NamedTuple):
    """One function on one worker. Times in seconds; None where nothing is known.

    Attributes:
        function: what was called.
        worker: name of the callee.
        calls: how many, those that failed or had not ended included.
        errors: how many failed.
        sent_bytes: of all requests; of operators and TorchScript the tensors only.
        result_bytes: of the tensors in all results; None where the callee's side is not known.
        total_p50: of the caller's time, from the call to its result.
        total_p99: as total_p50.
        execution_p50: of the function on the callee; not of operators, TorchScript, nor of
            callees that were not recorded.
        execution_p99: as execution_p50.
        rest_p50: of total minus execution: serialisation, wire and queues, both ways.
        rest_p99: as rest_p50.
    """

    function: str
    worker: str
    calls: int
    errors: int
    sent_bytes: int
    result_bytes: int | None
    total_p50: float | None
    total_p99: float | None
    execution_p50: float | None
    execution_p99: float | None
    rest_p50: float | None
    rest_p99: float | None


def rows(recordings: Mapping[str, Recording]) -> list[Row]:
    """Return the rows, the function that took longest in all first."""
    executions = {e.id: e for recording in recordings.values() for e in recording.executions}
    groups: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for recording in recordings.values():
        for call in recording.calls:
            groups[call.function, call.to].append(call)
    ordered = sorted(groups.items(), key=lambda item: -sum(_seconds(item[1])))
    return [_row(function, to, calls, executions) for (function, to), calls in ordered]


def _seconds(entries: Sequence[Call | Execution]) -> list[float]:
    return [(entry.end_ns - entry.begin_ns) / 1e9 for entry in entries if entry.end_ns]


def _row(function: str, to: str, calls: list[Call], executions: Mapping[int, Execution]) -> Row:
    ran = [executions[call.id] for call in calls if call.id in executions]
    rest = [
        (call.end_ns - call.begin_ns - (e.end_ns - e.begin_ns)) / 1e9
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
        *_p50_p99(_seconds(calls)),
        *_p50_p99(_seconds(ran)),
        *_p50_p99(rest),
    )


def _p50_p99(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    p50, p99 = numpy.percentile(values, [50, 99])
    return float(p50), float(p99)


_TITLES = (
    *("function", "worker", "calls", "errors", "sent", "result"),
    *("total p50", "p99", "execution p50", "p99", "rest p50", "p99"),
)


def text(table: Sequence[Row]) -> str:
    """Return the table for people: bytes as kB, times as ms."""
    lines = [_TITLES, *(_cells(row) for row in table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_TITLES))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


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
