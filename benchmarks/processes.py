"""Worker processes: the driver tells each what to do, through a pipe."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from tests.support.netns import Host, enter_and_run

PATIENCE = 240.0  # s to wait for an answer before calling a worker lost


class WorkerFailed(Exception):
    """A worker raised, ended or does not answer; the text says which worker and why."""


class Worker:
    """A process that holds one object and runs its methods.

    Args:
        name: for messages.
        make: called in the process to make the object; at the top level of a module.
        arguments: for make.
        host: the process runs in its namespaces; None for the driver's.
        tree: start a fresh interpreter that imports packages from this folder; None: fork a server
            that has imported the installed packages, which takes milliseconds.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *arguments: Any,
        host: Host | None = None,
        tree: Path | None = None,
    ) -> None:
        self.name, self._inside = name, host is not None
        serve: Callable[[Connection], None]
        serve = functools.partial(_serve, make=make, arguments=arguments)
        if host is not None:
            serve = functools.partial(enter_and_run, host.holder, serve)
        self.process, self.pipe = _forked(serve) if tree is None else _fresh(serve, tree)
        pid = self.process.pid
        assert pid is not None
        self._pid = pid

    def start(self, method: str, *arguments: Any) -> None:
        """Start a method of the object in the process."""
        try:
            self.pipe.send((method, arguments))
        except OSError:
            raise WorkerFailed(f"{self.name} is gone, exit code {self.exitcode()}") from None

    def result(self) -> Any:
        """Wait for the method that runs in the process; return what it returns."""
        if not self.pipe.poll(PATIENCE):
            raise WorkerFailed(f"{self.name} did not answer in {PATIENCE:.0f} s")
        try:
            value, error = self.pipe.recv()
        except (EOFError, OSError):
            raise WorkerFailed(f"{self.name} ended, exit code {self.exitcode()}") from None
        if error:
            raise WorkerFailed(f"{self.name} raised {error}")
        return value

    def run(self, method: str, *arguments: Any) -> Any:
        """start() and result()."""
        self.start(method, *arguments)
        return self.result()

    def exitcode(self) -> int | None:
        """Return the exit code; None while the process runs."""
        self.process.join(1)
        return self.process.exitcode

    @functools.cached_property
    def pid(self) -> int:
        """The process id in the driver's namespace; known once the process has answered."""
        if not self._inside:
            return self._pid
        # A process that enters a pid namespace stays outside; its first child is inside.
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        return int(children[0])

    def close(self) -> None:
        """Ask the process to end; kill it if it does not."""
        self.pipe.close()
        self.process.join(5)
        self.process.kill()
        self.process.join()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that all threads of a process have used, s; 0 if it does not exist."""
    # The clock id that clock_getcpuclockid(3) returns for a process; Python lacks that function.
    # The clock counts nanoseconds, /proc only hundredths of a second.
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


class _Process(Protocol):
    """The part of multiprocessing.Process that Worker uses."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


class _Fresh:
    """A process of a fresh interpreter, with the interface of _Process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.pid, self.kill = process, process.pid, process.kill

    @property
    def exitcode(self) -> int | None:
        return self.process.poll()

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)


def _forked(serve: Callable[[Connection], None]) -> tuple[_Process, Connection]:
    context = multiprocessing.get_context("forkserver")
    # Installed packages only: the fork server does not have the driver's sys.path.
    context.set_forkserver_preload(["torch.distributed.rpc", "torch_rpc_ext.options"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _fresh(serve: Callable[[Connection], None], tree: Path) -> tuple[_Process, Connection]:
    ours, theirs = multiprocessing.Pipe()
    end = theirs.fileno()
    command = [sys.executable, "-m", "benchmarks.processes", str(end)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Python looks for packages first in the current folder, cwd.
    process = subprocess.Popen(command, cwd=tree, env=environment, pass_fds=[end])
    theirs.close()
    ours.send(serve)
    return _Fresh(process), ours


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    held: Any = None
    while True:
        try:
            method, given = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            # The object is made at the first request, so that an error reaches the driver as an
            # answer.
            held = make(*arguments) if held is None else held
            pipe.send((getattr(held, method)(*given), None))
        except Exception as error:
            traceback.print_exc()  # the whole traceback for the user; the record has no paths
            pipe.send((None, "".join(traceback.format_exception_only(error)).strip()))


if __name__ == "__main__":
    _pipe = Connection(int(sys.argv[1]))
    _pipe.recv()(_pipe)
