"""The table on stdout and the JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from benchmarks.cases.interface import Metric
from benchmarks.results import CaseResult, Summary, median

_HEAD = ("median", "p95", "p99", "cpu/call")


def print_table(results: Sequence[CaseResult], subject: str, baseline: str) -> None:
    """Print what was found, a row for each metric."""
    both = (subject, baseline)
    print(f"{'':<35}" + "".join(f"{f'--- {backend} ---':^37} " for backend in both).rstrip())
    columns = "".join(f"{title:>9}" for title in _HEAD) + "  "
    print(f"{'':<35}{columns}{columns}{'ratio':>7}{'floor':>7}{'cpu':>7}")
    for result in results:
        for index, (key, metric) in enumerate(result.case.metrics.items()):
            cells = [_cells(result, backend, key, first=index == 0) for backend in both]
            ratio = median(result.ratios(key, subject, baseline))
            cpu = median(result.cpu_ratios(subject, baseline)) if index == 0 else None
            last = f"{_ratio(ratio):>7}{_ratio(metric.floor):>7}{_ratio(cpu):>7}"
            below = ratio is not None and metric.floor is not None and ratio < metric.floor
            row = f"{metric.title:<35}{'  '.join(cells)}  {last}"
            print(row.rstrip() + ("  below" if below else ""))
        for backend, why in result.failures.items():
            print(f"  {result.case.name}: no figures of {backend}: {why.strip()}")


def write(
    out: TextIO,
    machine: dict[str, Any],
    results: Sequence[CaseResult],
    subject: str,
    baseline: str,
) -> None:
    """Write JSON lines: one 'machine', then 'result', 'ratio' and 'failure' of each case."""
    for record in ({"type": "machine", **machine}, *_records(results, subject, baseline)):
        out.write(json.dumps(record) + "\n")


def _records(
    results: Sequence[CaseResult], subject: str, baseline: str
) -> Iterator[dict[str, Any]]:
    for result in results:
        name = result.case.name
        for index, (key, metric) in enumerate(result.case.metrics.items()):
            for backend in result.rounds:
                found = result.summary(backend, key)
                if found is None:
                    continue
                yield {
                    "type": "result",
                    "case": name,
                    "metric": key,
                    "title": metric.title.strip(),
                    "unit": metric.unit,
                    "backend": backend,
                    "median": found.median,
                    "p95": found.p95,
                    "p99": found.p99,
                    "samples": found.samples,
                    "cpu_seconds_per_call": result.cpu(backend) if index == 0 else None,
                    "round_medians": [median(one.figures[key]) for one in result.rounds[backend]],
                }
            ratios = result.ratios(key, subject, baseline)
            if ratios:
                yield {
                    "type": "ratio",
                    "case": name,
                    "metric": key,
                    "subject": subject,
                    "baseline": baseline,
                    "median": median(ratios),
                    "floor": metric.floor,
                    "cpu": median(result.cpu_ratios(subject, baseline)) if index == 0 else None,
                    "rounds": ratios,
                }
        for backend, why in result.failures.items():
            yield {"type": "failure", "case": name, "backend": backend, "why": why}


def _cells(result: CaseResult, backend: str, key: str, *, first: bool) -> str:
    metric = result.case.metrics[key]
    found = result.summary(backend, key)
    if found is None:
        return f"{'-':>9}" * len(_HEAD)
    cpu = result.cpu(backend) if first else None
    shown = "" if cpu is None else _value(cpu, "s")
    return "".join(f"{cell:>9}" for cell in (*_quantiles(found, metric), shown))


def _quantiles(found: Summary, metric: Metric) -> tuple[str, str, str]:
    if metric.tail:
        return "", "", _value(found.p99, metric.unit)
    if metric.unit != "s":
        return _value(found.median, metric.unit), "", ""
    # The quantiles of a handful of samples are their maximum: better not shown as a tail.
    p95 = _value(found.p95, metric.unit) if found.samples >= 20 else ""
    p99 = _value(found.p99, metric.unit) if found.samples >= 100 else ""
    return _value(found.median, metric.unit), p95, p99


def _value(value: float, unit: str) -> str:
    if unit == "s":
        for limit, scale, name in ((1e-3, 1e6, "us"), (1, 1e3, "ms")):
            if value < limit:
                return f"{_number(value * scale)} {name}"
        return f"{_number(value)} s"
    if unit == "B":
        return f"{_number(value / 1e6)} MB"
    if unit == "B/s":
        return f"{_number(value / 1e9)} GB/s"
    return _number(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 99.5 else f"{value:.2f}"
