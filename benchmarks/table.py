"""The results of a run as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.records import of_type

_HEAD = ("", "", "median", "p95", "p99", "cpu/call", "better", "cpu")
_WIDTHS = (34, 13, 10, 10, 10, 10, 9, 9)
_TARGET_HEAD = ("target", "", "found", "at least", "aim", "")
_TARGET_WIDTHS = (45, 20, 10, 10, 10, 6)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a run: figures, what is missing and why, targets."""
    lines = [_line(_HEAD, _WIDTHS), *(_line(row, _WIDTHS) for row in rows(records))]
    for record in records:
        if record["type"] == "failure":
            lines.append(f"{record['case']}: {record['backend']} failed: {record['why']}")
        elif record["type"] == "ratio" and record.get("interval"):
            low, high = record["interval"]
            lines.append(
                f"{record['case']} ({record['metric']}): {times(record['median'])}, and with 95 % "
                f"between {times(low)} and {times(high)}"
            )
    lines.extend(missing(records))
    targets = target_rows(records)
    if targets:
        lines.append("")
        lines.append(_line(_TARGET_HEAD, _TARGET_WIDTHS))
        lines.extend(_line(row, _TARGET_WIDTHS) for row in targets)
    return "\n".join(line.rstrip() for line in lines)


def rows(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each metric and back end; the first row of a metric has the title."""
    ratios = {
        (one["case"], one["metric"], one["baseline"]): one for one in of_type(records, "ratio")
    }
    shown: tuple[str, str] | None = None
    for result in of_type(records, "result"):
        row = (result["case"], result["metric"])
        ratio = ratios.get((*row, result["backend"]), {})
        cpu = result["cpu_seconds_per_call"]
        yield (
            result["title"] if row != shown else "",
            result["backend"],
            *_quantiles(result),
            "" if cpu is None else value(cpu, "s"),
            times(ratio.get("median")),
            times(ratio.get("cpu")),
        )
        shown = row


def paper_rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each case of the paper's protocol: what, the paper's figures for gRPC and
    PyTorch RPC and how many times better the latter is; then of this run: gRPC, TENSORPIPE, UCX,
    the limit, and how many times better UCX is than TENSORPIPE and than gRPC."""
    ratios = {(one["case"], one["baseline"]): one["median"] for one in of_type(records, "ratio")}
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for result in of_type(records, "result"):
        if result.get("paper"):
            found.setdefault(result["case"], {})[result["backend"]] = result
    rows = []
    for case, results in found.items():
        one = next(iter(results.values()))
        grpc, rpc = one["paper"]
        medians = (
            value(results[name]["median"], "s") if name in results else ""
            for name in ("grpc", "tensorpipe", "ucx", "limit")
        )
        better = (times(ratios.get((case, name))) for name in ("tensorpipe", "grpc"))
        rows.append(
            (
                one["title"].replace(", 10 in flight", ""),
                value(grpc, "s"),
                value(rpc, "s"),
                times(grpc / rpc),
                *medians,
                *better,
            )
        )
    return rows


def missing(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each back end and reason why it has no figures of some cases."""
    found: dict[tuple[str, str], list[str]] = {}
    for skip in of_type(records, "skip"):
        found.setdefault((skip["backend"], skip["why"]), []).append(skip["case"] or "everything")
    return [
        f"{backend} is left out of {', '.join(cases)}: {why}"
        for (backend, why), cases in found.items()
    ]


def target_rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each target: what, against what, found, at least, aim, reached."""
    return [
        (
            _title(target),
            _of_what(target),
            *(_figure(target, key) for key in ("found", "at_least", "aim")),
            _met(target),
        )
        for target in of_type(records, "target")
    ]


def value(figure: float, unit: str) -> str:
    """Return a figure in a readable form, with its unit."""
    if unit == "s":
        for limit, scale, name in ((1e-3, 1e6, "us"), (1, 1e3, "ms")):
            if figure < limit:
                return f"{_number(figure * scale)} {name}"
        return f"{_number(figure)} s"
    if unit == "B":
        return f"{_number(figure / 1e6)} MB"
    if unit == "B/s":
        return f"{_number(figure / 1e9)} GB/s"
    if unit == "%":
        return f"{figure * 100:.1f} %"
    return _number(figure)


def times(ratio: float | None) -> str:
    """Return a ratio with an "x" behind it; '' for None."""
    if ratio is None:
        return ""
    return (
        f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"
    )


def footnote(machine: Mapping[str, Any]) -> str:
    """Return what must be known of the machine and of the table's columns."""
    share = machine.get("others_cpu_share", 0.0)
    busy = f"; others used {share:.0%} of the machine meanwhile" if share >= 0.05 else ""
    return (
        f"{machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}, UCX "
        f"{machine['ucx']}; {machine.get('seconds', 0)} s{busy}\n"
        f"Limits here: a process wakes another in {machine['wake_up_us']} us, memcpy "
        f"{machine['memcpy_gb_per_s']} GB/s on one core.\n"
        f"better: how many times better {machine['subject']} is than that row, taken round by "
        "round, median.\ncpu/call: CPU time of all workers for a call; cpu: how many times less "
        f"of it {machine['subject']} takes.\nlimit: memcpy and wake-ups alone."
    )


def _quantiles(result: Mapping[str, Any]) -> tuple[str, str, str]:
    unit = result["unit"]
    if result["tail"]:
        return "", "", value(result["p99"], unit)
    if unit != "s":
        return value(result["median"], unit), "", ""
    # Of a handful of samples a high quantile is just the maximum, so it is not shown.
    p95 = value(result["p95"], unit) if result["samples"] >= 20 else ""
    p99 = value(result["p99"], unit) if result["samples"] >= 100 else ""
    return value(result["median"], unit), p95, p99


def _title(target: Mapping[str, Any]) -> str:
    """Return the title of the metric, with the case where the title says nothing without it."""
    title = target["title"]
    return f"{target['case']}: {title.strip()}" if title.startswith(" ") else title


def _of_what(target: Mapping[str, Any]) -> str:
    if target["kind"] == "value":
        return "itself"
    return f"{'cpu, ' if target['kind'] == 'cpu' else ''}against {target['against']}"


def _figure(target: Mapping[str, Any], key: str) -> str:
    figure = target[key]
    if figure is None:
        return "" if key == "aim" else "-"
    return value(figure, target["unit"]) if target["kind"] == "value" else times(figure)


def _met(target: Mapping[str, Any]) -> str:
    if target["met"] is None:
        return "?"
    return "aim" if target["aim_met"] else "met" if target["met"] else "NOT"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, second, *others = cells
    right = "".join(f"{cell:>{width}}" for cell, width in zip(others, widths[2:], strict=True))
    return f"{first:<{widths[0]}}{second:<{widths[1]}}{right}"


def _number(figure: float) -> str:
    digits = 0 if figure >= 99.5 else 1 if figure >= 9.95 else 2
    return f"{figure:.{digits}f}"
