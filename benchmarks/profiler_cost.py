"""What profiling costs: python -m benchmarks.profiler_cost

Measured is an empty Python call between two workers: before the first profile(), then in turns
within a profile() (calls only, and with operators) and after one, when the profiler must cost
nothing. Of each the smallest of the rounds' medians is printed, because other work on the machine
has disturbed that round least.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from typing import Any

import torch.multiprocessing as mp
from torch.distributed import rpc as _untyped_rpc

rpc: Any = _untyped_rpc  # upstream's functions have no types

_CALLS = 400
OFF, CALLS_ONLY, OPERATORS, AFTER = "off", "on, calls only", "on, with operators", "off again"


def nothing() -> None:
    """Do nothing."""


def median_us() -> float:
    """Return the median of many empty calls, us."""
    times = []
    for _ in range(_CALLS):
        begin = time.perf_counter_ns()
        rpc.rpc_sync("worker1", nothing)
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def measure(rounds: int) -> None:
    """Measure in turns, and print."""
    median_us()  # opens connections, starts threads
    found: dict[str, list[float]] = {OFF: [median_us() for _ in range(rounds)]}
    for _ in range(rounds):
        for label, operators in ((CALLS_ONLY, False), (OPERATORS, True), (AFTER, None)):
            found.setdefault(label, []).append(_measure_within(operators))
    base = min(found[OFF])
    for label, values in found.items():
        value = min(values)
        print(f"{label:20} {value:8.1f} us  {value / base:5.2f}x  {value - base:+7.1f} us")


def _measure_within(operators: bool | None) -> float:
    from torch_rpc_ext.profiler import profile

    scope: Any = contextlib.nullcontext() if operators is None else profile(operators=operators)
    with scope:
        return median_us()


def run(rank: int, store: str, backend: str, rounds: int) -> None:
    """Run one of the two workers."""
    import torch_rpc_ext

    made = {"UCX": torch_rpc_ext.UcxRpcBackendOptions}
    options = made.get(backend, rpc.TensorPipeRpcBackendOptions)(init_method=f"file://{store}")
    member = rpc.backend_registry.BackendType[backend]
    rpc.init_rpc(
        f"worker{rank}", backend=member, rank=rank, world_size=2, rpc_backend_options=options
    )
    if rank == 0:
        measure(rounds)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["UCX", "TENSORPIPE"], default="UCX")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (f"{folder}/store", given.backend, given.rounds), 2)
