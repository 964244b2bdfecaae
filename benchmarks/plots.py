"""The plots of a stored run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import of_type

# A back end has the same colour in all plots, dark enough for a white page.
_COLOURS = {
    "ucx": "#c0392b",
    "tensorpipe": "#2c6fbb",
    "grpc": "#5a8f3c",
    "ray": "#8e6bb0",
    "limit": "#999999",
}
_PLOTS = {
    "small.png": (
        "Small calls, median and 99th percentile",
        ("empty", "builtin", "script", "python", "python-64k", "flood-builtin", "flood-python"),
    ),
    "large.png": (
        "4 MB and 400 MB, median",
        (
            "python-4m",
            "script-4m",
            "builtin-4m",
            "python-400m",
            "script-400m",
            "builtin-400m",
        ),
    ),
    "operations.png": (
        "200 operations on the callee, median",
        tuple(
            f"{kind}-ops-{size}m" for size in (4, 400) for kind in ("python", "script", "builtin")
        ),
    ),
    "many.png": (
        "Many at once, median",
        (
            "many-tensors",
            "threads-8",
            "fan-out",
            "fan-in",
            "fan-out-4m",
            "fan-in-4m",
            "rref",
            "autograd",
        ),
    ),
    "start.png": (
        "Start of a group, seconds",
        ("init-2", "init-8", "init-24", "init-64"),
    ),
}


def write(stored: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """Draw the plots that a run has figures for.

    Returns:
        File name -> what the plot shows.
    """
    import matplotlib

    matplotlib.use("Agg")
    first = _first_metrics(stored)
    made = {}
    for name, (shows, cases) in _PLOTS.items():
        present = [case for case in cases if case in first]
        if present:
            _bars(folder / name, shows, [first[case] for case in present])
            made[name] = shows
    if _ratios(stored):
        _better(folder / "better.png", _ratios(stored))
        made["better.png"] = "How many times better than TENSORPIPE, each round a point"
    return made


def _first_metrics(stored: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the results of each case's first metric, which is a time."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in of_type(stored, "result"):
        results = found.setdefault(result["case"], [])
        if not results or results[0]["metric"] == result["metric"]:
            results.append(result)
    return found


def _ratios(stored: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the ratios of the cases' first metrics against TENSORPIPE, with their titles."""
    first = {case: results[0] for case, results in _first_metrics(stored).items()}
    return [
        (first[ratio["case"]]["title"], ratio)
        for ratio in of_type(stored, "ratio")
        if ratio["baseline"] == "tensorpipe" and first[ratio["case"]]["metric"] == ratio["metric"]
    ]


def _bars(path: Path, title: str, cases: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Draw a group of bars for each case, on a logarithmic axis."""
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    backends = list(dict.fromkeys(result["backend"] for results in cases for result in results))
    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.2 * len(cases) * (len(backends) + 1)))
    step = 1 / (len(backends) + 1)
    for index, backend in enumerate(backends):
        mine = [
            (row + index * step, result)
            for row, results in enumerate(cases)
            for result in results
            if result["backend"] == backend
        ]
        places, medians = [at for at, _ in mine], [result["median"] for _, result in mine]
        axes.barh(places, medians, step, color=_COLOURS.get(backend), label=backend)
        tails = [(at, one["p99"]) for at, one in mine if one["samples"] >= 100]
        axes.plot([p99 for _, p99 in tails], [at for at, _ in tails], "k|", markersize=5)
    middle = (len(backends) - 1) * step / 2
    axes.set_yticks(
        [row + middle for row in range(len(cases))], [results[0]["title"] for results in cases]
    )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_seconds))
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title)
    axes.legend(fontsize="small")
    _save(figure, path)


def _better(path: Path, ratios: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.22 * len(ratios)))
    for row, (_, ratio) in enumerate(ratios):
        points = ratio["rounds"]
        axes.plot(points, [row] * len(points), ".", color=_COLOURS["ucx"], alpha=0.4)
        axes.plot([ratio["median"]], [row], "|", color="black", markersize=10)
    axes.set_yticks(range(len(ratios)), [title for title, _ in ratios], fontsize="small")
    axes.invert_yaxis()
    axes.axvline(1, color=_COLOURS["tensorpipe"])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.grid(axis="x", alpha=0.3)
    axes.set_title("Times better than TENSORPIPE: rounds, and their median")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    # Without matplotlib's version in the file, so that the same figures give the same file.
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def _seconds(value: float, _: object) -> str:
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms")):
        if value < limit * 0.999:
            return f"{value * scale:g} {unit}"
    return f"{value:g} s"
