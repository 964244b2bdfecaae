"""What people see of a run: its records, and the table made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any

from benchmarks.applications import idle, lines
from benchmarks.applications.interface import WAYS, Application
from benchmarks.applications.runner import JobResult
from benchmarks.records import Record, of_type
from benchmarks.table import value

_WIDTHS = (40, 36, *[20] * len(WAYS))


def of_application(application: Application) -> Iterator[Record]:
    """Yield the record of an application's lines."""
    yield {
        "type": "lines",
        "application": application.name,
        "found": lines.of_application(application.name),
        "paper": application.paper_lines,
    }


def of_result(result: JobResult) -> Iterator[Record]:
    """Yield the records of a job."""
    application, job = result.application, result.job
    where = {"application": application.name, "job": job.name, "title": job.title}
    shown = application.shown(job)
    drawn = [key for key, one in application.metrics.items() if one.is_course and key not in shown]
    for key in (*shown, *drawn):
        metric = application.metrics[key]
        course, listed = metric.is_course, metric.is_list
        for way, rounds in result.rounds.items():
            values = [one for figures in rounds for one in figures.get(key, ())]
            if values:
                yield {
                    "type": "result",
                    **where,
                    "metric": key,
                    "metric_title": metric.title,
                    "unit": metric.unit,
                    "is_spread": metric.is_spread,
                    "is_shown": key in shown,
                    "paper": application.paper(job, key),
                    "way": way,
                    "median": _rounded(median(values)),
                    "mean": _rounded(fmean(values)),
                    "deviation": _rounded(pstdev(values)),
                    "samples": len(values),
                    "rounds": [_rounded(median(one[key])) for one in rounds if one.get(key)],
                    **({"course": [_rounded(one) for one in rounds[0][key]]} if course else {}),
                    **({"list": _medians([one[key] for one in rounds])} if listed else {}),
                }
    for kind, reasons in (("failure", result.failures), ("skip", result.skips)):
        for way, why in reasons.items():
            yield {"type": kind, **where, "way": way, "why": why}


def ways(stored: Sequence[Mapping[str, Any]], application: str) -> list[str]:
    """Return the ways of which there are figures."""
    results = of_type(stored, "result")
    found = {one["way"] for one in results if one["application"] == application}
    return [way for way in WAYS if way in found]


def head(stored: Sequence[Mapping[str, Any]], application: str) -> tuple[str, ...]:
    """Return the head of the rows."""
    return ("", "the paper, its machines", *ways(stored, application))


def rows(stored: Sequence[Mapping[str, Any]], application: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each case, with nothing but its title, and for each of its metrics."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for result in of_type(stored, "result"):
        if result["application"] == application and result.get("is_shown", True):
            place = (result["title"], result["metric_title"], result["paper"])
            cells.setdefault(place, {})[result["way"]] = cell(result)
    last, present = "", ways(stored, application)
    for (title, metric, paper), by_way in cells.items():
        if title != last:
            yield (title, "", *[""] * len(present))
        yield (f"  {metric}", paper, *(by_way.get(way, "") for way in present))
        last = title


def cell(result: Mapping[str, Any]) -> str:
    """Return a figure as people read it."""
    if result.get("list"):
        return ", ".join(value(one, result["unit"]) for one in result["list"])
    if result["is_spread"] and result["samples"] > 1:
        mean, deviation = (value(result[key], result["unit"]) for key in ("mean", "deviation"))
        return f"{mean} +- {deviation}"
    return value(result["median"], result["unit"])


def counts(stored: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the record of the lines of each application; of several runs the last."""
    return {one["application"]: one for one in of_type(stored, "lines")}


def missing(stored: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each reason why figures are missing."""
    found: dict[str, list[str]] = {}
    for kind, verb in (("skip", "is left out"), ("failure", "failed")):
        for one in of_type(stored, kind):
            sentence = f"{one['application']} on {one['way']} {verb}: {one['why']}"
            found.setdefault(sentence, []).append(one["job"])
    return [f"{sentence} ({', '.join(jobs)})" for sentence, jobs in found.items()]


def table(stored: Sequence[Mapping[str, Any]], applications: Mapping[str, Application]) -> str:
    """Return the tables of a run: figures, lines of communication, what is missing and why."""
    text = []
    for name, count in counts(stored).items():
        text += [applications[name].title, _line(head(stored, name))]
        text += [_line(row) for row in rows(stored, name)]
        text += ["", lines.text(count["found"], count["paper"]), ""]
    busy = {one["kind"]: one["threads"] for one in of_type(stored, "idle")}
    return "\n".join([*text, *([idle.text(busy), ""] if busy else []), *missing(stored)])


def _line(cells: Sequence[str]) -> str:
    first, *others = cells
    # A list may be wider than its column.
    right = "".join(f" {one:>{width - 1}}" for one, width in zip(others, _WIDTHS[1:], strict=False))
    return f"{first:<{_WIDTHS[0]}}{right}".rstrip()


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the median over the rounds at each place."""
    return [_rounded(median(column)) for column in zip(*rounds, strict=True)]


def _rounded(figure: float) -> float:
    return float(f"{figure:.6g}")
