"""tests/support/trace.py: it sees what waits for a device, and looks only at the calls."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import trace


def event(name: str, ts: float, cat: str = "cuda_runtime", dur: float = 1) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7}


def test_calls_of_cuda_within_the_calls(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        event("cudaDeviceSynchronize", 99.0),  # before
        event("cudaStreamWaitEvent", 130.0),
        event("cudaLaunchKernel", 110.0),
        event("cuLaunchKernel", 120.0, "cuda_driver"),
        event(trace.CALLS, 100.0, "user_annotation", 50),
        event(trace.CALLS, 100.0, "gpu_user_annotation", 70),
        event("aten::add", 125.0, "cpu_op"),
        event("cudaDeviceSynchronize", 150.0),  # the profiler's own
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    names = trace.cuda_calls(path)
    assert names == ["cudaLaunchKernel", "cuLaunchKernel", "cudaStreamWaitEvent"]
    assert trace.waits_in(names) == []


def test_what_waits() -> None:
    waits = [
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cuEventSynchronize",
        "cudaMemcpy",
        "cudaFree",
    ]
    others = ["cudaMemcpyAsync", "cudaFreeAsync", "cudaEventQuery", "cudaStreamWaitEvent"]
    assert trace.waits_in([*others, *waits]) == waits
