"""profile(): recording the calls of a whole group from one worker."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext import monitoring
from torch_rpc_ext._calls import failures
from torch_rpc_ext.profiler import chrome, clocks, joining, recorder, table
from torch_rpc_ext.profiler.records import Recording
from torch_rpc_ext.profiler.table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["profile"]

logger = logging.getLogger(__name__)
rpc: Any = _untyped_rpc  # upstream's functions have no types

# For starting or stopping a worker's recording, s; torch.profiler takes seconds the first time.
_RECORDING_TIMEOUT = 120.0
# For the question at the end whether a worker still answers, s.
_ANSWER_TIMEOUT = 10.0
_MAX_ENTRIES = 1_000_000
_ENDED_BY_ANOTHER = (
    "a torch.profiler of its program began or ended during the profile, which ends the recording "
    "of operators"
)


class profile:  # noqa: N801  a context manager, named as torch.profiler.profile
    """Records the calls of the group's workers within a ``with`` block. A context manager.

    ::

        with profile(["worker0", "worker1"], operators=False) as prof:
            train_step()
        print(prof.summary())

    The other workers go on with their work; their recordings are fetched at the end. A worker that
    is lost meanwhile, or that does not answer at the end, is left out, with a warning.

    Args:
        workers: names; None for all workers of the group. Calls to other workers are sent as they
            are without a profiler.
        operators: also record the operators of all threads, with torch.profiler: on the CPU, and
            on CUDA devices where there are some. A worker whose program runs a torch.profiler of
            its own records its calls only, with a warning.
        limit: after this time a worker stops by itself and drops its recording, s, because the
            profiling worker may have died.
        max_entries: how many calls and how many executions a worker keeps; of later ones it keeps
            only the number.
        timeout: how long to wait at the end for a worker's answer, s. A worker that is stopped or
            has no free thread does not answer; it is left out, and records until its `limit`.

    Attributes:
        recordings: worker name -> Recording, after the block.
        clocks: worker name -> Clock; its error_ns says how exact times between workers are.
        missing: worker name -> why there is no recording of that worker.
        without_operators: worker name -> why the worker's recording has calls only, although
            `operators` was given.

    Raises:
        TypeError: `workers` is a text.
        ValueError: a worker is not in the group, or a number is out of range.
        RuntimeError: RPC is not initialized; the workers have different versions of torch; a worker
            is being profiled already, or cannot be profiled. The text names the worker.
    """

    def __init__(
        self,
        workers: Sequence[str] | None = None,
        *,
        operators: bool = True,
        limit: float = 600.0,
        max_entries: int = _MAX_ENTRIES,
        timeout: float = _ANSWER_TIMEOUT,
    ) -> None:
        if isinstance(workers, str):
            raise TypeError(f"workers must be a list of names, got the text {workers!r}")
        if not limit > 0:
            raise ValueError(f"limit must be more than 0 s, got {limit!r}")
        if limit > threading.TIMEOUT_MAX:
            most = threading.TIMEOUT_MAX
            raise ValueError(f"limit must be at most {most:.0f} s, got {limit!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be more than 0 s, got {timeout!r}")
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries!r}")
        self._wanted = None if workers is None else list(dict.fromkeys(workers))
        self._arguments = (operators, max_entries, limit)
        self._timeout = timeout
        self._session = secrets.token_hex(8)
        self._workers: list[str] = []
        self._first: dict[str, clocks.Sample] = {}
        self.recordings: dict[str, Recording] = {}
        self.clocks: dict[str, clocks.Clock] = {}
        self.missing: dict[str, str] = {}
        self.without_operators: dict[str, str] = {}
        self.begin_ns = self.end_ns = 0

    def __enter__(self) -> profile:
        members = monitoring.member_names()
        self._workers = members if self._wanted is None else self._wanted
        unknown = [name for name in self._workers if name not in members]
        if unknown:
            raise ValueError(
                f"{', '.join(map(repr, unknown))}: no such worker in this group; there are "
                f"{', '.join(members)}"
            )
        _check_versions(self._ask(recorder.describe))
        me = rpc.get_worker_info().name
        try:
            begun = self._ask(recorder.start, me, self._session, *self._arguments, self._workers)
            # A worker with an older release answers None.
            self.without_operators = {
                name: why for name, why in begun.items() if isinstance(why, str) and why
            }
            self._first = {name: _compare(name) for name in self._workers}
        except BaseException:
            self._abandon()
            raise
        self.begin_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_ns = time.perf_counter_ns()
        try:
            self._leave_out_silent_ones()
            self._compare_clocks()
            self.recordings = joining.joined(self._fetch())
        except BaseException:  # Ctrl-C
            self._abandon()
            raise
        for name, why in self.missing.items():
            logger.warning("no recording of worker %s: %s", name, why)
        self._note_lost_operators()
        for name, why in self.without_operators.items():
            logger.warning("no operators of worker %s: %s", name, why)

    def _present(self) -> list[str]:
        return [name for name in self._workers if name not in self.missing]

    def _leave_out_silent_ones(self) -> None:
        """Move workers that do not answer to `missing`; all are asked at once, to wait once."""
        for name, answer in self._start_asking(recorder.now, timeout=self._timeout):
            try:
                answer()
            except Exception as problem:  # noqa: BLE001  a worker may answer with any error
                why = failures.brief(problem)
                if failures.is_timeout(problem):
                    why = f"it did not answer for {self._timeout:g} s; it is left as it is ({why})"
                self.missing[name] = why

    def _compare_clocks(self) -> None:
        for name in self._present():
            try:
                last = clocks.compare(name)
            except Exception as problem:  # noqa: BLE001  as above
                self.missing[name] = failures.brief(problem)
            else:
                self.clocks[name] = clocks.Clock(self._first[name], last)

    def _fetch(self) -> dict[str, Recording]:
        """Stop the recordings; return worker name -> Recording."""
        fetched: dict[str, Recording] = {}
        for name, answer in self._start_asking(recorder.stop, self._session):
            try:
                plain = answer()
                if plain is not None:
                    fetched[name] = Recording.from_plain(plain)
                    continue
                why = (
                    f"it had stopped by itself at the limit ({self._arguments[2]} s), or shut down"
                )
            except Exception as problem:  # noqa: BLE001  as above
                why = failures.brief(problem)
            self.missing[name] = why
        return fetched

    def _note_lost_operators(self) -> None:
        """Keep `without_operators` to the workers that have a recording without operators."""
        for name in list(self.without_operators):
            if name not in self.recordings:
                del self.without_operators[name]
        operators = self._arguments[0]
        for name, recording in self.recordings.items():
            if operators and not recording.operators:
                self.without_operators.setdefault(name, _ENDED_BY_ANOTHER)

    def table(self) -> list[Row]:
        """Return one row for each function and callee, the row with the longest time first."""
        return table.rows(self.recordings)

    def summary(self, width: int | None = None) -> str:
        """Return the table as text; below it the errors of the clocks, and what is missing.

        Args:
            width: of the terminal, characters: a wider table is cut into parts, one below the
                other. None: the table is not cut.
        """
        worst = max((clock.error_ns for clock in self.clocks.values()), default=0)
        lines = [
            table.text(self.table(), width),
            f"clocks of {len(self.clocks)} workers aligned within {worst / 1e3:.1f} us",
            *(f"missing: {name}, {why}" for name, why in self.missing.items()),
            *(f"no operators: {name}, {why}" for name, why in self.without_operators.items()),
        ]
        return "\n".join(lines)

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write one trace of all workers; https://ui.perfetto.dev opens it.

        Args:
            path: of the file, JSON.

        Raises:
            ValueError: a worker has sent too many operators. The text names the worker.
        """
        trace = chrome.merge(self.recordings, self.clocks, self.begin_ns, self.end_ns)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw a timeline, for a notebook; needs matplotlib.

        Args:
            path: a file to save the picture to, such as "trace.png"; None for no file.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: as export_chrome_trace().
        """
        from torch_rpc_ext.profiler import picture

        figure = picture.draw(self.recordings, self.clocks, self.begin_ns, self.end_ns)
        if path is not None:
            figure.savefig(path, dpi=130)
        return figure

    def _start_asking(
        self, function: Any, *arguments: Any, timeout: float = _RECORDING_TIMEOUT
    ) -> list[tuple[str, Callable[[], Any]]]:
        """Call a function on all workers that are not missing.

        Returns:
            For each worker (name, function that waits for the answer and returns it).
        """
        asked: list[tuple[str, Callable[[], Any]]] = []
        for name in self._present():
            try:
                future = rpc.rpc_async(name, function, args=arguments, timeout=timeout)
            except Exception as problem:  # noqa: BLE001  raised where the answer is awaited
                asked.append((name, _raising(problem)))
            else:
                asked.append((name, future.wait))
        return asked

    def _ask(self, function: Any, *arguments: Any) -> dict[str, Any]:
        """Call a function on all workers; return name -> answer.

        Raises:
            RuntimeError: a worker failed; the text names the first that did.
        """
        answers: dict[str, Any] = {}
        failed: RuntimeError | None = None
        for name, answer in self._start_asking(function, *arguments):
            try:
                answers[name] = answer()
            except Exception as problem:  # noqa: BLE001  the callee lacks a module, say
                failed = failed or _cannot_be_profiled(name, problem)
        if failed is not None:
            raise failed
        return answers

    def _abandon(self) -> None:
        """Stop the recordings that have begun."""
        for name, answer in self._start_asking(recorder.stop, self._session, timeout=self._timeout):
            try:
                answer()
            except Exception as problem:  # noqa: BLE001  the other workers have to stop too
                why = failures.brief(problem)
                logger.warning("worker %s may go on recording: %s", name, why)


def _compare(name: str) -> clocks.Sample:
    """As clocks.compare(). Raises RuntimeError, whose text names the worker, for any error."""
    try:
        return clocks.compare(name)
    except Exception as problem:
        raise _cannot_be_profiled(name, problem) from problem


def _cannot_be_profiled(name: str, problem: Exception) -> RuntimeError:
    text = f"worker {name} cannot be profiled: {failures.brief(problem)}"
    return RuntimeError(text).with_traceback(problem.__traceback__)


def _raising(problem: Exception) -> Callable[[], Any]:
    def answer() -> Any:
        raise problem

    return answer


def _check_versions(answers: dict[str, str]) -> None:
    versions: dict[str, list[str]] = {}
    for name, text in answers.items():
        try:
            facts = json.loads(text)
            busy, version = facts["busy"], str(facts["torch"])
        except Exception as problem:
            raise _cannot_be_profiled(name, problem) from problem
        if busy:
            raise RuntimeError(
                f"worker {name} is being profiled already, by {busy}: one profile() at a time"
            )
        versions.setdefault(version, []).append(name)
    if len(versions) > 1:
        found = "; ".join(f"{version} on {', '.join(on)}" for version, on in versions.items())
        raise RuntimeError(
            f"a trace needs the same torch on all its workers, but there is {found}. Install the "
            "same, or name workers of one version: profile(workers=[...])"
        )
