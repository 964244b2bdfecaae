"""A group of workers of one back end, and what the driver has it do."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from types import TracebackType
from typing import Any

import psutil

from benchmarks.backends.interface import Backend, Place
from benchmarks.processes import Worker


class Member:
    """What a worker process holds: its side of the back end.

    Args:
        backend: name in BACKENDS.
        place: its place in the group.
    """

    def __init__(self, backend: str, place: Place) -> None:
        from benchmarks.backends import BACKENDS

        self.backend: Backend = BACKENDS[backend]()
        self.place = place
        self.before = (0, 0)

    def prepare(self) -> None:
        """Nothing but being there, with all imported that a program would import."""
        importlib.import_module("benchmarks.functions")
        self.before = _footprint()

    def start(self) -> tuple[float, float]:
        """Join the group; returns when that began and ended, s on the machine's clock."""
        begin = time.monotonic()
        self.backend.start(self.place)
        return begin, time.monotonic()

    def stop(self) -> None:
        """Leave the group."""
        self.backend.stop()

    def call_all(self) -> None:
        """Call every other worker once, so that all connections there are exist."""
        for rank in range(self.place.size):
            if rank != self.place.rank:
                self.backend.call(rank, "nothing")

    def growth(self) -> tuple[int, int]:
        """Return private bytes and file descriptors that came since prepare()."""
        memory, fds = _footprint()
        return memory - self.before[0], fds - self.before[1]

    def measure(self, case: str) -> dict[str, list[float]]:
        """Run one round of a case from here; returns its figures."""
        from benchmarks.cases import CASES
        from benchmarks.cases.interface import CallCase

        found = CASES[case]
        assert isinstance(found, CallCase), case
        return found.measure(self.backend)


def _footprint() -> tuple[int, int]:
    process = psutil.Process()
    return int(process.memory_full_info().uss), int(process.num_fds())


class Group:
    """Workers of one back end, ready to start(), or started as a context manager.

    Args:
        backend: name in BACKENDS.
        size: number of workers.
    """

    def __init__(self, backend: str, size: int = 2) -> None:
        self.backend = backend
        self._folder = tempfile.TemporaryDirectory(prefix="rpc_bench_")
        rendezvous = os.path.join(self._folder.name, "store")
        self.workers = [
            Worker(f"{backend}'s worker {rank}", Member, backend, Place(rank, size, rendezvous))
            for rank in range(size)
        ]

    def __enter__(self) -> Group:
        try:
            self.run_all("prepare")
            self.run_all("start")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.run_all("stop")
        finally:
            self.close()

    def run_all(self, method: str) -> list[Any]:
        """Run a method of Member on all workers at once."""
        for worker in self.workers:
            worker.start(method)
        return [worker.result() for worker in self.workers]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all workers so far, s."""
        return sum(worker.cpu_seconds() for worker in self.workers)

    def close(self) -> None:
        """End the processes; gently where they answer."""
        for worker in self.workers:
            worker.close()
        self._folder.cleanup()
