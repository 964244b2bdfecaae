"""A stored run in short: the three sentences at the top of its page, six rows in the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.records import of_type
from benchmarks.table import times, value

#: What the README shows, in a user's words: (what, case, metric).
_ROWS = (
    ("a Python function, 4 bytes there and back", "python", "time"),
    ("a Python function, 4 MB there and back", "python-4m", "time"),
    ("a Python function, 400 MB there and back", "python-400m", "time"),
    ("a small call while tensors of 200 MB travel", "small-during-bulk", "row"),
    ("24 processes start, and all call all", "init-24", "both"),
    ("200 MB between two hosts, no limit on the link", "hosts-bulk", "rate"),
)
_SMALL = ("empty", "builtin", "script", "python", "python-64k")
_MEGABYTES = ("python-4m", "script-4m", "builtin-4m")
_HUNDREDS = ("python-400m", "script-400m", "builtin-400m")
_COMPUTING = tuple(
    f"{kind}-ops-{size}m" for size in (4, 400) for kind in ("python", "script", "builtin")
)
_LINKS = ("hosts-10g", "hosts-1g")
_BEGIN = "<!-- Figures: written by `python -m benchmarks report docs/benchmarks.jsonl`. -->"
_END = "<!-- End of the figures. -->"


def sentences(stored: Sequence[Mapping[str, Any]]) -> str:
    """Return sentences on the plot of the ratios; '' where a run has not measured all of these."""
    spans = [_span(stored, cases) for cases in (_SMALL, _MEGABYTES, _HUNDREDS, _COMPUTING, _LINKS)]
    if not all(spans):
        return ""
    small, megabytes, hundreds, computing, links = spans
    return (
        "How many times better UCX is than TENSORPIPE in the same run: each round is a point, the "
        "mark is their median, the line at 1x means no difference. "
        f"Small calls are {small} as fast, tensors of 4 MB {megabytes}, tensors of 400 MB "
        f"{hundreds}. "
        "Little is gained where a function computes for long "
        f"(200 operations on the callee: {computing}), or where the link is the limit (1 and 10 "
        f"Gb/s: {links}), because both back ends keep the processor or the link busy then."
    )


def with_figures(readme: str, stored: Sequence[Mapping[str, Any]]) -> str:
    """Return a README with a run's figures between its two marks; unchanged if it has no marks.

    Args:
        readme: the text of the README.
        stored: a run's records.
    """
    before, begin, rest = readme.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    figures = _figures(stored)
    return f"{before}{begin}\n\n{figures}\n{end}{after}" if end and figures else readme


def _figures(stored: Sequence[Mapping[str, Any]]) -> str:
    """Return picture, sentences and table; '' where a run has not measured all of their figures."""
    rows = [(what, *_row(stored, case, metric)) for what, case, metric in _ROWS]
    told = sentences(stored)
    if not told or not all(all(row) for row in rows):
        return ""
    machine = of_type(stored, "machine")[0]
    table = [("", "TENSORPIPE", "UCX", "better"), ("---", "---:", "---:", "---:"), *rows]
    return "\n".join(
        [
            "![How many times better than TENSORPIPE, each round a point]"
            "(docs/benchmarks/better.png)",
            "",
            told,
            "",
            *(f"| {' | '.join(row)} |" for row in table),
            "",
            f"`make bench-all` measured this on {machine['cores']} cores ({machine['cpu']}), torch "
            f"{machine['torch']}, revision `{machine['revision']}`. The first two columns are "
            "medians, the last is the median of the rounds' ratios. Two hosts are two network "
            "namespaces of that machine.",
            "",
        ]
    )


def _row(stored: Sequence[Mapping[str, Any]], case: str, metric: str) -> tuple[str, str, str]:
    found = {
        result["backend"]: value(result["median"], result["unit"])
        for result in of_type(stored, "result")
        if (result["case"], result["metric"]) == (case, metric)
    }
    ratio = _ratio(stored, case, metric)
    return found.get("tensorpipe", ""), found.get("ucx", ""), times(ratio)


def _ratio(stored: Sequence[Mapping[str, Any]], case: str, metric: str = "") -> float | None:
    """Return how many times better than TENSORPIPE a metric is; '' means the case's first."""
    for one in of_type(stored, "ratio"):
        if (one["case"], one["baseline"]) == (case, "tensorpipe") and metric in ("", one["metric"]):
            return float(one["median"])
    return None


def _span(stored: Sequence[Mapping[str, Any]], cases: Sequence[str]) -> str:
    """Return the smallest and the largest ratio of some cases; '' where none is known."""
    found = sorted(ratio for case in cases if (ratio := _ratio(stored, case)) is not None)
    return f"{times(found[0])} to {times(found[-1])}" if found else ""
