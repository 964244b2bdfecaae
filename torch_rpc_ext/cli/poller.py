"""Asking all workers of a group for their state, again and again: the data of ``top``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext import errors, monitoring
from torch_rpc_ext._base.printable import printable
from torch_rpc_ext._calls import failures
from torch_rpc_ext.cli.answers import Answer, quantile

__all__ = ["Poller", "WorkerState"]

rpc: Any = _untyped_rpc  # upstream's functions have no types

#: States of a worker.
ALIVE, SUSPECT, DEAD, REFUSES = "alive", "suspect", "dead", "refuses"
_GONE = (errors.PeerLostError, errors.ShutDownError, errors.NotInGroupError)


@dataclass(frozen=True)
class WorkerState:
    """One worker at one moment; None where it is not known.

    Attributes:
        worker: its name.
        state: alive; suspect: no answer in time, an error for an answer, or an answer that cannot
            be read; dead: the worker cannot be reached; refuses: the worker answers, but does not
            serve torch_rpc_ext.monitoring.
        why: what is wrong, '' for nothing.
        host: the host that the worker runs on.
        pid: its process.
        transports: "control / bulk" of its connections, each pair once.
        calls_per_s: calls that the worker makes.
        served_per_s: calls that the worker answers.
        sent_per_s: bytes/s.
        received_per_s: bytes/s.
        latency_ms: median latency of the worker's calls since the poll before; right within a
            factor of 2, because it comes from a histogram whose bounds double.
        latency_p99_ms: 99th percentile of the same.
        queue_p99_ms: 99th percentile of how long requests waited for a thread since the poll
            before; right within a factor of 2.
        answer_ms: round trip of this question.
        queued: requests that wait for a thread.
        running: requests that run.
        pending: the worker's own calls that wait for an answer.
        lost: names of workers that this worker cannot reach any more.
        waiting: caller -> (number, bytes) of the caller's requests that wait there for room.
        unsent: (number, bytes) of the worker's own messages that wait for memory that it has lent.
    """

    worker: str
    state: str
    why: str = ""
    host: str | None = None
    pid: int | None = None
    transports: tuple[str, ...] = ()
    calls_per_s: float | None = None
    served_per_s: float | None = None
    sent_per_s: float | None = None
    received_per_s: float | None = None
    latency_ms: float | None = None
    latency_p99_ms: float | None = None
    queue_p99_ms: float | None = None
    answer_ms: float | None = None
    queued: int | None = None
    running: int | None = None
    pending: int | None = None
    lost: tuple[str, ...] = ()
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    unsent: tuple[int, int] = (0, 0)


class Poller:
    """Asks workers for their state; computes rates from the poll before.

    ::

        poller = Poller()
        poller.poll()
        time.sleep(1)
        for state in poller.poll():  # each a WorkerState
            print(state.worker, state.state, state.calls_per_s)

    Thread Safety: one thread at a time.

    Args:
        names: called at each poll, returns the workers to ask; by default all workers of the group,
            this one included.
        timeout: how long to wait for an answer, s; a worker without one is suspect.
    """

    def __init__(
        self,
        names: Callable[[], Iterable[str]] = monitoring.member_names,
        *,
        timeout: float = 2.0,
    ) -> None:
        self._names, self._timeout = names, timeout
        self._before: dict[str, Answer] = {}

    def poll(self) -> list[WorkerState]:
        """Ask all workers at once.

        Returns:
            One WorkerState for each worker, in the order of the names. Rates are None at the first
            poll.
        """
        questions = [(name, *self._ask(name)) for name in self._names()]
        states = [self._state(name, future, took) for name, future, took in questions]
        known = {state.worker for state in states}
        self._before = {name: s for name, s in self._before.items() if name in known}
        return states

    def _ask(self, name: str) -> tuple[Any, list[float]]:
        """Ask a worker.

        Returns:
            (future, or the error of a call that could not begin; a list to which the round trip, s,
            is appended when the answer comes).
        """
        took: list[float] = []
        begin = time.perf_counter()
        try:
            future = rpc.rpc_async(name, monitoring.snapshot, timeout=self._timeout)
        except RuntimeError as problem:
            return problem, took
        future.add_done_callback(lambda _: took.append(time.perf_counter() - begin))
        return future, took

    def _state(self, name: str, future: Any, took: list[float]) -> WorkerState:
        before = self._before.pop(name, None)
        try:
            if isinstance(future, RuntimeError):
                raise future
            now = future.wait()
        except Exception as problem:  # noqa: BLE001  the worker may have raised anything
            return WorkerState(name, _kind(problem), why=failures.brief(problem))
        try:
            answer = Answer.of(now)
            if before is not None and not answer.continues(before):
                before = None
            state = _describe(name, answer, before, took[0] * 1e3 if took else None)
        except Exception as problem:  # noqa: BLE001  the worker may have answered anything
            why = f"its answer cannot be read ({type(problem).__name__}: {problem})"
            return WorkerState(name, SUSPECT, why=printable(why))
        self._before[name] = answer
        return state


def _kind(problem: Exception) -> str:
    if isinstance(problem, errors.RefusedError):
        return REFUSES
    if isinstance(problem, _GONE):
        return DEAD
    # Other back ends raise one class, for a lost worker and for a time-out.
    elsewhere = type(problem) is RuntimeError and not failures.is_remote(problem)
    return DEAD if elsewhere and not failures.is_timeout(problem) else SUSPECT


def _describe(
    name: str, now: Answer, before: Answer | None, answer_ms: float | None
) -> WorkerState:
    def number(key: str) -> int | None:
        return int(now.counters[key]) if key in now.counters else None

    def rate(key: str) -> float | None:
        if before is None or key not in now.counters:
            return None
        seconds = now.time - before.time
        return (now.counters[key] - before.counters[key]) / seconds if seconds > 0 else None

    def milliseconds(key: str, share: float) -> float | None:
        if before is None or key not in now.histograms:
            return None
        bounds, counts = now.histograms[key]
        found = quantile(before.histograms[key][1], counts, bounds, share) / 1e6
        return None if math.isnan(found) else found

    return WorkerState(
        name,
        ALIVE,
        host=now.host,
        pid=now.pid,
        transports=now.transports,
        calls_per_s=rate("agent.calls_sent"),
        served_per_s=rate("agent.calls_served"),
        sent_per_s=rate("agent.bytes_sent"),
        received_per_s=rate("agent.bytes_received"),
        latency_ms=milliseconds("agent.latency", 0.5),
        latency_p99_ms=milliseconds("agent.latency", 0.99),
        queue_p99_ms=milliseconds("agent.queue", 0.99),
        answer_ms=answer_ms,
        queued=number("agent.queued_requests"),
        running=number("agent.server_active_calls"),
        pending=number("agent.pending_calls"),
        lost=now.lost,
        waiting=now.waiting,
        unsent=(
            number("agent.send_waiting_messages") or 0,
            number("agent.send_waiting_bytes") or 0,
        ),
    )
