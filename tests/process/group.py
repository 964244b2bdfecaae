"""Groups of RPC workers in real processes.

The short way: the body of the test runs on worker0, and the other workers serve. All workers are
initialised before the body and shut down gracefully after it::

    @workers(2)
    def test_add() -> None:
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).sum() == 4

The long way, for workers that are killed, leave or join::

    with Group(3) as group:
        group[1].kill()
        group[0].run(expect_error, "worker1")

What a worker raises is raised in the test, with the worker's traceback as a note. The report of a
test that fails has the output of all workers. When a group ends without an error, it has shut down
gracefully, and all its processes have ended with exit code 0.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest

from tests.support.backend import backend_options, backend_type
from tests.support.child import Child, dump_stacks, wait_for_end
from tests.support.netns import Host, enter_and_run

SECONDS = 60.0
#: The groups that the running test has used; conftest shows their output when the test fails.
USED: list[Group] = []

T = TypeVar("T")
Each = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class WorkerDied(Exception):
    """A worker ended while it was running something for the test."""


class Call:
    """Something that a worker is running."""

    def __init__(self, worker: Worker, what: str) -> None:
        self._worker, self._what = worker, what

    def done(self) -> bool:
        """Whether result() would return, or raise, at once."""
        return self._worker.pipe.poll(0)

    def result(self, timeout: float = SECONDS) -> Any:
        """Return what the function returned. Raises what the function raised; WorkerDied; or
        TimeoutError, and then the worker's stacks are in its output."""
        __tracebackhide__ = True
        worker = self._worker
        if not worker.pipe.poll(timeout):
            dump_stacks([worker.child])
            worker.group.broken = True
            raise TimeoutError(f"{self._what} on {worker.name} did not end within {timeout:.0f} s")
        try:
            kind, value, text = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            worker.child.process.join(60)  # it ends a little later than its pipe
            worker.group.broken = True
            raise WorkerDied(
                f"{worker.name} ended (exit code {worker.exitcode}) in {self._what}"
            ) from None
        if kind == "result":
            return value
        if kind == "skip":
            pytest.skip(text)
        value.add_note(f"on {worker.name}:\n{text}")
        raise value


class Worker:
    """A process of a group. Its main thread runs the functions that it is given, one after
    another."""

    def __init__(
        self,
        group: Group,
        name: str,
        rank: int,
        env: Mapping[str, str] | None,
        host: Host | None = None,
    ) -> None:
        self.group, self.name, self.rank = group, name, rank
        self.pipe, theirs = connection.Pipe()
        if host is None:
            self.child = Child(_serve, (theirs,), name=name, env=env)
        else:
            self.child = Child(enter_and_run, (host.holder, _serve, theirs), name=name, env=env)
        self.child.start()
        theirs.close()
        self.killed = False

    @property
    def exitcode(self) -> int | None:
        """The exit code of the process; None while the process runs."""
        return self.child.exitcode

    def start(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """Start ``fn``, a module-level function, on this worker. Call.result() returns its
        result."""
        self.group.mark_used()
        self.pipe.send_bytes(pickle.dumps((fn, args, kwargs)))
        return Call(self, fn.__qualname__)

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``fn`` on this worker and return what it returns."""
        __tracebackhide__ = True
        result: T = self.start(fn, *args, **kwargs).result(self.group.timeout)
        return result

    def init(self, world_size: int | None, **options: Any) -> Call:
        """Start init_rpc on this worker, with the group's rendezvous."""
        return self.start(init, self.name, self.rank, world_size, self.group.init_method, options)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self.child.signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.killed = True
        self.child.terminate()
        self.child.process.join(10)

    def leave(self) -> None:
        """Let the process end after what it is doing, without a shutdown of RPC."""
        self.pipe.send_bytes(b"")


class Group:
    """Workers "worker0" ... that know each other.

    ``options`` and ``env`` are for all workers, or have one entry for each. ``dynamic`` leaves the
    world size open. With ``init=False`` the processes only start, and the test initialises RPC.
    ``hosts`` has the host of each worker (netns.py); then all hosts must reach ``init_method``.
    """

    def __init__(
        self,
        size: int = 2,
        *,
        options: Each = None,
        env: Each = None,
        dynamic: bool = False,
        init: bool = True,
        timeout: float = SECONDS,
        init_method: str | None = None,
        hosts: Sequence[Host] | None = None,
    ) -> None:
        self.timeout, self.dynamic, self.broken = timeout, dynamic, False
        self._options, self._env = _each(options, size), _each(env, size)
        self._rendezvous: Path | None = None
        if init_method is None:
            handle, path = tempfile.mkstemp(prefix="rpc_test_", suffix=".store")
            os.close(handle)
            self._rendezvous = Path(path)
            init_method = f"file://{path}"
        self.init_method = init_method
        self._last_output = ""
        places: Sequence[Host | None] = hosts or [None] * size
        self._places = places
        self.workers = [
            Worker(self, f"worker{rank}", rank, self._env[rank], places[rank])
            for rank in range(size)
        ]
        self.mark_used()
        if init:
            try:
                self.init_all()
            except BaseException:
                self.close(gently=False)
                raise

    def __getitem__(self, rank: int) -> Worker:
        return self.workers[rank]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close(gently=error is None)

    def init_all(self) -> None:
        """Run init_rpc on all workers at once."""
        world_size = None if self.dynamic else len(self.workers)
        calls = [w.init(world_size, **o) for w, o in zip(self.workers, self._options, strict=True)]
        for call in calls:
            call.result(self.timeout)

    def add(self, name: str, rank: int, **options: Any) -> Worker:
        """Add a worker to a dynamic group, and initialise it."""
        worker = Worker(self, name, rank, None)
        self.workers.append(worker)
        worker.init(None, **options).result(self.timeout)
        return worker

    def renew(self, rank: int) -> Worker:
        """Start a new process in the place of a dead worker, without init_rpc."""
        former = self.workers[rank]
        former.pipe.close()
        former.child.close()
        self.workers[rank] = Worker(self, former.name, rank, self._env[rank], self._places[rank])
        return self.workers[rank]

    def start_again(self, rank: int) -> Worker:
        """As renew(), and initialise the worker with the options of its former life."""
        worker = self.renew(rank)
        world_size = None if self.dynamic else len(self.workers)
        worker.init(world_size, **self._options[rank]).result(self.timeout)
        return worker

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``fn`` on worker0."""
        __tracebackhide__ = True
        return self.workers[0].run(fn, *args, **kwargs)

    def run_all(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run ``fn`` on all live workers at once; return the results in the order of ranks."""
        calls = [
            worker.start(fn, *args, **kwargs) for worker in self.workers if worker.exitcode is None
        ]
        return [call.result(self.timeout) for call in calls]

    def close(self, *, gently: bool = True) -> None:
        """Shut RPC down, end the processes, and check both; or, not ``gently``, kill the processes.
        A second call does nothing."""
        workers, self.workers = self.workers, self.workers[:]
        try:
            if gently and not self.broken:
                self._leave([worker for worker in workers if not worker.killed])
        finally:
            self._last_output = self.output()
            self.workers = []
            for worker in workers:
                worker.pipe.close()
                worker.child.close()
            if self._rendezvous is not None:
                self._rendezvous.unlink(missing_ok=True)

    def _leave(self, workers: list[Worker]) -> None:
        alone = len(workers) < len(self.workers)
        calls = [
            worker.start(shutdown, graceful=not alone)
            for worker in workers
            if worker.exitcode is None
        ]
        try:
            for call in calls:
                call.result(self.timeout)
        except TimeoutError:
            # A shutdown waits for all workers: the stacks show which worker does not come.
            dump_stacks([worker.child for worker in workers if worker.exitcode is None])
            raise
        for worker in workers:
            if worker.exitcode is None:
                worker.leave()
        left = wait_for_end([worker.child for worker in workers], 20)
        if not left:
            dump_stacks([worker.child for worker in workers])
        codes = {worker.name: worker.exitcode for worker in workers}
        assert set(codes.values()) <= {0}, f"exit codes after shutdown: {codes}"

    def output(self) -> str:
        """The output of all workers, also of those that have ended."""
        return "\n".join(worker.child.output() for worker in self.workers) or self._last_output

    def mark_used(self) -> None:
        """Show this group's output if the running test fails."""
        if self not in USED:
            USED.append(self)


def workers(
    size: int = 2,
    *,
    options: Each = None,
    env: Each = None,
    everywhere: bool = False,
    timeout: float = SECONDS,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test: its body runs on worker0 of a static group, or ``everywhere`` at once."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**parameters: Any) -> None:
            with Group(size, options=options, env=env, timeout=timeout) as group:
                run = group.run_all if everywhere else group.run
                run(_body, body.__module__, body.__qualname__, parameters)

        test.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
        return test

    return decorate


def init(
    name: str, rank: int, world_size: int | None, init_method: str, options: Mapping[str, Any]
) -> None:
    """Run init_rpc with the back end under test."""
    from torch.distributed import rpc

    import tests.process.functions  # noqa: F401  defines the TorchScript functions here

    rpc.init_rpc(
        name,
        backend=backend_type(),
        rank=rank,
        world_size=world_size,
        rpc_backend_options=backend_options(init_method, **options),
    )


def shutdown(graceful: bool = True) -> None:
    """Run rpc.shutdown if there is an agent."""
    from torch.distributed import rpc

    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown(graceful=graceful)


def _body(module: str, name: str, parameters: Mapping[str, Any]) -> None:
    getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name).__wrapped__(
        **parameters
    )


def _each(value: Each, size: int) -> list[Mapping[str, Any]]:
    values = [value or {}] * size if value is None or isinstance(value, Mapping) else list(value)
    assert len(values) == size, f"one entry per worker: {len(values)} for {size}"
    return values


def _serve(pipe: connection.Connection) -> None:
    """The loop of a worker's main thread."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        if not message:
            return
        pipe.send_bytes(_reply(message))


def _reply(message: bytes) -> bytes:
    try:
        fn, args, kwargs = pickle.loads(message)
        return pickle.dumps(("result", fn(*args, **kwargs), ""))
    except BaseException as error:
        text = traceback.format_exc()
        if isinstance(error, pytest.skip.Exception):
            return pickle.dumps(("skip", None, str(error)))
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
        try:
            pickled = pickle.dumps(("error", error, text))
            pickle.loads(pickled)
        except Exception:
            return pickle.dumps(("error", RuntimeError(f"{type(error).__name__}: {error}"), text))
        return pickled
