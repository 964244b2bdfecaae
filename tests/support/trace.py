"""Finds CUDA calls of a process in a trace of torch.profiler."""

from __future__ import annotations

import json
from pathlib import Path

#: The name of the record_function() around the calls to look at. Calls outside of it do not count,
#: because the profiler itself synchronises at its end.
CALLS = "the calls"
#: Functions of the runtime and the driver that wait for a device have one of these in their names.
_WAITS = ("Synchronize", "cudaMemcpy(", "cudaFree(")


def cuda_calls(path: Path) -> list[str]:
    """Return the names of the CUDA functions that any thread has called within CALLS, in order."""
    events = json.loads(path.read_text())["traceEvents"]
    [whole] = [
        event
        for event in events
        if event.get("name") == CALLS and event.get("cat") == "user_annotation"
    ]
    begin, end = whole["ts"], whole["ts"] + whole["dur"]
    inside = [
        event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= event["ts"] < end
    ]
    return [event["name"] for event in sorted(inside, key=lambda event: float(event["ts"]))]


def waits_in(names: list[str]) -> list[str]:
    """Return the calls of cuda_calls() that wait for a device. Copies that may wait and allocations
    by CUDA count as well: neither should happen in a call that is not the first."""
    return [name for name in names if any(part in f"{name}(" for part in _WAITS)]
