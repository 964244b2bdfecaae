"""Worker processes: the driver tells each what to do, through a pipe.

Owns: the processes; those that did not leave by themselves are killed by close().
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PATIENCE = 120.0  # s to wait for an answer before calling a worker lost


class WorkerFailed(Exception):
    """A worker raised, ended or does not answer; the text says which and why."""


class Worker:
    """A process that holds one object and runs its methods.

    Args:
        name: for messages.
        make: what makes the object, there; module-level.
        arguments: for make.
    """

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("forkserver")
        # Installed packages only: the fork server does not have our sys.path.
        context.set_forkserver_preload(["torch.distributed.rpc", "torch_rpc_ext.options"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()
        pid = self.process.pid
        assert pid is not None
        self.pid = pid

    def start(self, method: str, *arguments: Any) -> None:
        """Start a method of the object there."""
        try:
            self.pipe.send((method, arguments))
        except OSError:
            raise WorkerFailed(f"{self.name} is gone, exit code {self.exitcode()}") from None

    def result(self) -> Any:
        """Wait for the method that runs there; returns what it returns."""
        if not self.pipe.poll(PATIENCE):
            raise WorkerFailed(f"{self.name} did not answer in {PATIENCE:.0f} s")
        try:
            value, error = self.pipe.recv()
        except (EOFError, OSError):
            raise WorkerFailed(f"{self.name} ended, exit code {self.exitcode()}") from None
        if error:
            raise WorkerFailed(f"{self.name} raised:\n{error}")
        return value

    def run(self, method: str, *arguments: Any) -> Any:
        """start() and result()."""
        self.start(method, *arguments)
        return self.result()

    def exitcode(self) -> int | None:
        """Return how it ended; None if it has not."""
        self.process.join(1)
        return self.process.exitcode

    def cpu_seconds(self) -> float:
        """Return the CPU time that all its threads have used, s."""
        # CPUCLOCK_SCHED of another process, clock_getcpuclockid(3), which Python does not have:
        # nanoseconds, where /proc has hundredths of a second.
        return time.clock_gettime((~self.pid << 3) | 2)

    def close(self) -> None:
        """Let it leave, or kill it."""
        self.pipe.close()
        self.process.join(5)
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    held: Any = None
    while True:
        try:
            method, given = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            # Made with the first request, so that its errors reach the driver as an answer.
            held = make(*arguments) if held is None else held
            pipe.send((getattr(held, method)(*given), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
