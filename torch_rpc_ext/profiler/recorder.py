"""Recording on one worker. The worker that profiles calls start(), now() and stop() over RPC.

A worker with an ``allow_list`` takes part when the list names ``torch_rpc_ext.profiler.recorder``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.rpc import api as _untyped_api

from torch_rpc_ext.profiler import hooks, quiet
from torch_rpc_ext.profiler.records import Call, Execution, Logged, Recording, tensor_bytes

api: Any = _untyped_api  # upstream's functions have no types
kineto: Any = torch.autograd.profiler

__all__ = ["Traced", "describe", "now", "start", "stop"]

# How long the end of a recording waits for callbacks of futures that are done, s.
_CALLBACK_PATIENCE = 1.0

# Why a worker records no operators.
_ANOTHER_RUNS = (
    "a torch.profiler of its program was running, or starting, when the profile began; "
    "profile(operators=False) asks for no operators"
)

# The value of torch's flag while our own torch.profiler runs and no other has begun since.
_OURS = 1

_lock = threading.Lock()
_active: Recorder | None = None
_thread = threading.local()  # .call: id of the call whose function this thread runs


class Traced:
    """A function on its way to the callee, with the id of its call.

    The function's name comes first in the pickle, where the agent looks for it, for texts of errors
    (csrc/agent/call_label.cpp).

    Args:
        name: of the function.
        function: what is called.
        id: of the call.
        caller: name of the calling worker.
    """

    def __init__(self, name: str, function: Callable[..., Any], id: int, caller: str) -> None:
        self.name, self.function, self.id, self.caller = name, function, id, caller

    def __reduce__(self) -> tuple[Any, ...]:
        return (Traced, (self.name, self.function, self.id, self.caller))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; record this if this worker records."""
        recorder = _active
        if recorder is None:
            return self.function(*args, **kwargs)
        return recorder.execute(self, args, kwargs)


class Recorder:
    """The recording that runs on this worker.

    Thread Safety: any number of threads add entries; start() and stop() hold _lock.

    Args:
        owner: name of the worker that profiles.
        session: random text that identifies the profile.
        operators: record with torch.profiler too.
        max_entries: how many calls to keep, and how many executions.
        limit: after this time the recording ends by itself, s, because its owner may have died.
        recorded: names of the workers that record.
    """

    def __init__(
        self,
        owner: str,
        session: str,
        operators: bool,
        max_entries: int,
        limit: float,
        recorded: list[str],
    ) -> None:
        #: Names of the workers that record; only they understand a Traced.
        self.recorded = frozenset(recorded)
        self.owner, self.session, self.limit = owner, session, limit
        self._agent = api._get_current_rpc_agent()
        me = self._agent.get_worker_info()
        self.worker = str(me.name)
        # Ids that no other rank draws, nor an earlier recording of this process.
        self._ids = itertools.count((me.id << 40) + (time.monotonic_ns() >> 20 & 0xFFFFF) * 2**20)
        self._max_entries = max_entries
        self._calls: list[Call] = []
        self._executions: list[Execution] = []
        self._dropped = itertools.count()  # the next number is the number of dropped entries
        # Calls and executions that have not ended: id of a call, or minus the id of an execution ->
        # (future or None, entry).
        self._open: dict[int, tuple[Any, Any]] = {}
        self._profiler = _start_operators() if operators else None
        #: Why operators are not recorded although they are wanted; '' where they are.
        self.without_operators = _ANOTHER_RUNS if operators and self._profiler is None else ""
        self._logs = hasattr(self._agent, "begin_call_log")  # TENSORPIPE's agent has no log
        #: Number of the last call of a function that this thread has sent.
        self.last_number: Callable[[], int] = lambda: 0
        if self._logs:
            self.last_number = self._agent.last_call_id
            self._agent.begin_call_log(max_entries)
        self.began = time.monotonic()
        self._timer = threading.Timer(limit, stop, (session,))
        self._timer.daemon = True
        self._timer.start()

    def is_of_this_session(self) -> bool:
        """Return whether the agent is the one that the recording has begun with."""
        return self._agent is api._get_current_rpc_agent()

    def new_call(self, kind: str, function: str, to: str) -> Call:
        """Begin a call; add_call() or follow_call() ends it."""
        parent = getattr(_thread, "call", 0)
        begin = time.perf_counter_ns()
        return Call(next(self._ids), parent, kind, function, to, begin, 0, 0, "")

    def add_call(self, call: Call, error: str = "") -> None:
        """Keep a call that ends now."""
        self._keep(self._calls, call._replace(end_ns=time.perf_counter_ns(), error=error))

    def follow_call(self, call: Call, future: Any) -> None:
        """Keep a call that ends when its future is done."""
        self._open[call.id] = (future, call)

        def done(completed: Any) -> None:
            if self._open.pop(call.id, None) is not None:
                self.add_call(call, _error_of(completed))

        future.add_done_callback(done)

    def execute(self, traced: Traced, args: Any, kwargs: Any) -> Any:
        """Run the function of a call that another worker made."""
        outer = getattr(_thread, "call", 0)
        _thread.call = traced.id
        begin = time.perf_counter_ns()
        entry = Execution(
            traced.id, traced.name, traced.caller, begin, 0, threading.get_native_id(), 0, ""
        )
        self._open[-entry.id] = (None, entry)
        try:
            with self._annotation(traced):
                result = traced.function(*args, **kwargs)
        except BaseException as problem:
            self._end_execution(entry, error=type(problem).__name__)
            raise
        finally:
            _thread.call = outer
        # The class of what rpc_async() and then() return, and the base of torch.futures.Future.
        if isinstance(result, torch._C.Future):
            self._open[-entry.id] = (result, entry)
            result.add_done_callback(lambda done: self._end_execution(entry, error=_error_of(done)))
        else:
            self._end_execution(entry, result_bytes=tensor_bytes(result))
        return result

    def _annotation(self, traced: Traced) -> Any:
        """Return an annotation that shows the call among the operators."""
        if self._profiler is None:
            return contextlib.nullcontext()
        return torch.profiler.record_function(f"rpc {traced.name} from {traced.caller}")

    def _end_execution(self, entry: Execution, **fields: Any) -> None:
        if self._open.pop(-entry.id, None) is not None:
            end = time.perf_counter_ns()
            self._keep(self._executions, entry._replace(end_ns=end, **fields))

    def _keep(self, entries: list[Any], entry: Any) -> None:
        if len(entries) < self._max_entries:
            entries.append(entry)
        else:
            next(self._dropped)

    def finish(self) -> Recording:
        """Stop, and return the recording."""
        self._timer.cancel()
        self._await_callbacks()
        for key in list(self._open):
            _, entry = self._open.pop(key, (None, None))
            if entry is not None:  # None for one that has just ended
                self._keep(self._calls if isinstance(entry, Call) else self._executions, entry)
        sent, served = self._agent.end_call_log() if self._logs else ((), ())
        operators = b"" if self._profiler is None else _stop_operators(self._profiler)
        return Recording(
            self.worker,
            os.uname().nodename,
            os.getpid(),
            self._calls,
            self._executions,
            next(self._dropped),
            _since_epoch_ns(),
            operators,
            [Logged(*logged) for logged in sent],
            [Logged(*logged) for logged in served],
        )

    def _await_callbacks(self) -> None:
        """Wait for the callbacks of futures that are done: they run after wait() has returned."""
        end = time.monotonic() + _CALLBACK_PATIENCE
        while time.monotonic() < end:
            if not any(future and future.done() for future, _ in list(self._open.values())):
                return
            time.sleep(0.001)


def _error_of(future: Any) -> str:
    try:
        future.value()
    except Exception as problem:  # noqa: BLE001  the function may have raised anything
        return type(problem).__name__
    return ""


def _another_entered(ours: Any) -> bool:
    """Return whether a torch.profiler beside `ours` has begun to prepare, and has not ended."""
    # The flag is not set yet while a profiler warms up, by its schedule or for the first time. No
    # other list of profilers exists.
    return any(
        issubclass(type(one), kineto.profile)
        and one is not ours
        and one.entered
        and one.kineto_results is None
        for one in gc.get_objects()
    )


def _start_operators() -> Any:
    """Return a torch.profiler that runs; None if another runs in this process, or prepares to.

    Kineto, on which torch.profiler is built, has one session per process. A second start, or a stop
    without a session, ends the process with SIGSEGV.
    """
    if kineto._is_profiler_enabled or _another_entered(None):
        return None
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # All threads, because requests run in threads of the agent.
    config = _ExperimentalConfig(profile_all_threads=True)
    # acc_events says what to keep of several cycles. There is one; without the option torch 2.12
    # writes a warning.
    profiler = torch.profiler.profile(
        activities=activities, experimental_config=config, acc_events=True
    )
    # The two halves of profiler.start(); each needs another kind of silence.
    with quiet.first_use():
        profiler.prepare_trace()
    # Preparing takes seconds the first time, and another thread may have begun a profiler then.
    if kineto._is_profiler_enabled or _another_entered(profiler.profiler):
        _forget(profiler)
        return None
    with quiet.logger():
        profiler.start_trace()
    # Equal to True, the value that a profiler sets, but another object. So _stop_operators() sees
    # whether another profiler has begun or ended meanwhile.
    if not _another_entered(profiler.profiler):
        kineto._is_profiler_enabled = _OURS
    return profiler


def _forget(profiler: Any) -> None:
    """Let _another_entered() not count a profiler of ours that is not stopped."""
    profiler.profiler.entered = False


def _stop_operators(profiler: Any) -> bytes:
    """Return the compressed trace; b'' where another torch.profiler has begun or ended meanwhile.

    One that has begun ends our session when it ends. If our session ended first, that would end
    the process.
    """
    if kineto._is_profiler_enabled is not _OURS:
        _forget(profiler)
        return b""
    with quiet.logger():
        profiler.stop()
    with tempfile.TemporaryDirectory(prefix="torch_rpc_ext-") as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, "rb") as file:
            return zlib.compress(file.read(), 1)


def _profiling_worker() -> str:
    """Return the name of the worker that profiles this one, with the time left; '' for none.

    The caller holds _lock. A recording from before an rpc.shutdown() of this worker is dropped.
    """
    recorder = _active
    if recorder is None:
        return ""
    if not recorder.is_of_this_session():
        _end_active()
        recorder.finish()
        return ""
    left = recorder.limit - (time.monotonic() - recorder.began)
    return f"{recorder.owner} (for at most {left:.0f} s more)"


def _end_active() -> None:
    """Record no more calls. The caller holds _lock."""
    global _active
    hooks.remove()
    _active = None


def _after_fork_in_child() -> None:
    """Leave the recording to the parent: the child has no thread that ends it at its limit."""
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the lock
    _end_active()


os.register_at_fork(after_in_child=_after_fork_in_child)


def describe() -> str:
    """Return this worker's version of torch and which worker profiles it, as JSON."""
    with _lock:
        busy = _profiling_worker()
    return json.dumps({"torch": torch.__version__.split("+")[0], "busy": busy})


def now() -> int:
    """Return this worker's time.perf_counter_ns()."""
    return time.perf_counter_ns()


def start(
    owner: str, session: str, operators: bool, max_entries: int, limit: float, recorded: list[str]
) -> str:
    """Begin to record; see Recorder.

    Returns:
        Why operators are not recorded although they are wanted; '' where they are.

    Raises:
        RuntimeError: this worker is being profiled already.
    """
    global _active
    with _lock:
        if busy := _profiling_worker():
            raise RuntimeError(f"this worker is being profiled already, by {busy}")
        recorder = Recorder(owner, session, operators, max_entries, limit, recorded)
        hooks.install(recorder, Traced)
        _active = recorder
        return recorder.without_operators


def stop(session: str) -> tuple[Any, ...] | None:
    """Stop recording.

    Args:
        session: as given to start().

    Returns:
        The Recording as a plain tuple; None if this session does not record on this worker.
    """
    with _lock:
        recorder = _active
        if recorder is None or recorder.session != session:
            return None
        _end_active()
    return recorder.finish().to_plain()


def _since_epoch_ns() -> int:
    """Return time.time_ns() minus time.perf_counter_ns()."""
    samples = []
    for _ in range(10):
        before = time.perf_counter_ns()
        epoch = time.time_ns()
        after = time.perf_counter_ns()
        samples.append((after - before, epoch - (before + after) // 2))
    return min(samples)[1]  # the sample with the shortest time between the two readings
