"""One worker process, seen from the process that started it."""

from __future__ import annotations

import codecs
import contextlib
import functools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from multiprocessing import connection
from typing import IO, Any, ParamSpec, TypeVar

from torch_rpc_ext.launch import _protocol
from torch_rpc_ext.launch._completer import Completer

__all__ = ["Worker", "WorkerExitedError", "run_each", "run_on", "split_lines", "wait_all"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Lines of output that are kept for the error that says how a worker ended.
_KEPT_LINES = 20
# How often to check that the process still runs, s. Usually the end of its pipes shows its end
# before.
_LOOK = 0.5
# How many characters without a line end are kept before they are shown as a line.
_LONGEST_REST = 65536
# How many bytes one read takes from the output, and how many its pipe can hold.
_READ_SIZE = 65536
_PIPE_SIZE = 1 << 20
_START = (
    "import sys; sys.path[:] = {path!r}; from torch_rpc_ext.launch import _worker; "
    "_worker.main({name!r}, {handle}, {parent})"
)


class WorkerExitedError(RuntimeError):
    """A worker's process has ended before it ran, or while it ran, what was asked of it.

    ::

        try:
            group["worker1"].run(train)
        except WorkerExitedError as error:
            print(error.worker, error.exitcode)  # worker1 -9

    Attributes:
        worker: the name of the worker.
        exitcode: of the process; minus the number of the signal that ended the process.
    """

    def __init__(self, text: str, worker: str, exitcode: int | None) -> None:
        super().__init__(text)
        self.worker, self.exitcode = worker, exitcode

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerExitedError, (str(self), self.worker, self.exitcode)


class Worker:
    """A process of a WorkerGroup; it runs functions, one after the other, in its main thread.

    ::

        worker = group["trainer0"]  # a Worker
        future = worker.submit(train, 10)
        print(worker.pid, future.result())

    Owns: the process, the pipe to it, a thread that sends requests, a thread that reads the
    process's replies and output, and threads that complete calls. Thread Safety: any thread.

    Args:
        name: of the worker.
        env: the process's environment.
        show: called with the worker's name and a line that the worker has printed; see WorkerGroup.
    """

    def __init__(self, name: str, env: Mapping[str, str], show: Callable[[str, str], None]) -> None:
        self.name = name
        self._show = show
        self._show_failed = False
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()  # of the two that follow
        self._calls: dict[bytes, tuple[str, Future[Any]]] = {}  # in the order of their requests
        self._ended = False  # no call can be added
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
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
                # Ctrl-C in a terminal and Jupyter's interrupt go to a whole session or process
                # group; the worker must get neither.
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._read, name=f"output-{name}", daemon=True)
        # Before the thread that reads starts, because that thread uses the completer.
        self._completer = Completer(name)
        self._thread.start()
        # A thread of its own, because Ctrl-C in the main thread would cut a message.
        threading.Thread(target=self._send, name=f"input-{name}", daemon=True).start()

    def __repr__(self) -> str:
        state = "running" if self.exitcode is None else f"exit code {self.exitcode}"
        return f"<Worker {self.name}, pid {self.pid}, {state}>"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while the process runs; minus the signal's number when a signal ended it."""
        return self._process.poll()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on the worker, after those that were submitted before.

        Args:
            function: any function that cloudpickle takes, also of a cell of a notebook.
            *args: the function's arguments; they are pickled.
            **kwargs: the function's keyword arguments.

        Returns:
            A future of what the function returns. The future raises what the function raises, with
            the worker's traceback as a note; RuntimeError with the exception's type and text when
            the exception cannot be pickled on the worker or loaded here; WorkerExitedError when the
            process ends before. The future's done-callbacks may block, or call this worker: each
            future is completed in another thread than those whose callbacks still run.

        Raises:
            WorkerExitedError: the process has ended.
            Exception: what pickling the function or the arguments raised.
        """
        key = _protocol.new_key()
        return self._begin(key, _name(function), _protocol.dump(key, (function, args, kwargs)))

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the worker and return what the function returns; see submit().

        Ctrl-C in this process interrupts the function on the worker, or keeps it from beginning.

        Raises:
            WorkerExitedError: the process has ended, or ended while the function ran.
            Exception: what the future of submit() raises.
        """
        [future] = run_on([self], function, args, kwargs)
        return future.result()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the function that the worker runs, or is to run next."""
        with self._lock:
            for key in self._calls:
                self._outbox.put(key)
                break

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        self._kill_all()
        self._process.wait()
        self._join()

    def end(self) -> None:
        """Ask the process to end after all submitted functions; wait() waits for the end."""
        self._outbox.put(_protocol.END)

    def wait(self, timeout: float) -> bool:
        """Wait for the end of the process, at most `timeout` s; return whether it has ended."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._join()
        return True

    def _join(self) -> None:
        """Wait for a while until all output is shown and all calls are completed."""
        # The user's function `show`, and the garbage collection of a group, may call kill() and
        # wait() in the thread that reads. A thread cannot wait for its own end.
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _LOOK)

    def _check_alive(self, what: str) -> None:
        """Raise WorkerExitedError when the process has ended."""
        if self._ended or self.exitcode is not None:
            raise self._exited(f"cannot run {what}")

    def _begin(self, key: bytes, what: str, request: bytes) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._lock:
            self._check_alive(what)
            self._outbox.put(request)
            # Ctrl-C may come here. Then nobody has the future, and _take_reply() drops the reply.
            self._calls[key] = what, future
        return future

    def _kill_all(self) -> None:
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _read(self) -> None:
        """Show output and hand replies to the completer until the process has ended.

        `show` is the only function of the user's that this thread runs.
        """
        assert self._process.stdout is not None
        output = self._process.stdout
        try:
            self._relay(output)
        except BaseException:
            self._kill_all()  # nobody reads what the worker prints or returns any more
            raise
        finally:
            self._process.wait()
            self._fail_calls()
            self._completer.end()
            self._outbox.put(None)
            output.close()

    def _send(self) -> None:
        """Send messages until _read() has ended, then close the pipe: nobody uses it any more."""
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # the process has ended: _read() fails the calls
                self._pipe.send_bytes(message)
            del message  # it may be large
        self._pipe.close()

    def _relay(self, output: IO[bytes]) -> None:
        os.set_blocking(output.fileno(), False)
        # A read may end within a character; the decoder keeps the character's first bytes.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = ""
        open_ends: list[Any] = [self._pipe, output]
        while open_ends:
            # Asked before the pipes are read: what an ended process has written is all there.
            ended = self._process.poll() is not None
            ready = connection.wait(open_ends, 0 if ended else _LOOK)
            # Output before replies: what a call has printed is shown when the call returns.
            if output in open_ends:
                data = _available(output.fileno())
                text = self._show_lines(text + decoder.decode(data or b""))
                if data is None:
                    open_ends.remove(output)
            if self._pipe in ready:
                if not self._take_reply():
                    open_ends.remove(self._pipe)
            elif ended:
                break  # a child of the process may hold the pipes open, and print
        text += decoder.decode(b"", final=True)
        if text:
            self._show_lines(text + "\n")

    def _show_lines(self, text: str) -> str:
        """Show the complete lines; return the incomplete rest."""
        lines, rest = split_lines(text)
        for line in lines:
            self._lines.append(line)
            try:
                self._show(self.name, line)
            except BaseException:
                # A full disk, or the end of `python program.py | head`. The output is read on: a
                # worker whose output nobody reads stops when the pipe is full.
                if not self._show_failed:
                    logger.warning("the output of %s cannot be shown", self.name, exc_info=True)
                self._show_failed = True
        return rest

    def _take_reply(self) -> bool:
        """Have a call completed with the next reply; return False at the end of the pipe."""
        try:
            data = self._pipe.recv_bytes()
        except (EOFError, OSError):
            return False
        with self._lock:
            call = self._calls.pop(_protocol.key_of(data), None)
        if call is None:
            return True
        _, future = call
        self._completer.put(functools.partial(_complete, future, data))
        return True

    def _fail_calls(self) -> None:
        with self._lock:
            self._ended = True
            calls = list(self._calls.values())
            self._calls.clear()
        for what, future in calls:
            error = self._exited(f"did not finish {what}")
            self._completer.put(functools.partial(future.set_exception, error))
        # So that the calls are done when kill() returns. A future is done before its callbacks run.
        futures.wait([future for _, future in calls], 2 * _LOOK)

    def _exited(self, why: str) -> WorkerExitedError:
        text = f"worker {self.name!r} has ended (exit code {self._process.returncode}) and {why}"
        if self._lines:
            text += "; its last output:\n  " + "\n  ".join(self._lines)
        return WorkerExitedError(text, self.name, self._process.returncode)


def run_on(
    workers: list[Worker],
    function: Callable[..., T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Future[T]]:
    """Run a function on workers until all have returned or one has raised.

    Ctrl-C in this process interrupts the function on all of them.

    Returns:
        The call of each worker.

    Raises:
        WorkerExitedError: a worker has ended before; the function runs on no worker.
        Exception: what pickling the function or the arguments raised.
    """
    key = _protocol.new_key()
    request = _protocol.dump(key, (function, args, kwargs))
    _check_all_alive(workers, function)
    with _interrupting(workers, key):
        calls = [worker._begin(key, _name(function), request) for worker in workers]
        futures.wait(calls, return_when=futures.FIRST_EXCEPTION)
    return calls


def run_each(
    workers: list[Worker], function: Callable[..., T], args: Sequence[Sequence[Any]]
) -> list[Future[T]]:
    """Begin a function on all workers, each with its own arguments, without waiting for the end.

    Args:
        workers: the workers.
        function: the function.
        args: the arguments for each worker.

    Returns:
        The call of each worker.

    Raises:
        WorkerExitedError: a worker has ended before; the function runs on no worker. If the worker
            ends just now, the function is interrupted on the others.
        Exception: what pickling the function or the arguments raised.
    """
    key = _protocol.new_key()
    requests = [_protocol.dump(key, (function, own, {})) for own in args]
    _check_all_alive(workers, function)
    with _interrupting(workers, key):
        pairs = zip(workers, requests, strict=True)
        return [worker._begin(key, _name(function), request) for worker, request in pairs]


def _check_all_alive(workers: list[Worker], function: Callable[..., Any]) -> None:
    """Raise WorkerExitedError when a worker has ended.

    Asked before the function begins on any worker: it may wait there for the other workers.
    """
    for worker in workers:
        worker._check_alive(_name(function))


@contextlib.contextmanager
def _interrupting(workers: list[Worker], key: bytes) -> Iterator[None]:
    """Interrupt a request on all workers when the block raises."""
    try:
        yield
    except BaseException:
        for worker in workers:
            worker._outbox.put(key)  # a worker that has run the request ignores this
        raise


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _complete(future: Future[Any], reply: bytes) -> None:
    try:
        ok, value = _protocol.load_reply(reply)
    except BaseException as error:  # noqa: BLE001  the class of the result is not here, say
        ok, value = False, error
    if ok:
        future.set_result(value)
    else:
        future.set_exception(value)


def wait_all(workers: list[Worker], timeout: float) -> list[Worker]:
    """Wait until all workers have ended, at most `timeout` s; return those that have not."""
    end = time.monotonic() + timeout
    return [worker for worker in workers if not worker.wait(max(end - time.monotonic(), 0))]


def split_lines(text: str) -> tuple[list[str], str]:
    """Split output into the complete lines and what is to be kept of the incomplete rest.

    A progress bar rewrites its line behind "\\r". A terminal shows the last version, and only that
    is kept, so that a long progress bar takes no memory. A rest that is too long is cut into lines.
    """
    *lines, rest = text.split("\n")
    # The last "\r" may belong to a line end whose "\n" is still to come.
    end = "\r" if rest.endswith("\r") else ""
    rest = _last_version(rest) + end
    plain = [_last_version(line) for line in lines]
    while len(rest) > _LONGEST_REST:
        plain.append(rest[:_LONGEST_REST])
        rest = rest[_LONGEST_REST:]
    return plain, rest


def _last_version(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _available(handle: int) -> bytes | None:
    """Return what can be read without waiting, at most what fills the pipe twice; None at the end
    of the output."""
    parts: list[bytes] = []
    for _ in range(2 * _PIPE_SIZE // _READ_SIZE):
        try:
            part = os.read(handle, _READ_SIZE)
        except BlockingIOError:
            break
        if not part:
            return b"".join(parts) or None
        parts.append(part)
    return b"".join(parts)
