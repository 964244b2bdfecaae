"""What a trace of torch.profiler says about a process's calls of CUDA."""

from __future__ import annotations

import json
from pathlib import Path

#: The record_function() around what is looked at: the profiler itself synchronises at its end.
CALLS = "the calls"
#: Parts of names of the runtime's and the driver's functions that wait for a device.
_WAITS = ("Synchronize", "cudaMemcpy(", "cudaFree(")


def cuda_calls(path: Path) -> list[str]:
    """Return the names of the functions of CUDA that any thread has called within CALLS, in
    order."""
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
    """Return those of them that wait for a device. Copies that may wait, and memory of CUDA itself,
    count: neither belongs into a call that is not the first."""
    return [name for name in names if any(part in f"{name}(" for part in _WAITS)]
