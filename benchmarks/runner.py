"""Rounds and turns: all back ends are alive at once and run each round one after the other."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks.backends import BACKENDS
from benchmarks.backends.interface import Backend
from benchmarks.cases.interface import Case
from benchmarks.group import Group
from benchmarks.processes import WorkerFailed
from benchmarks.results import CaseResult
from tests.support import netns

# A peer that takes ten times as long as the others would take ten times as long to measure.
_ENOUGH_SECONDS, _ENOUGH_ROUNDS = 20.0, 3


@dataclass(frozen=True)
class Contender:
    """One that is compared.

    Attributes:
        name: in the tables.
        backend: name in BACKENDS.
        tree: folder with the packages that its workers import; None for those installed.
    """

    name: str
    backend: str
    tree: Path | None = None


class _Key(NamedTuple):
    """What a group of workers can be used again for.

    Not for another link: a connection keeps the size of the frames that it was made with.
    """

    contender: str
    size: int
    link: netns.Link | None


class Runner:
    """Runs cases on contenders; a context manager.

    One that fails a case is left out of it, and goes on with the next in new processes.

    Args:
        contenders: in the order of their turns.
    """

    def __init__(self, contenders: Sequence[Contender]) -> None:
        self.contenders = list(contenders)
        self._groups: dict[_Key, Group] = {}
        self._hosts: tuple[netns.Host, netns.Host] | None = None
        self._stack = contextlib.ExitStack()  # keeps the hosts

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for key in list(self._groups):
            if error is None:
                self._leave(key)
            else:
                self._groups.pop(key).close()
        self._stack.close()

    def run(self, cases: Sequence[tuple[Case, int]]) -> Iterator[CaseResult]:
        """Run cases, each with a number of rounds; yields each result when it is there."""
        total = sum((rounds + (not case.alone)) * len(self.contenders) for case, rounds in cases)
        with tqdm(total=total, disable=not sys.stderr.isatty(), leave=False, unit="round") as bar:
            for index, (case, rounds) in enumerate(cases):
                bar.set_description(case.name)
                yield self._run(case, rounds, bar)
                self._leave_unneeded([later for later, _ in cases[index + 1 :]])

    def _run(self, case: Case, rounds: int, bar: tqdm) -> CaseResult:
        result = CaseResult(case, rounds={one.name: [] for one in self.contenders})
        spent = dict.fromkeys(result.rounds, 0.0)
        for contender in self.contenders:
            why = _why_not(case, BACKENDS[contender.backend])
            if why:
                result.skips[contender.name] = why
        self._shape(result)
        # The first round of a group connects and allocates; it is not counted.
        for turn in range(0 if case.alone else -1, rounds):
            # Who goes first changes, so that neither always finds the other's caches.
            for one in self.contenders if turn % 2 == 0 else reversed(self.contenders):
                bar.update()
                enough = spent[one.name] > _ENOUGH_SECONDS and turn >= _ENOUGH_ROUNDS
                if enough or one.name in result.skips or one.name in result.failures:
                    continue
                start = time.monotonic()
                self._turn(result, one, counts=turn >= 0)
                spent[one.name] += time.monotonic() - start
        return result

    def _shape(self, result: CaseResult) -> None:
        """Make the network that a case needs; where that is impossible, all are left out of it."""
        if result.case.link is None:
            return
        try:
            if self._hosts is None:
                self._hosts = self._stack.enter_context(netns.two_hosts())
            netns.shape(self._hosts, result.case.link)
        except netns.NotPossible as reason:
            for contender in self.contenders:
                result.skips.setdefault(contender.name, str(reason))

    def _turn(self, result: CaseResult, contender: Contender, *, counts: bool) -> None:
        case, key = result.case, _key(result.case, contender)
        try:
            if case.alone:
                with contextlib.closing(self._new_group(key, contender)) as group:
                    one = case.round(group)
            else:
                one = case.round(self._group(key, contender))
        except WorkerFailed as failure:
            result.failures[contender.name] = str(failure)
            broken = self._groups.pop(key, None)
            if broken is not None:
                broken.close()
            return
        if counts:
            result.rounds[contender.name].append(one)

    def _group(self, key: _Key, contender: Contender) -> Group:
        if key not in self._groups:
            self._groups[key] = self._new_group(key, contender).__enter__()
        return self._groups[key]

    def _new_group(self, key: _Key, contender: Contender) -> Group:
        hosts = self._hosts if key.link is not None else None
        return Group(contender.backend, key.size, hosts=hosts, tree=contender.tree)

    def _leave_unneeded(self, cases: Sequence[Case]) -> None:
        """End the groups that none of these cases uses: they hold memory and wake up at times."""
        needed = {_key(case, one) for case in cases if not case.alone for one in self.contenders}
        for key in self._groups.keys() - needed:
            self._leave(key)

    def _leave(self, key: _Key) -> None:
        try:
            self._groups.pop(key).__exit__(None, None, None)
        except WorkerFailed as failure:
            # All figures are there already; that it cannot leave in peace is still news.
            print(f"{key.contender} at its end: {failure}", file=sys.stderr)


def _key(case: Case, contender: Contender) -> _Key:
    return _Key(contender.name, case.size, case.link)


def _why_not(case: Case, backend: type[Backend]) -> str:
    missing = case.needs - backend.functions - backend.offers
    if missing:
        return f"it has no {', '.join(sorted(missing))}"
    return case.why_not(backend.name)
