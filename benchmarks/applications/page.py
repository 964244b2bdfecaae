"""The page of a stored run, docs/evaluation.md, and its plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.applications import APPLICATIONS, lines, report
from benchmarks.applications.interface import (
    BFLOAT16,
    ENCRYPTED,
    PIPELINING,
    Application,
    Course,
    Plot,
)
from benchmarks.records import of_type

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
_COLOURS = {
    "tensorpipe": "#2c6fbb",
    "ucx": "#c0392b",
    BFLOAT16: "#e67e22",
    ENCRYPTED: "#7d3c98",
    "grpc": "#5a8f3c",
    PIPELINING: "#555555",
}
_NOTE = (
    "<!-- Written by `python -m benchmarks.applications report docs/evaluation.jsonl`: run the "
    "applications again, then run that. -->"
)
_HEAD = """\
# The paper's applications

The paper "PyTorch RPC: Distributed Deep Learning Built on Tensor-Optimized Remote Procedure Calls"
(MLSys 2023) shows its work by applications. Here they run on several ways to communicate:
TENSORPIPE, which the paper calls CPU RPC, this back end, and gRPC; GPT on upstream's pipelining
instead of gRPC. The computation is the same code in all, and the program on UCX is the program on
TENSORPIPE. They take turns in one run.

The paper's figures are from the paper's machines, some with GPUs. They stand here so that ratios
can be compared: a time of another machine says nothing about a time of this one.
"""
_AGAIN = """\
## Make it again

```
make paper                                            # all, then writes this page
.venv-paper/bin/python -m benchmarks.applications --help
.venv-paper/bin/python -m benchmarks.applications lines    # counts lines of communication
.venv-paper/bin/python -m benchmarks.applications idle     # what an idle process costs
```
"""
_LINES = """\
A line counts unless it is blank, a comment or part of a docstring; imports and closing brackets
count. The files with_rpc.py, with_grpc.py (with the .proto) and with_pipelining.py communicate and
do nothing else.
"""
_SCALES = {"s": (1e3, "ms"), "B": (1e-6, "MB")}  # of the plots
_LOADED = 0.05  # share of the machine from which on the page says that others used it


def write(stored: Sequence[Mapping[str, Any]], docs: Path) -> None:
    """Write evaluation.md, its plots, and beside them the figures that they are made from."""
    pictures = docs / "evaluation"
    pictures.mkdir(parents=True, exist_ok=True)
    (docs / "evaluation.md").write_text(page(stored, draw(stored, pictures)), encoding="utf-8")
    records.write(docs / "evaluation.jsonl", [dict(record) for record in stored])


def page(stored: Sequence[Mapping[str, Any]], pictures: Mapping[str, Sequence[str]]) -> str:
    """Return the text of the page.

    Args:
        stored: a run's records.
        pictures: the plots of each application, by their file names in docs/evaluation/.
    """
    text = [_NOTE, "", _HEAD]
    for machine in of_type(stored, "machine"):
        text += [_machine(machine), ""]
    for name, count in report.counts(stored).items():
        application = APPLICATIONS[name]
        text += [f"## {application.title}", "", application.remarks, ""]
        text += _markdown(report.head(stored, name), report.rows(stored, name))
        text += [
            f"\n![{application.title}: each way, over the cases](evaluation/{file})"
            for file in pictures.get(name, ())
        ]
        text += ["", _LINES, *_counted(count)]
        text.append("")
    idle = {one["kind"]: one["threads"] for one in of_type(stored, "idle")}
    if idle:
        text += ["## An idle process", "", _idle(idle), ""]
    absent = report.missing(stored)
    text += ["## Not measured", "", *(f"- {line}" for line in absent), ""] if absent else []
    return "\n".join([*text, _AGAIN])


def _machine(machine: Mapping[str, Any]) -> str:
    share = machine.get("others_cpu_share", 0.0)
    loaded = (
        f" **The machine was loaded: others used {share:.0%} of it meanwhile.** Times are longer "
        "than those of a quiet machine, and ratios are uncertain."
        if share >= _LOADED
        else ""
    )
    names = [APPLICATIONS[name].title for name in machine["applications"]]
    named = "All" if len(names) == len(APPLICATIONS) else "; ".join(names)
    return (
        f"{named}: measured on {machine['time'][:10]}, revision `{machine['revision']}`, with "
        f"{machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}, UCX "
        f"{machine['ucx']}; the run took {machine.get('seconds', 0) / 60:.0f} minutes.{loaded}"
    )


def _idle(found: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        (kind, ", ".join(f"{name}: {cores:.2f}" for name, cores in threads.items()) or "none")
        for kind, threads in found.items()
    ]
    return "\n".join(
        [
            "Two processes are connected, and nobody calls. What a thread of one of them takes is",
            "missing elsewhere once there are more processes than cores.",
            "",
            *_markdown(("", "cores kept busy, by thread"), rows),
        ]
    )


def _counted(count: Mapping[str, Any]) -> list[str]:
    rows = lines.rows(count["found"], count["paper"])
    return _markdown(("lines of code", "here", "the paper"), rows)


def _markdown(head: Sequence[str], rows: Any) -> list[str]:
    rule = ["---" if index < 1 else "---:" for index in range(len(head))]
    cells = [head, rule, *rows]
    return [f"| {' | '.join(_nested(cell) for cell in row)} |" for row in cells]


def _nested(cell: str) -> str:
    return f"&nbsp;&nbsp;{cell.strip()}" if cell.startswith("  ") else cell


def draw(stored: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, list[str]]:
    """Draw what a run has figures for; returns the names of the files by application."""
    made: dict[str, list[str]] = {}
    for name, application in APPLICATIONS.items():
        for number, plot in enumerate(application.plots):
            results = [
                one
                for one in of_type(stored, "result")
                if one["application"] == name and one["job"] in _jobs(plot)
            ]
            if results:
                file = f"{name}{number or ''}.png"
                _lines(folder / file, application, plot, results)
                made.setdefault(name, []).append(file)
    return made


def _jobs(plot: Plot | Course) -> Sequence[str]:
    return [plot.job] if isinstance(plot, Course) else list(plot.places)


def _lines(
    path: Path, application: Application, plot: Plot | Course, results: Sequence[Mapping[str, Any]]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(plot.metrics), figsize=(9, 3), squeeze=False)
    for panel, key in zip(panels[0], plot.metrics, strict=True):
        metric = application.metrics[key]
        scale, unit = _SCALES.get(metric.unit, (1.0, metric.unit))
        for way, colour in _COLOURS.items():
            mine = [one for one in results if one["way"] == way and one["metric"] == key]
            if not mine:
                continue
            places, figures = _points(plot, mine)
            scaled = [one * scale for one in figures]
            panel.plot(places, scaled, "o-", color=colour, label=way, markersize=4)
            for one in mine if isinstance(plot, Plot) else ():
                rounds = [figure * scale for figure in one["rounds"]]
                place = plot.places[one["job"]]
                panel.plot([place] * len(rounds), rounds, ".", color=colour, alpha=0.4)
        panel.set_title(f"{metric.title}{f', {unit}' if scale != 1 else ''}", fontsize="small")
        panel.set_xlabel(plot.label)
        if isinstance(plot, Course):
            panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_ylim(0, None)
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    # Without the version of the program that made it: the same figures give the same file.
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def _points(
    plot: Plot | Course, mine: Sequence[Mapping[str, Any]]
) -> tuple[list[float], list[float]]:
    """Return where a way's figures stand, and the figures."""
    if isinstance(plot, Course):
        course = list(mine[-1]["course"])
        return [place + 1.0 for place in range(len(course))], course
    return [plot.places[one["job"]] for one in mine], [one["median"] for one in mine]
