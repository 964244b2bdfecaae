"""The merged trace as a picture: a band for each worker, time from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch_rpc_ext.profiler import chrome
from torch_rpc_ext.profiler.clocks import Clock
from torch_rpc_ext.profiler.records import Call, Execution, Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]

_CALL, _QUEUE, _EXECUTION, _OPERATOR = "#4c78a8", "#e45756", "#f58518", "#9aa0a6"
_HEIGHT = 0.8
# Only so many calls get arrows: more arrows would hide what they connect.
_MOST_ARROWS = 400
# Width of a character, as a part of the whole width: a bar gets its name only if the name fits.
_CHARACTER = 0.0055


def draw(
    recordings: Mapping[str, Recording], clocks: Mapping[str, Clock], begin_ns: int, end_ns: int
) -> Figure:
    """Draw the trace.

    Args:
        recordings: by worker.
        clocks: by worker.
        begin_ns: of the profile, on the clock of the worker that profiled.
        end_ns: as begin_ns.

    Returns:
        A matplotlib figure: calls blue, executions orange with their time in the queue red,
        operators grey (a row for each thread), requests as blue arrows, responses as orange ones.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise ImportError(
            "the picture needs matplotlib: pip install 'torch-rpc-ext[profiler]'"
        ) from problem
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    canvas = _Canvas(axes, (end_ns - begin_ns) / 1e6)
    calls: dict[int, tuple[float, chrome.Span]] = {}
    executions: dict[int, tuple[float, chrome.Span]] = {}
    for name, recording in sorted(recordings.items()):
        canvas.begin_band(name)
        to_ours = clocks[name].to_ours
        calls |= canvas.rows("calls", recording.calls, to_ours, (begin_ns, end_ns), _CALL)
        executions |= canvas.rows(
            "serves", recording.executions, to_ours, (begin_ns, end_ns), _EXECUTION
        )
        canvas.operators(chrome.operator_events(recording, clocks[name], begin_ns), recording.pid)
    canvas.arrows(calls, executions)
    error = max((clock.error_ns for clock in clocks.values()), default=0) / 1e3
    canvas.finish(f"ms; clocks of the workers aligned within {error:.0f} us")
    figure.set_size_inches(14, 1.2 + 0.32 * canvas.row)
    return figure


class _Canvas:
    """Rows from top to bottom.

    Args:
        axes: of matplotlib.
        width: of the time axis, ms.
    """

    def __init__(self, axes: Any, width: float) -> None:
        self._axes, self._width = axes, width
        self.row = 0
        self._labels: dict[int, str] = {}

    def begin_band(self, worker: str) -> None:
        """Begin the band of a worker."""
        if self.row:
            self._axes.axhline(self.row, color="black", linewidth=0.5)
        self._labels[self.row] = worker
        self.row += 1

    def rows(
        self,
        label: str,
        entries: Iterable[Call | Execution],
        to_ours: Any,
        profile_ns: tuple[int, int],
        colour: str,
    ) -> dict[int, tuple[float, chrome.Span]]:
        """Draw calls or executions; return id -> (y, span)."""
        placed = chrome.spans(entries, to_ours, *profile_ns)
        first = self.row
        if not placed:
            return {}
        self._labels[first] = label
        tracks: dict[int, list[chrome.Span]] = {}
        for span in placed.values():
            tracks.setdefault(span.track, []).append(span)
        self.row += len(tracks)
        for track, there in tracks.items():
            self._bars(first + track, [span.queued for span in there], _QUEUE)
            self._bars(first + track, [(span.begin, span.end) for span in there], colour)
        for span in placed.values():
            self._name(span, first + span.track + 0.5)
        return {id: (first + span.track + 0.5, span) for id, span in placed.items()}

    def _bars(self, row: int, times: Iterable[tuple[int, int]], colour: str) -> None:
        bars = [(begin / 1e6, (end - begin) / 1e6) for begin, end in times if end > begin]
        self._axes.broken_barh(
            bars, (row + 0.1, _HEIGHT), color=colour, edgecolor="white", linewidth=0.5
        )

    def operators(self, events: Iterable[chrome.Event], pid: int) -> None:
        """Draw the operators that ran on the CPU: a row for each thread, bars without names."""
        threads: dict[Any, list[tuple[float, float]]] = {}
        for event in events:
            if event.get("cat") == "cpu_op" and event["pid"] == pid:
                bar = (event["ts"] / 1e3, event["dur"] / 1e3)
                threads.setdefault(event["tid"], []).append(bar)
        for number, bars in enumerate(threads.values()):
            self._axes.broken_barh(bars, (self.row + 0.1, _HEIGHT), color=_OPERATOR, linewidth=0)
            self._labels[self.row] = "operators" if number == 0 else ""
            self.row += 1

    def arrows(
        self,
        calls: Mapping[int, tuple[float, chrome.Span]],
        executions: Mapping[int, tuple[float, chrome.Span]],
    ) -> None:
        """Connect calls with executions."""
        requests: list[tuple[float, ...]] = []
        responses: list[tuple[float, ...]] = []
        for id in sorted(calls.keys() & executions.keys())[:_MOST_ARROWS]:
            (at, call), (there, execution) = calls[id], executions[id]
            arrival = execution.queued[0]
            requests.append((call.begin, at, arrival - call.begin, there - at))
            if call.entry.end_ns and execution.entry.end_ns:
                responses.append((execution.end, there, call.end - execution.end, at - there))
        for arrows, colour in ((requests, _CALL), (responses, _EXECUTION)):
            if arrows:
                x, y, width, height = zip(*arrows, strict=True)
                self._axes.quiver(
                    *([ns / 1e6 for ns in x], y, [ns / 1e6 for ns in width], height),
                    **{"angles": "xy", "scale_units": "xy", "scale": 1, "width": 8e-4},
                    **{"headwidth": 8, "headlength": 9, "color": colour, "zorder": 3},
                )

    def finish(self, label: str) -> None:
        """Set the axes."""
        self._axes.set_ylim(self.row, 0)
        self._axes.set_xlim(0, self._width)
        self._axes.set_yticks([row + 0.5 for row in self._labels], list(self._labels.values()))
        for tick, row in zip(self._axes.get_yticklabels(), self._labels, strict=True):
            if self._labels[row] not in ("calls", "serves", "operators", ""):
                tick.set_fontweight("bold")
        self._axes.set_xlabel(label)
        colours = {"call": _CALL, "queue": _QUEUE, "execution": _EXECUTION, "operator": _OPERATOR}
        for what, colour in colours.items():
            self._axes.bar(0, 0, color=colour, label=what)
        self._axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
        self._axes.spines[["top", "right"]].set_visible(False)

    def _name(self, span: chrome.Span, y: float) -> None:
        name = span.entry.function.rpartition(".")[2]
        # The part that the picture shows: an entry may reach beyond the profile.
        begin, end = max(span.begin / 1e6, 0), min(span.end / 1e6, self._width)
        if end - begin > len(name) * _CHARACTER * self._width:
            self._axes.text(
                (begin + end) / 2, y, name, ha="center", va="center", fontsize=7, color="white"
            )
