"""What a run gave, as plain records: the lines of its JSON file.

Table, page and plots are made from these and from nothing else, so that each can be made again
from the file. Kinds, by ``type``: machine, result, ratio, target, failure, skip; again (cases that
a later run measured again, and that run's machine).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.interface import Metric, Target
from benchmarks.results import CaseResult, median, reaches

Record = dict[str, Any]


def of_result(result: CaseResult, subject: str, *, revisions: bool = False) -> Iterator[Record]:
    """Yield the records of a case.

    Args:
        result: of the case.
        subject: the contender that is compared with all others.
        revisions: whether the contenders are two revisions of one program, in new processes for
            each pass: then the records have an interval for the ratio, and no targets.
    """
    name = result.case.name
    for index, (key, metric) in enumerate(result.case.metrics.items()):
        for backend in result.rounds:
            yield from _result(result, backend, key, metric, first=index == 0)
        for other in result.rounds:
            ratios = result.ratios(key, subject, other) if other != subject else []
            if ratios:
                cpu = result.cpu_ratios(subject, other) if index == 0 else []
                yield {
                    "type": "ratio",
                    "case": name,
                    "metric": key,
                    "subject": subject,
                    "baseline": other,
                    "median": median(ratios),
                    "cpu": median(cpu),
                    "rounds": [_rounded(ratio) for ratio in ratios],
                    "interval": result.interval(key, subject, other) if revisions else None,
                }
        for target in () if revisions else metric.targets:
            yield _target(result, key, metric, target, subject)
    for backend, why in result.failures.items():
        yield {"type": "failure", "case": name, "backend": backend, "why": why}
    for backend, why in result.skips.items():
        yield {"type": "skip", "case": name, "backend": backend, "why": why}


def write(path: Path, records: Sequence[Record]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read(path: Path) -> list[Record]:
    """Read what write() wrote.

    Raises:
        ValueError: write() has not written this file; the text says in which line, and why.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(record, dict) or "type" not in record:
            raise ValueError(f"{path}, line {number} is not a record of a benchmark")
        records.append(record)
    if not records or records[0]["type"] != "machine":
        raise ValueError(f"{path} does not begin with the description of a machine")
    return records


def merged(first: Sequence[Record], later: Sequence[Record]) -> list[Record]:
    """Return a run in which the cases of a later run have the figures of that run."""
    cases = list(dict.fromkeys(record["case"] for record in later if "case" in record))
    kept = [record for record in first if record.get("case") not in cases]
    again = {**later[0], "type": "again", "cases": cases}
    return [*kept, again, *later[1:]]


def of_type(records: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Return the records of a type."""
    return [record for record in records if record["type"] == kind]


def _result(
    result: CaseResult, backend: str, key: str, metric: Metric, *, first: bool
) -> Iterator[Record]:
    found = result.summary(backend, key)
    if found is None:
        return
    cpu = result.cpu(backend) if first else None
    yield {
        "type": "result",
        "case": result.case.name,
        "metric": key,
        "title": metric.title,
        "unit": metric.unit,
        "tail": metric.tail,
        "paper": metric.paper,
        "backend": backend,
        "median": _rounded(found.median),
        "p95": _rounded(found.p95),
        "p99": _rounded(found.p99),
        "samples": found.samples,
        "cpu_seconds_per_call": None if cpu is None else _rounded(cpu),
        "round_medians": [
            _rounded(median(one.figures[key]) or 0.0) for one in result.rounds[backend]
        ],
    }


def _target(result: CaseResult, key: str, metric: Metric, target: Target, subject: str) -> Record:
    found = result.found(key, target, subject)
    met = None
    if found is not None:
        met = reaches(metric, target, found, target.at_least)
    aim_met = None
    if found is not None and target.aim is not None:
        aim_met = reaches(metric, target, found, target.aim)
    return {
        "type": "target",
        "case": result.case.name,
        "metric": key,
        "title": metric.title,
        "unit": metric.unit,
        "kind": target.kind,
        "against": None if target.kind == "value" else target.against,
        "at_least": target.at_least,
        "aim": target.aim,
        "found": found,
        "met": met,
        "aim_met": aim_met,
    }


def _rounded(value: float) -> float:
    """Round to four digits: more would be noise in a file that is kept in git."""
    return float(f"{value:.4g}")
