"""Rounds and turns: all back ends are alive at once and run each round one after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks.backends import BACKENDS
from benchmarks.cases.interface import Case
from benchmarks.group import Group
from benchmarks.processes import WorkerFailed
from benchmarks.results import CaseResult


class Runner:
    """Runs cases on back ends; a context manager.

    A back end that fails a case is left out of it, and goes on with the next in new processes.

    Args:
        backends: names in BACKENDS.
    """

    def __init__(self, backends: Sequence[str]) -> None:
        self.backends = list(backends)
        self._pairs: dict[str, Group] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for pair in self._pairs.values():
            try:
                pair.__exit__(kind, error, tb)
            except WorkerFailed as failure:
                # All figures are there already; that it cannot leave in peace is still news.
                print(f"{pair.backend} at its end: {failure}", file=sys.stderr)

    def run(self, cases: Sequence[tuple[Case, int]]) -> Iterator[CaseResult]:
        """Run cases, each with a number of rounds; yields each result when it is there."""
        total = sum((rounds + (not case.alone)) * len(self.backends) for case, rounds in cases)
        with tqdm(total=total, disable=not sys.stderr.isatty(), leave=False, unit="round") as bar:
            for case, rounds in cases:
                bar.set_description(case.name)
                yield self._run(case, rounds, bar)

    def _run(self, case: Case, rounds: int, bar: tqdm) -> CaseResult:
        result = CaseResult(case, rounds={backend: [] for backend in self.backends})
        for backend in self.backends:
            missing = case.needs - BACKENDS[backend].functions
            if missing:
                result.failures[backend] = f"it has no {', '.join(sorted(missing))}"
        # The first round of a pair connects and allocates; it is not counted.
        for turn in range(0 if case.alone else -1, rounds):
            # Who goes first changes, so that neither always finds the other's caches.
            for backend in self.backends if turn % 2 == 0 else reversed(self.backends):
                if backend not in result.failures:
                    self._turn(result, backend, counts=turn >= 0)
                bar.update()
        return result

    def _turn(self, result: CaseResult, backend: str, *, counts: bool) -> None:
        try:
            pair = None if result.case.alone else self._pair(backend)
            one = result.case.round(backend, pair)
        except WorkerFailed as failure:
            result.failures[backend] = str(failure)
            broken = self._pairs.pop(backend, None)
            if broken is not None:
                broken.close()
            return
        if counts:
            result.rounds[backend].append(one)

    def _pair(self, backend: str) -> Group:
        if backend not in self._pairs:
            self._pairs[backend] = Group(backend).__enter__()
        return self._pairs[backend]
