"""The page of a stored run, docs/benchmarks.md, and its plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots, records, summary, table

DOCS = Path(__file__).resolve().parent.parent / "docs"
# The plot at the top of the page.
_FIRST = "better.png"
_NOTE = (
    "<!-- Written by `python -m benchmarks report docs/benchmarks.jsonl`: measure again, then run "
    "that. -->"
)
_AGAIN = """\
```
make bench        # beside TENSORPIPE and the limit, under 5 minutes; writes benchmarks.jsonl
make bench-all    # also gRPC and Ray, and what takes long; then writes this page again
.venv/bin/python -m benchmarks --help
.venv/bin/python -m benchmarks compare HEAD~1 --cases builtin python-4m
```

`compare` makes new processes for each pass, because one process differs from the next by up to
30 %, and says between what each ratio lies; `--passes 30` narrows that.

`python -m benchmarks report FILE` makes this page and the plots from the figures of any run; of
several files, the cases of a later one replace those of an earlier one.
"""
_HOW = """\
All back ends of a run are alive at once and take turns, round by round, each round in another
order; a first round that connects and allocates is not counted. The rounds of a case come in up to
ten parts, with those of others in between. **better** is how many times better
{subject} is than that row: the ratio of the two medians of a round, and the median of the rounds'
ratios. Times of a busy machine go up and down together, ratios much less. **cpu/call** is the CPU
time of all processes for one call, **cpu** how many times less of it {subject} takes. p95 and p99
stand where there are 20 and 100 samples. One whose rounds take long makes fewer of them.

`limit` is no RPC: one plain copy of the arguments into memory that both processes have mapped, a
wake-up there and one back by pipes, and the function. What it hands back in the memory of the
arguments is not copied again. `grpc` is grpcio with a generic method over a Unix socket, bytes
without a limit and without pickle; `ray` is an actor. Two hosts are two network namespaces of this
machine.
"""
_PAPER = """\
Ten calls are in flight; the figure is the mean delay of one. The first three columns are the
figures of the paper "PyTorch RPC" (MLSys 2023), from other machines: only their ratio can be
compared with the ratios of this run, in the last two columns. PyTorch RPC there is TENSORPIPE.
"""
_PAPER_HEAD = (
    "",
    "paper: gRPC",
    "paper: PyTorch RPC",
    "better",
    "gRPC",
    "TENSORPIPE",
    "UCX",
    "limit",
    "UCX to TENSORPIPE",
    "UCX to gRPC",
)


def write(stored: Sequence[Mapping[str, Any]], docs: Path) -> None:
    """Write benchmarks.md, its plots and benchmarks.jsonl, and the figures of the README.

    Args:
        stored: a run's records.
        docs: the folder of the documentation; the README is in the folder above.
    """
    pictures = docs / "benchmarks"
    pictures.mkdir(parents=True, exist_ok=True)
    made = plots.write(stored, pictures)
    (docs / "benchmarks.md").write_text(page(stored, made), encoding="utf-8")
    records.write(docs / "benchmarks.jsonl", [dict(record) for record in stored])
    readme = docs.parent / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        readme.write_text(summary.with_figures(text, stored), encoding="utf-8")


def page(stored: Sequence[Mapping[str, Any]], pictures: Mapping[str, str]) -> str:
    """Return the text of the page.

    Args:
        stored: a run's records.
        pictures: file name in docs/benchmarks/ -> what the plot shows.
    """
    machine = records.of_type(stored, "machine")[0]
    lines = [_NOTE, "", "# Benchmarks", ""]
    first = {name: shows for name, shows in pictures.items() if name == _FIRST}
    lines += [f"![{shows}](benchmarks/{name})\n" for name, shows in first.items()]
    told = summary.sentences(stored)
    lines += [told, ""] if told else []
    again = [_again(record) for record in records.of_type(stored, "again")]
    lines += [_machine(machine), "", *again, "## Targets", ""]
    rows = table.target_rows(stored)
    lines += _markdown(("what", "", "found", "at least", "aim", "reached"), rows)
    lines += ["", *(f"- {line}" for line in _unmet(rows)), ""] if _unmet(rows) else [""]
    lines += ["## Plots", ""]
    others = {name: shows for name, shows in pictures.items() if name != _FIRST}
    lines += [f"![{shows}](benchmarks/{name})\n" for name, shows in others.items()]
    paper = table.paper_rows(stored)
    if paper:
        lines += ["## The paper's protocol", "", _PAPER, ""]
        lines += [*_markdown(_PAPER_HEAD, paper, labels=1), ""]
    lines += ["## Figures", ""]
    head = ("", "", "median", "p95", "p99", "cpu/call", "better", "cpu")
    lines += _markdown(head, [(_nested(row[0]), *row[1:]) for row in table.rows(stored)])
    absent = [*table.missing(stored), *_failures(stored)]
    lines += ["", "Not measured:", "", *(f"- {line}" for line in absent)] if absent else []
    lines += ["", "## How it was made", "", _HOW.format(subject=machine["subject"])]
    lines += ["## Make it again", "", _AGAIN]
    return "\n".join(lines)


def _machine(machine: Mapping[str, Any]) -> str:
    memory = machine["memory_bytes"] / 2**30
    share = machine.get("others_cpu_share")
    rest = (
        "The run did not come to its end: some cases are missing."
        if share is None
        else f"Others used {share:.0%} of the machine meanwhile."
    )
    return (
        f"Measured on {machine['time'][:10]}, revision `{machine['revision']}`: "
        f"{machine['cores']} cores ({machine['cpu']}), {memory:.0f} GiB, torch "
        f"{machine['torch']}, UCX {machine['ucx']}. A process wakes another in "
        f"{machine['wake_up_us']} us; one core copies {machine['memcpy_gb_per_s']} GB/s. "
        f"{rest}"
    )


def _again(record: Mapping[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in record["cases"])
    return (
        f"Measured again in a run of their own, {record['time'][:10]}, revision "
        f"`{record['revision']}`: {names}.\n"
    )


def _unmet(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [
        f"Not reached: {title}, {against}: {found} of {wanted}."
        for title, against, found, wanted, _, met in rows
        if met == "NOT"
    ]


def _failures(stored: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{failure['backend']} failed in {failure['case']}: {failure['why']}"
        for failure in records.of_type(stored, "failure")
    ]


def _nested(title: str) -> str:
    return f"&nbsp;&nbsp;{title.strip()}" if title.startswith(" ") else title


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 2) -> list[str]:
    rule = ["---" if index < labels else "---:" for index in range(len(head))]
    cells = [head, rule, *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
