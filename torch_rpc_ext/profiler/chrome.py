"""One Chrome trace of all workers, with arrows from calls to executions and back.

Each worker is a process of the trace. Slices of a track must not overlap, but calls and executions
do, so they are spread over as many tracks ("calls", "serves") as necessary. Before an execution, on
the same track, is its time in the queue.

Source: "Trace Event Format" (Google), which https://ui.perfetto.dev reads.
"""

from __future__ import annotations

import heapq
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch_rpc_ext.profiler.clocks import Clock
from torch_rpc_ext.profiler.records import Call, Execution, Recording

__all__ = ["Event", "Span", "merge", "operator_events", "spans"]

# Numbers of our tracks; no native thread id is as large.
_CALLS, _SERVES = 1_000_000_000, 2_000_000_000
# Of a worker's trace of operators: some 10 million events. A few megabytes that a worker sends can
# expand to many gigabytes.
_MOST_OPERATOR_BYTES = 2 << 30
_KEPT_PHASES = ("X", "s", "t", "f", "i", "M")
_KEPT_METADATA = ("thread_name", "thread_sort_index", "process_sort_index")

Event = dict[str, Any]


class Span:
    """A call or an execution on its way into a picture.

    Args:
        entry: the call or execution.
        queued: of an execution, (begin, end) of its wait for a thread, ns since the profile began;
            (begin, begin) where there was none.
        begin: when it began, ns since the profile began.
        end: when it ended, or the end of the profile where it had not ended.
    """

    def __init__(
        self, entry: Call | Execution, queued: tuple[int, int], begin: int, end: int
    ) -> None:
        self.entry, self.queued = entry, queued
        self.begin, self.end = begin, end
        #: Number of the track, from 0.
        self.track = 0


def spans(
    entries: Iterable[Call | Execution], to_ours: Callable[[int], int], begin_ns: int, end_ns: int
) -> dict[int, Span]:
    """Place entries on tracks such that those of one track do not overlap.

    Args:
        entries: of one worker.
        to_ours: converts the worker's times to ours.
        begin_ns: begin of the profile, which is time 0.
        end_ns: end of the profile, for entries that had not ended.

    Returns:
        id of the call -> span.
    """
    placed: dict[int, Span] = {}
    busy: list[tuple[int, int]] = []  # a heap: end of the track's last span, track
    free: list[int] = []  # a heap of the other tracks
    unplaced = [_unplaced(entry, to_ours, begin_ns, end_ns) for entry in entries]
    for span in sorted(unplaced, key=lambda span: span.queued[0]):
        while busy and busy[0][0] <= span.queued[0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        span.track = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end, span.track))
        placed[span.entry.id] = span
    return placed


def _unplaced(
    entry: Call | Execution, to_ours: Callable[[int], int], begin_ns: int, end_ns: int
) -> Span:
    begin = to_ours(entry.begin_ns) - begin_ns
    end = max(begin, to_ours(entry.end_ns) - begin_ns if entry.end_ns else end_ns - begin_ns)
    queued = (begin, begin)
    if isinstance(entry, Execution) and entry.arrival_ns:
        queued = (to_ours(entry.arrival_ns) - begin_ns, to_ours(entry.start_ns) - begin_ns)
    return Span(entry, queued, begin, end)


def merge(
    recordings: Mapping[str, Recording], clocks: Mapping[str, Clock], begin_ns: int, end_ns: int
) -> dict[str, Any]:
    """Return the trace.

    Args:
        recordings: by worker.
        clocks: by worker.
        begin_ns: of the profile, on the clock of the worker that profiled.
        end_ns: as begin_ns.

    Returns:
        The trace, to be written as JSON.
    """
    events: list[Event] = []
    calls: dict[int, tuple[int, Span]] = {}
    executions: dict[int, tuple[int, Span]] = {}
    for number, (name, recording) in enumerate(sorted(recordings.items())):
        # Numbers far apart: in torch.profiler's trace a worker's CUDA devices are processes too.
        process = (number + 1) * 1000
        clock = clocks[name]
        of_calls = spans(recording.calls, clock.to_ours, begin_ns, end_ns)
        of_executions = spans(recording.executions, clock.to_ours, begin_ns, end_ns)
        calls.update({id: (process, span) for id, span in of_calls.items()})
        executions.update({id: (process, span) for id, span in of_executions.items()})
        events.append(_metadata("process_name", process, 0, name=_title(recording)))
        events.append(_metadata("process_sort_index", process, 0, sort_index=process))
        events += _track_names(process, _CALLS, "calls", of_calls)
        events += _track_names(process, _SERVES, "serves", of_executions)
        events += _operators(recording, process, clock, begin_ns)
    events += [_call_event(*placed) for placed in calls.values()]
    events += [_queue_event(*placed) for placed in executions.values() if _was_queued(placed[1])]
    events += [_execution_event(*placed) for placed in executions.values()]
    for id in calls.keys() & executions.keys():
        events += _arrows(calls[id], executions[id])
    return {
        "traceEvents": sorted(events, key=_place),
        "displayTimeUnit": "ms",
        "otherData": {
            "clock_error_us": {name: clock.error_ns / 1e3 for name, clock in clocks.items()}
        },
    }


def _place(event: Event) -> tuple[bool, float, float]:
    """Return a sort key: metadata first, then by time; at equal times the longer slice first."""
    return event["ph"] != "M", event.get("ts", 0), -event.get("dur", -1)


def _title(recording: Recording) -> str:
    return f"{recording.worker} ({recording.host}:{recording.pid})"


def _metadata(kind: str, process: int, track: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}


def _track_names(process: int, first: int, name: str, placed: Mapping[int, Span]) -> list[Event]:
    tracks = {span.track for span in placed.values()}
    return [
        event
        for track in sorted(tracks)
        for event in (
            _metadata("thread_name", process, first + track, name=f"{name} {track + 1}"),
            # Sorted before the threads, and "calls" before "serves".
            _metadata("thread_sort_index", process, first + track, sort_index=first - 3 * 10**9),
        )
    ]


def _slice(
    name: str, category: str, process: int, track: int, time: tuple[int, int], args: Event
) -> Event:
    begin, end = time
    return {
        **{"ph": "X", "name": name, "cat": category, "pid": process, "tid": track},
        **{"ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": args},
    }


def _call_event(process: int, span: Span) -> Event:
    call = span.entry
    assert isinstance(call, Call)
    args = {
        **{"call": call.id, "kind": call.kind, "to": call.to, "sent_bytes": call.sent_bytes},
        **({"made_during_call": call.parent} if call.parent else {}),
        **_outcome(call),
    }
    name = f"{call.function} -> {call.to}"
    time = (span.begin, span.end)
    return _slice(name, "rpc.call", process, _CALLS + span.track, time, args)


def _was_queued(span: Span) -> bool:
    return span.queued[1] > span.queued[0]


def _queue_event(process: int, span: Span) -> Event:
    execution = span.entry
    assert isinstance(execution, Execution)
    args = {"call": execution.id, "caller": execution.caller}
    return _slice("queue", "rpc.queue", process, _SERVES + span.track, span.queued, args)


def _execution_event(process: int, span: Span) -> Event:
    execution = span.entry
    assert isinstance(execution, Execution)
    args = {
        **{"call": execution.id, "caller": execution.caller, "thread": execution.thread},
        **{"result_bytes": execution.result_bytes},
        **_outcome(execution),
    }
    if execution.arrival_ns:
        args |= {
            "queue_us": execution.queue_ns / 1e3,
            "gil_wait_us": execution.gil_wait_ns / 1e3,
        }
    name = f"{execution.function} <- {execution.caller}"
    time = (span.begin, span.end)
    return _slice(name, "rpc.execution", process, _SERVES + span.track, time, args)


def _outcome(entry: Call | Execution) -> Event:
    if not entry.end_ns:
        return {"outcome": "had not ended"}
    return {"outcome": entry.error or "ok"}


def _arrows(call: tuple[int, Span], execution: tuple[int, Span]) -> list[Event]:
    caller, calling = call
    callee, running = execution
    out, back = (caller, _CALLS + calling.track), (callee, _SERVES + running.track)
    made = [
        _arrow("s", "request", calling.entry.id, out, calling.begin),
        _arrow("f", "request", calling.entry.id, back, running.begin),
    ]
    if _was_queued(running):
        made.insert(1, _arrow("t", "request", calling.entry.id, back, running.queued[0]))
    if calling.entry.end_ns and running.entry.end_ns:
        # An arrow belongs to the slice that its time lies in, so it is set 1 ns before the end.
        made += [
            _arrow("s", "response", calling.entry.id, back, max(running.begin, running.end - 1)),
            _arrow("f", "response", calling.entry.id, out, max(calling.begin, calling.end - 1)),
        ]
    return made


def _arrow(phase: str, name: str, id: int, place: tuple[int, int], at: int) -> Event:
    event = {
        **{"ph": phase, "name": name, "cat": f"rpc.{name}", "id": f"{name} {id}"},
        **{"pid": place[0], "tid": place[1], "ts": at / 1e3},
    }
    return {**event, "bp": "e"} if phase == "f" else event


def operator_events(recording: Recording, clock: Clock, begin_ns: int) -> Iterator[Event]:
    """Yield the events of torch.profiler's trace, with times as in the merged trace, us.

    Raises:
        ValueError: the trace is too large, or not what a worker's torch.profiler writes.
    """
    if not recording.operators:
        return
    trace = json.loads(_decompressed(recording))
    base = int(trace.get("baseTimeNanoseconds", 0))
    for event in trace["traceEvents"]:
        if event.get("ph") not in _KEPT_PHASES or not isinstance(event.get("pid"), int):
            continue
        if event["ph"] != "M":
            theirs = round(event["ts"] * 1000) + base - recording.epoch_ns
            event["ts"] = (clock.to_ours(theirs) - begin_ns) / 1e3
        yield event


def _decompressed(recording: Recording) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(recording.operators, _MOST_OPERATOR_BYTES)
    except zlib.error as problem:
        raise ValueError(f"the operators of worker {recording.worker}: {problem}") from None
    if not decompressor.eof:
        raise ValueError(
            f"the operators of worker {recording.worker} take more than "
            f"{_MOST_OPERATOR_BYTES >> 20} MiB, or are not complete: profile a shorter time, or "
            "profile(operators=False)"
        )
    return text


def _operators(recording: Recording, process: int, clock: Clock, begin_ns: int) -> Iterator[Event]:
    devices: set[int] = set()
    for event in operator_events(recording, clock, begin_ns):
        if event["ph"] == "M" and event["name"] not in _KEPT_METADATA:
            continue
        if event["pid"] == recording.pid:
            event["pid"] = process
            if event["name"] == "process_sort_index":
                continue
        else:
            device = event["pid"]
            event["pid"] = process + 1 + device
            if device not in devices:
                devices.add(device)
                yield _metadata(
                    "process_name", event["pid"], 0, name=f"{recording.worker} device {device}"
                )
        if "id" in event:
            event["id"] = f"{recording.worker} {event['id']}"
        yield event
