"""Asking all workers of a group how they are, again and again: the data of ``top``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext import errors, monitoring

rpc: Any = _untyped_rpc  # upstream's functions have no types

#: States of a worker.
ALIVE, SUSPECT, DEAD, REFUSES = "alive", "suspect", "dead", "refuses"


@dataclass(frozen=True)
class WorkerState:
    """One worker at one moment; None where it is not known.

    Attributes:
        worker: its name.
        state: alive; suspect: no answer in time, but its connection holds; dead: it cannot be
            reached; refuses: it answers, but does not serve torch_rpc_ext.monitoring.
        why: what is wrong, '' for nothing.
        host: where it runs.
        pid: its process.
        transports: "control / bulk" of its connections, each pair once.
        calls_per_s: calls that it makes.
        served_per_s: calls that it answers.
        sent_per_s: bytes/s.
        received_per_s: bytes/s.
        latency_ms: mean of its calls since its start.
        answer_ms: round trip of this question.
        queued: requests that wait for a thread.
        running: requests that run.
        pending: its own calls that wait for an answer.
        lost: names of workers that it cannot reach any more.
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
    answer_ms: float | None = None
    queued: int | None = None
    running: int | None = None
    pending: int | None = None
    lost: tuple[str, ...] = ()


class Poller:
    """Asks, and remembers the answers of the time before for the rates.

    Thread Safety: one thread at a time.

    Args:
        names: which workers to ask, asked anew each time; by default all of the group, this one
            included.
        timeout: how long to wait for an answer, s; then a worker is suspect.
    """

    def __init__(
        self,
        names: Callable[[], Iterable[str]] = monitoring.member_names,
        *,
        timeout: float = 2.0,
    ) -> None:
        self._names, self._timeout = names, timeout
        self._before: dict[str, dict[str, Any]] = {}

    def poll(self) -> list[WorkerState]:
        """Ask all at once.

        Returns:
            One entry for each, in the order of the names. Rates are None the first time.
        """
        questions = [(name, *self._ask(name)) for name in self._names()]
        states = [self._state(name, future, took) for name, future, took in questions]
        known = {state.worker for state in states}
        self._before = {name: s for name, s in self._before.items() if name in known}
        return states

    def _ask(self, name: str) -> tuple[Any, list[float]]:
        """Return a future, or the error at once; and a list that gets how long it took, s."""
        took: list[float] = []
        begin = time.perf_counter()
        try:
            future = rpc.rpc_async(name, monitoring.snapshot, timeout=self._timeout)
        except RuntimeError as problem:
            return problem, took
        future.add_done_callback(lambda _: took.append(time.perf_counter() - begin))
        return future, took

    def _state(self, name: str, future: Any, took: list[float]) -> WorkerState:
        try:
            if isinstance(future, RuntimeError):
                raise future
            now = future.wait()
        except RuntimeError as problem:
            self._before.pop(name, None)
            return WorkerState(name, _kind(problem), why=errors.brief(problem))
        before, self._before[name] = self._before.get(name), now
        return _describe(name, now, before, took[0] * 1e3 if took else None)


def _kind(problem: RuntimeError) -> str:
    if isinstance(problem, errors.RefusedError):
        return REFUSES
    timed_out = isinstance(problem, errors.CallTimeoutError) or "timeout" in str(problem).lower()
    return SUSPECT if timed_out else DEAD


def _describe(
    name: str, now: dict[str, Any], before: dict[str, Any] | None, answer_ms: float | None
) -> WorkerState:
    counters = now["counters"]

    def number(key: str) -> int | None:
        return int(counters[key]) if key in counters else None

    def rate(key: str) -> float | None:
        # A worker that has come back under its name counts from 0 again.
        if before is None or before["pid"] != now["pid"] or key not in counters:
            return None
        seconds = now["time"] - before["time"]
        return (counters[key] - before["counters"][key]) / seconds if seconds > 0 else None

    latency = counters.get("agent.average_latency_us")
    return WorkerState(
        name,
        ALIVE,
        host=now["host"],
        pid=now["pid"],
        transports=tuple(sorted({f"{p['control']} / {p['bulk']}" for p in now["peers"]})),
        calls_per_s=rate("agent.calls_sent"),
        served_per_s=rate("agent.calls_served"),
        sent_per_s=rate("agent.bytes_sent"),
        received_per_s=rate("agent.bytes_received"),
        latency_ms=latency / 1e3 if latency else None,
        answer_ms=answer_ms,
        queued=number("agent.queued_requests"),
        running=number("agent.server_active_calls"),
        pending=number("agent.pending_calls"),
        lost=tuple(now["lost"]),
    )
