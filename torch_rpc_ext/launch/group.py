"""WorkerGroup: several worker processes that know each other."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torch_rpc_ext.launch import _rpc
from torch_rpc_ext.launch.process import Worker, run_each, run_on, wait_all

__all__ = ["WorkerGroup"]

P = ParamSpec("P")
T = TypeVar("T")

# Variables that limit a worker to one compute thread, as torchrun does: workers share the cores.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_printing = threading.Lock()


def _print(name: str, line: str) -> None:
    # sys.stdout is looked up for each line: a notebook sets it to the output of the running cell.
    with _printing, contextlib.suppress(ValueError):  # sys.stdout is closed: the program ends
        sys.stdout.write(f"[{name}] {line}\n")
        sys.stdout.flush()


class WorkerGroup:
    """Worker processes on this host; a context manager, or start() and stop().

    ::

        group = WorkerGroup(["ps", "trainer0"]).start()
        group.init_rpc("UCX", join="notebook")
        group.run(os.getpid)  # [4711, 4712]
        group.stop()

    Each worker is a fresh Python process with this process's ``sys.path`` and current folder. The
    workers end when the group is stopped or garbage-collected, and when this process ends, even by
    SIGKILL.

    Args:
        workers: names, or a number: then the names are "worker0", "worker1" and so on.
        env: environment variables for all workers. A worker has one compute thread
            (OMP_NUM_THREADS=1) unless `env` or this process's environment says otherwise.
        show: called with a worker's name and a line that the worker has printed, one call at a time
            for each worker; prints both by default. ``lambda name, line: None`` for silence. The
            first error of `show` is logged for each worker; output is shown on. `show` must return
            soon and must not wait for a call on that worker: the worker's next results wait until
            `show` returns, because a call's output is shown before the call returns. `show` may
            kill workers.

    Raises:
        ValueError: `workers` is no number or list of names, there are none, or one name is there
            twice.
    """

    def __init__(
        self,
        workers: int | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        show: Callable[[str, str], None] = _print,
    ) -> None:
        if isinstance(workers, int):
            workers = [f"worker{rank}" for rank in range(workers)]
        if isinstance(workers, str) or not isinstance(workers, Sequence):
            raise ValueError(f"workers must be a number or a list of names, got {workers!r}")
        for name in workers:
            if not isinstance(name, str) or not name:
                raise ValueError(f"the name of a worker must be a text, got {name!r}")
        if not workers:
            raise ValueError("workers must be at least 1, got none")
        if len(set(workers)) < len(workers):
            raise ValueError(f"workers must have different names, got {list(workers)}")
        self.names = list(workers)
        self._env, self._show = dict(env or {}), show
        self._workers: list[Worker] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None
        self._sessions = 0
        self._rpc = self._joined = False
        self._backend = ""  # of the last init_rpc()

    def start(self) -> WorkerGroup:
        """Start the processes, without waiting until they are ready: the first call does that.

        Returns:
            The group itself.

        Raises:
            RuntimeError: the group is started already.
        """
        if self._workers:
            raise RuntimeError("the group is started already: stop() it first")
        env = {**dict.fromkeys(_THREADS, "1"), **os.environ, **self._env}
        try:
            for name in self.names:
                self._workers.append(Worker(name, env, self._show))
        finally:
            self._finalizer = weakref.finalize(self, _kill, self._workers, os.getpid())
        return self

    def __enter__(self) -> WorkerGroup:
        return self if self._workers else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(graceful=error is None)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, which: int | str) -> Worker:
        """Return the worker with a name, or with an index into the list of names.

        Raises:
            KeyError: there is no worker with this name.
            IndexError: there is no worker with this index.
            RuntimeError: the group is not started.
        """
        return self._started()[which if isinstance(which, int) else self._place(which)]

    def __repr__(self) -> str:
        return f"<WorkerGroup {', '.join(map(repr, self._workers)) or 'not started'}>"

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run a function on all workers at once, each in its main thread.

        Ctrl-C in this process interrupts the function on all workers.

        Args:
            function: any function that cloudpickle takes, also of a cell of a notebook.
            *args: the function's arguments.
            **kwargs: the function's keyword arguments.

        Returns:
            What the function returned on each worker, in the order of the names.

        Raises:
            WorkerExitedError: a worker's process had ended before, and the function ran on no
                worker, or ended while the function ran.
            RuntimeError: the group is not started; or the function raised an exception that cannot
                be pickled there or loaded here, whose type and text are in the message.
            Exception: the first exception that the function raised, with the worker's traceback as
                a note. Other workers may still be running the function.
        """
        calls = run_on(self._started(), function, args, kwargs)
        for call in calls:
            if call.done():
                call.result()
        return [call.result() for call in calls]

    def init_rpc(
        self, backend: str = "UCX", *, join: str | None = None, **options: Any
    ) -> WorkerGroup:
        """Call rpc.init_rpc on all workers, in one static group.

        Args:
            backend: a name in rpc.BackendType.
            join: name under which this process becomes a worker too, with rank 0; the group's
                workers then have the ranks from 1 on. None: this process stays outside, and the
                workers have the ranks from 0 on. A process that has had RPC before can join UCX. It
                can join TENSORPIPE only if its rank was 0 and it has made no RRefs: upstream keeps
                both for ever.
            **options: options of the back end, such as num_worker_threads and rpc_timeout, for all
                workers.

        Returns:
            The group itself.

        Raises:
            ValueError: no such back end.
            TypeError: no such option.
            WorkerExitedError: a worker's process has ended. If the process had ended before, no
                worker calls rpc.init_rpc.
            RuntimeError: RPC is initialized already, here or on the workers; or the group is not
                started.
            Exception: what a worker's init_rpc raised; stop() the group then.
        """
        workers = self._started()
        if self._rpc:
            raise RuntimeError("the group's RPC is initialized already: call shutdown_rpc() first")
        if join is not None and (join in self.names or _rpc.is_initialized()):
            why = "a worker has that name" if join in self.names else "this process has RPC already"
            raise RuntimeError(f"cannot join as {join!r}: {why}")
        if self._store is None:
            self._store = tempfile.TemporaryDirectory(prefix="rpc_launch_")
        self._sessions = max(self._sessions, _rpc.init_count()) + 1
        before = int(join is not None)
        meeting = f"file://{Path(self._store.name) / str(self._sessions)}"
        size = len(workers) + before
        session = _rpc.Session(backend, size, self._sessions, {**options, "init_method": meeting})
        session.check()  # a wrong option is an error before any worker waits for another
        args = [(worker.name, rank) for rank, worker in enumerate(workers, start=before)]
        calls = run_each(workers, session.init, args)
        self._rpc, self._backend = True, backend
        if join is not None:
            session.init(join, 0)
            self._joined = True
        for call in calls:
            call.result()
        return self

    def shutdown_rpc(self, *, graceful: bool = True, timeout: float = 30.0) -> None:
        """Call rpc.shutdown on all workers, and here when this process has joined.

        Args:
            graceful: first wait until all calls of all workers are done. When a worker's process
                has ended, the shutdown is not graceful.
            timeout: how long a graceful shutdown waits, s.

        Raises:
            Exception: what a worker's shutdown raised.
            TimeoutError: the shutdown of a worker did not end in time.
        """
        if not self._rpc:
            return
        self._rpc = False
        here, self._joined = self._joined, False
        alive = [worker for worker in self._workers if worker.exitcode is None]
        graceful = graceful and len(alive) == len(self._workers)
        if graceful and here and _rpc.needs_halves():
            _everywhere(alive, here, timeout, _rpc.finish_work, timeout)
            graceful = False
        _everywhere(alive, here, timeout, _rpc.shutdown, graceful, timeout)

    def stop(self, *, graceful: bool = True, timeout: float = 30.0) -> None:
        """Shut RPC down and end all workers. Does nothing when the group is stopped.

        Args:
            graceful: let the workers finish what they do. Otherwise they are killed.
            timeout: how long to wait for the workers, s. A worker that has not ended by then is
                killed, and a warning names it.
        """
        workers, self._workers = self._workers, []
        if not workers:
            return
        self._workers = workers  # for shutdown_rpc()
        try:
            self._shut_down(graceful, timeout)
            if graceful:
                for worker in workers:
                    worker.end()
                late = [worker.name for worker in wait_all(workers, timeout)]
                if late:
                    warnings.warn(
                        f"{', '.join(late)} did not end within {timeout:g} s: killed", stacklevel=2
                    )
        finally:
            self._workers = []
            self._finalizer()
            if self._store is not None:
                self._store.cleanup()
                self._store = None

    def _shut_down(self, graceful: bool, timeout: float) -> None:
        if graceful:
            try:
                self.shutdown_rpc(timeout=timeout)
            except Exception as error:  # noqa: BLE001  no error may keep the workers running
                warnings.warn(f"rpc.shutdown of {self._backend} failed: {error}", stacklevel=3)
        elif self._joined:
            _rpc.shutdown(False, timeout)
        self._rpc = self._joined = False

    def _started(self) -> list[Worker]:
        if not self._workers:
            raise RuntimeError("the group is not started: call start(), or use it in a with block")
        return self._workers

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise KeyError(f"no worker {name!r}; there are {', '.join(self.names)}")
        return self.names.index(name)


def _everywhere(
    workers: list[Worker], here: bool, timeout: float, function: Callable[..., Any], *args: Any
) -> None:
    """Run a function on the workers, and at the same time in this process if `here`."""
    calls = {worker.name: worker.submit(function, *args) for worker in workers}
    if here:
        function(*args)
    ended = futures.wait(calls.values(), timeout)
    for call in ended.done:
        call.result()
    if ended.not_done:
        late = ", ".join(name for name, call in calls.items() if call in ended.not_done)
        raise TimeoutError(f"{late} did not return from {function.__name__}() in {timeout:g} s")


def _kill(workers: list[Worker], owner: int) -> None:
    # In a forked child the group is collected too; the workers belong to its parent.
    if os.getpid() == owner:
        # The stack calls the last first, and all of them also when one raises.
        with contextlib.ExitStack() as kills:
            for worker in reversed(workers):
                kills.callback(worker.kill)
