"""What a process costs while nobody calls it: ``python -m benchmarks.applications idle``.

Two processes connect, send each other a tensor, and wait. Then the CPU time of the threads of one
is looked at. A thread that polls takes what the others would need, once there are more processes
than cores.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import Worker
from tests.support.ports import free_port

#: What is looked at -> back end, transports of TENSORPIPE or None for its own choice.
KINDS: dict[str, tuple[str, list[str] | None]] = {
    "tensorpipe": ("TENSORPIPE", None),
    "tensorpipe without shared memory": ("TENSORPIPE", ["uv"]),
    "ucx": ("UCX", None),
}
_SECONDS = 2.0


def measure(kind: str) -> dict[str, float]:
    """Return the cores that each thread of an idle process keeps busy, by its name; the busiest
    first, none below a hundredth.

    Raises:
        WorkerFailed: a process raised or ended.
    """
    with _pair(kind) as workers:
        for worker in workers:
            worker.start("join")
        busy = {worker.name: worker.result() for worker in workers}[workers[0].name]
    found = sorted(busy.items(), key=lambda one: -one[1])
    return {name: round(cores, 2) for name, cores in found if cores >= 0.01}


def text(found: dict[str, dict[str, float]]) -> str:
    """Return a line for each kind."""
    lines = ["cores that an idle process keeps busy, by thread"]
    for kind, threads in found.items():
        busy = ", ".join(f"{name} {cores:.2f}" for name, cores in threads.items()) or "none"
        lines.append(f"  {kind:<36}{busy}")
    return "\n".join(lines)


@contextmanager
def _pair(kind: str) -> Iterator[list[Worker]]:
    port, workers = free_port(), []
    try:
        for rank in range(2):
            workers.append(Worker(f"{kind}'s process {rank}", _Process, kind, rank, port))
        yield workers
    finally:
        for worker in workers:
            worker.close()


class _Process:
    """One of the two."""

    def __init__(self, kind: str, rank: int, port: int) -> None:
        self.kind, self.rank, self.port = kind, rank, port

    def join(self) -> dict[str, float]:
        """Connect, wait, leave; returns the cores that each thread kept busy while waiting."""
        import torch
        import torch.distributed.rpc as rpc

        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        os.environ.pop("TORCH_RPC_BACKEND", None)
        backend, transports = KINDS[self.kind]
        options: Any = None
        if transports is not None:
            options = rpc.TensorPipeRpcBackendOptions(_transports=transports)
        name = f"worker{self.rank}"
        rpc.init_rpc(name, rpc.BackendType[backend], self.rank, 2, rpc_backend_options=options)
        rpc.rpc_sync(1 - self.rank, torch.add, args=(torch.zeros(600_000), 1))
        time.sleep(0.5)  # so that what follows a call is over
        before, begin = _threads(), time.monotonic()
        time.sleep(_SECONDS)
        after, seconds = _threads(), time.monotonic() - begin
        rpc.shutdown()
        busy: dict[str, float] = {}
        for thread, (thread_name, spent) in after.items():
            used = spent - before.get(thread, ("", 0.0))[1]
            busy[thread_name] = busy.get(thread_name, 0.0) + used / seconds
        return busy


def _threads() -> dict[str, tuple[str, float]]:
    """Return name and CPU time, s, of each thread of this process by its id."""
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        head, _, rest = (folder / "stat").read_text().rpartition(")")
        user, system = rest.split()[11:13]
        ticks = os.sysconf("SC_CLK_TCK")
        found[folder.name] = (head.partition("(")[2], (int(user) + int(system)) / ticks)
    return found
