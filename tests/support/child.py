"""Child processes for tests: forked from a server that has torch and upstream's suites loaded.

A child gets the environment that its parent has when it starts the child. It writes stdout and
stderr to a file, dies with the fork server (and so with pytest), and on SIGUSR2 writes the Python
stacks of its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import operator
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from tests.support.backend import ROOT

_CONTEXT = multiprocessing.get_context("forkserver")
_PR_SET_PDEATHSIG = 1
# One thread each, as torchrun starts processes: then no thread of the server can hold a lock when
# the server forks. And threads of OpenMP wait for each other by spinning: where others have the
# cores, each operator on a large tensor would take a time slice.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# The suites ask for GPUs when they are imported. With this, torch asks NVML: a process that has
# asked CUDA has children that cannot use CUDA.
_NO_CUDA_YET = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def ensure_server() -> None:
    """Start the fork server if it does not run yet. That takes as long as importing torch and the
    suites."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    before = dict(os.environ)
    os.environ.update(ONE_THREAD | _NO_CUDA_YET, PYTHONPATH=path)
    try:
        _CONTEXT.set_forkserver_preload(["tests.support.preload"])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class Child:
    """A process and its output.

    Owns: the process and the file of its output. close() ends the process and removes the file.
    Thread: the one that made it.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        ensure_server()
        handle, log = tempfile.mkstemp(prefix="rpc_test_", suffix=".log")
        os.close(handle)
        self.name = name
        self.log = Path(log)
        environment = {**os.environ, **ONE_THREAD, **(env or {})}
        self.process = _CONTEXT.Process(
            target=_enter,
            name=name,
            args=(log, environment, target, args, dict(kwargs or {})),
            daemon=False,
        )

    def start(self) -> None:
        """Fork the process."""
        self.process.start()

    # The part of multiprocessing.Process that upstream's MultiProcessTestCase uses.

    @property
    def pid(self) -> int:
        """The process id. Call start() first."""
        pid = self.process.pid
        assert pid is not None, f"{self.name} was not started"
        return pid

    @property
    def exitcode(self) -> int | None:
        """None while the process runs; -N if signal N ended it."""
        return self.process.exitcode

    def terminate(self) -> None:
        """Send SIGKILL. Tests need no orderly end here."""
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self.process.pid is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def output(self) -> str:
        """What the process wrote so far, after a line with its name and how it ended."""
        text = self.log.read_text(errors="replace").rstrip() if self.log.exists() else ""
        end = "running" if self.exitcode is None else f"exit code {self.exitcode}"
        return f"---- {self.name} (pid {self.process.pid}, {end}) ----\n{text or '(no output)'}"

    def close(self) -> None:
        """Kill the process if it still runs, reap it, and remove its output."""
        if self.process.pid is not None:
            self.terminate()
            self.process.join(10)
            if self.process.exitcode is not None:
                self.process.close()
        self.log.unlink(missing_ok=True)


def wait_for_end(
    children: Iterable[Child], seconds: float, stop: Callable[[Child], bool] | None = None
) -> bool:
    """Wait for children. Returns True when all have ended; False when the time is over, or when
    ``stop`` returns True for a child that ended."""
    waiting = {child.process.sentinel: child for child in children}
    deadline = time.monotonic() + seconds
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        for sentinel in connection.wait(list(waiting), left):
            assert isinstance(sentinel, int)
            if stop is not None and stop(waiting.pop(sentinel)):
                return False
            waiting.pop(sentinel, None)
    return True


def dump_stacks(children: Iterable[Child], seconds: float = 5) -> None:
    """Make the children that still run write the stacks of their threads to their output; wait
    until the output of each has grown, and grows no more, for a few seconds at most."""
    running = [child for child in children if child.exitcode is None]
    before = now = [child.log.stat().st_size for child in running]
    for child in running:
        child.signal(signal.SIGUSR2)
    deadline = time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        time.sleep(0.2)
        earlier, now = now, [child.log.stat().st_size for child in running]
        if now == earlier and all(map(operator.gt, now, before)):
            break


def _enter(
    log: str,
    environment: Mapping[str, str],
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Runs first in a child."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    try:
        target(*args, **kwargs)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
