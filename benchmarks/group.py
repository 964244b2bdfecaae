"""A group of workers of one back end; the driver runs methods of Member on the workers."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.backends.interface import Backend, Place
from benchmarks.processes import Worker, cpu_seconds
from tests.support.netns import Host


class Member:
    """The object of a worker process: its side of the back end.

    Args:
        backend: name in BACKENDS.
        place: the worker's place in the group.
    """

    def __init__(self, backend: str, place: Place) -> None:
        from benchmarks.backends import BACKENDS

        self.backend: Backend = BACKENDS[backend]()
        self.place = place
        self.before = (0, 0)

    def prepare(self) -> None:
        """Do nothing: afterwards the process exists and has imported what a program imports."""
        importlib.import_module("benchmarks.functions")
        self.before = _footprint()

    def start(self) -> tuple[float, float]:
        """Join the group; return (begin, end) of that, s on the machine's clock."""
        return _timed(lambda: self.backend.start(self.place))

    def stop(self) -> tuple[float, float]:
        """Leave the group; return as start() does."""
        return _timed(self.backend.stop)

    def call_all(self) -> tuple[float, float]:
        """Call every other worker once, which opens all connections; return as start() does."""
        return _timed(self._call_all)

    def helpers(self) -> list[int]:
        """Return the ids of further processes that work for this one."""
        return self.backend.helpers()

    def _call_all(self) -> None:
        # Each worker begins with the next rank, so that they do not all call the same worker.
        for distance in range(1, self.place.size):
            self.backend.call((self.place.rank + distance) % self.place.size, "nothing")

    def growth(self) -> tuple[int, int]:
        """Return how many private bytes and file descriptors have come since prepare()."""
        memory, fds = _footprint()
        return memory - self.before[0], fds - self.before[1]

    def measure(self, case: str) -> dict[str, list[float]]:
        """Run a round of a case, with this worker as the caller; return the round's figures."""
        from benchmarks.cases import CASES
        from benchmarks.cases.interface import CallCase

        found = CASES[case]
        assert isinstance(found, CallCase), case
        return found.measure(self.backend)


def _timed(action: Callable[[], None]) -> tuple[float, float]:
    begin = time.monotonic()
    action()
    return begin, time.monotonic()


def _footprint() -> tuple[int, int]:
    process = psutil.Process()
    return int(process.memory_full_info().uss), int(process.num_fds())


class Group:
    """Workers of one back end, ready to start(), or started as a context manager.

    Args:
        backend: name in BACKENDS.
        size: number of workers.
        hosts: worker 0 runs on the first, all others on the second; None for this host.
        tree: folder with the packages to import; None for the installed packages.
    """

    def __init__(
        self,
        backend: str,
        size: int = 2,
        *,
        hosts: tuple[Host, Host] | None = None,
        tree: Path | None = None,
    ) -> None:
        self.backend = backend
        self._helpers: list[int] = []
        self._folder = tempfile.TemporaryDirectory(prefix="rpc_bench_")
        rendezvous = os.path.join(self._folder.name, "store")
        self.workers = []
        for rank in range(size):
            host = hosts[min(rank, 1)] if hosts else None
            network = (host.ipv4, "eth0") if host else ("", "")
            place = Place(rank, size, rendezvous, *network)
            name = f"{backend}'s worker {rank}"
            self.workers.append(Worker(name, Member, backend, place, host=host, tree=tree))

    def __enter__(self) -> Group:
        try:
            self.run_all("prepare")
            self.run_all("start")
            self._helpers = [pid for pids in self.run_all("helpers") for pid in pids]
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
        return self.run_on(range(len(self.workers)), method)

    def run_on(self, ranks: Iterable[int], method: str, *arguments: Any) -> list[Any]:
        """Run a method of Member on some workers at once."""
        chosen = [self.workers[rank] for rank in ranks]
        for worker in chosen:
            worker.start(method, *arguments)
        return [worker.result() for worker in chosen]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all workers and their helpers so far, s."""
        return sum(map(cpu_seconds, (*(worker.pid for worker in self.workers), *self._helpers)))

    def close(self) -> None:
        """End the processes; those that do not answer are killed."""
        for worker in self.workers:
            worker.close()
        self._folder.cleanup()
