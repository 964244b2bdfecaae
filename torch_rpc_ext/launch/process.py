"""One worker process, seen from the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing import connection
from typing import Any, ParamSpec, TypeVar

from torch_rpc_ext.launch import _protocol

P = ParamSpec("P")
T = TypeVar("T")

# Lines of output that are kept for the error that says how a worker ended.
_KEPT_LINES = 20
# How often to look whether the process still runs, s; its end is usually seen at once.
_LOOK = 0.5
_START = (
    "import sys; sys.path[:] = {path!r}; from torch_rpc_ext.launch import _worker; "
    "_worker.main({name!r}, {handle}, {parent})"
)


class WorkerExitedError(RuntimeError):
    """A worker's process has ended, so that what was asked of it cannot be done.

    Attributes:
        worker: its name.
        exitcode: of the process; minus the number of a signal that ended it.
    """

    def __init__(self, text: str, worker: str, exitcode: int | None) -> None:
        super().__init__(text)
        self.worker, self.exitcode = worker, exitcode

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerExitedError, (str(self), self.worker, self.exitcode)


class Worker:
    """A process that runs functions, one after the other, in its main thread.

    Owns: the process, the pipe to it and a thread that reads what it sends and prints.
    Thread: any.

    Args:
        name: of the worker.
        env: its environment.
        show: called with the worker's name and a line that it has printed.
    """

    def __init__(self, name: str, env: Mapping[str, str], show: Callable[[str, str], None]) -> None:
        self.name = name
        self._show = show
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._calls: deque[tuple[str, Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._pipe, theirs = connection.Pipe()
        handle = theirs.fileno()
        start = _START.format(
            path=[os.path.abspath(folder) for folder in sys.path],
            name=name,
            handle=handle,
            parent=os.getpid(),
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                env={**env, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[handle],
                # Ctrl-C in a terminal, and Jupyter's interrupt, go to whole process groups.
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._read, name=f"output-{name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "running" if self.exitcode is None else f"exit code {self.exitcode}"
        return f"<Worker {self.name}, pid {self.pid}, {state}>"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs, minus the signal's number when a signal ended it."""
        return self._process.poll()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function there, after those that were submitted before.

        Args:
            function: any that cloudpickle takes, also from a cell of a notebook.
            *args: its arguments, as they can be pickled.
            **kwargs: likewise.

        Returns:
            A future of what it returns. It raises what the function raises, with the traceback
            over there as a note, and WorkerExitedError when the process ends before.

        Raises:
            WorkerExitedError: the process has ended.
        """
        request = _protocol.dump((function, args, kwargs))
        what = getattr(function, "__qualname__", repr(function))
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._lock:
            self._calls.append((what, future))
            try:
                self._pipe.send_bytes(request)
            except OSError:
                self._calls.pop()
                self._process.wait()
                raise self._exited(f"cannot run {what}") from None
        return future

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function there and return what it returns; see submit().

        Ctrl-C here interrupts it there.
        """
        future = self.submit(function, *args, **kwargs)
        try:
            return future.result()
        except KeyboardInterrupt:
            if not future.done():
                self.interrupt()
            raise

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what it is running; nothing happens when it runs nothing."""
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """End it at once, with all processes that it has started."""
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._thread.join(2 * _LOOK)

    def end(self) -> None:
        """Let it end after what has been submitted; wait() for it."""
        with self._lock, contextlib.suppress(OSError):
            self._pipe.send_bytes(_protocol.END)

    def wait(self, timeout: float) -> bool:
        """Return whether it has ended, which is waited for so long, s."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._thread.join(2 * _LOOK)
        return True

    def _read(self) -> None:
        """Show output and complete calls until the process has ended."""
        assert self._process.stdout is not None
        output = self._process.stdout
        os.set_blocking(output.fileno(), False)
        text = b""
        open_ends: list[Any] = [self._pipe, output]
        while open_ends:
            ready = connection.wait(open_ends, _LOOK)
            if not ready and self._process.poll() is not None:
                break  # a process that it has left behind holds the pipes open
            # Output first: what a call has printed is shown when the call returns.
            if output in open_ends:
                data = _available(output.fileno())
                text = self._show_lines(text + (data or b""))
                if data is None:
                    open_ends.remove(output)
            if self._pipe in ready and not self._take_reply():
                open_ends.remove(self._pipe)
        if text:
            self._show_lines(text + b"\n")
        self._process.wait()
        self._fail_calls()
        self._pipe.close()
        output.close()

    def _show_lines(self, text: bytes) -> bytes:
        """Show the whole lines; return what is left."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            # Of a progress bar, what would be seen in the end.
            plain = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self._lines.append(plain)
            self._show(self.name, plain)
        return rest

    def _take_reply(self) -> bool:
        """Complete the oldest call; False at the end of the pipe."""
        try:
            data = self._pipe.recv_bytes()
        except (EOFError, OSError):
            return False
        with self._lock:
            _, future = self._calls.popleft()
        try:
            ok, value = _protocol.load(data)
        except Exception as error:  # noqa: BLE001  a result whose class is not here, say
            ok, value = False, error
        if ok:
            future.set_result(value)
        else:
            future.set_exception(value)
        return True

    def _fail_calls(self) -> None:
        with self._lock:
            calls = list(self._calls)
            self._calls.clear()
        for what, future in calls:
            future.set_exception(self._exited(f"did not finish {what}"))

    def _exited(self, why: str) -> WorkerExitedError:
        text = f"worker {self.name!r} has ended (exit code {self._process.returncode}) and {why}"
        if self._lines:
            text += "; its last output:\n  " + "\n  ".join(self._lines)
        return WorkerExitedError(text, self.name, self._process.returncode)


def wait_all(workers: list[Worker], timeout: float) -> list[Worker]:
    """Wait until all have ended, for so long, s; return those that have not."""
    end = time.monotonic() + timeout
    return [worker for worker in workers if not worker.wait(max(end - time.monotonic(), 0))]


def _available(handle: int) -> bytes | None:
    """Return what can be read without waiting; None at the end."""
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(handle, 65536)
        except BlockingIOError:
            return b"".join(parts)
        if not part:
            return b"".join(parts) or None
        parts.append(part)
