"""A group of workers of one back end, and what the driver has it do."""

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
        return _timed(lambda: self.backend.start(self.place))

    def stop(self) -> tuple[float, float]:
        """Leave the group; returns as start() does."""
        return _timed(self.backend.stop)

    def call_all(self) -> tuple[float, float]:
        """Call every other worker once, so that all connections there are exist; returns as start()
        does."""
        return _timed(self._call_all)

    def helpers(self) -> list[int]:
        """Return the ids of further processes that work for this one."""
        return self.backend.helpers()

    def _call_all(self) -> None:
        # Each begins with the one after it, so that not all call the same.
        for distance in range(1, self.place.size):
            self.backend.call((self.place.rank + distance) % self.place.size, "nothing")

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
        hosts: worker 0 goes to the first, all others to the second; None for this one.
        tree: folder with the packages to import; None for those that are installed.
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
        """End the processes; gently where they answer."""
        for worker in self.workers:
            worker.close()
        self._folder.cleanup()
