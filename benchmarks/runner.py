"""Rounds and turns: all back ends are alive at once and take turns in each round, and the rounds of
a case are spread over the time of similar cases."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks.backends import BACKENDS
from benchmarks.backends.interface import Backend
from benchmarks.cases.interface import Case
from benchmarks.group import Group
from benchmarks.processes import WorkerFailed
from benchmarks.results import CaseResult
from tests.support import netns

# A back end that is ten times slower would take ten times as long to measure. It has so many
# seconds for a case in PASSES passes; they are spread over the passes as the rounds are. It gets no
# round beyond them when it has had so many rounds, and none after a round that took as long.
_ENOUGH_SECONDS, _ENOUGH_ROUNDS = 15.0, 3
# Cold caches cost some ms. Where a round takes longer than this, s, they do not matter, and a pass
# of the case need not begin with a round that is not counted.
_LONG = 0.5
# New processes have no buffers, and after a pause receivers have given theirs back (ours after
# 30 s). Then a round that counts has one before it that does not, but where a round takes so long,
# s, that the difference is small.
_PAUSE, _VERY_LONG = 10.0, 5.0
# Now and then a core is slow for some seconds, as long as a whole case takes, because guests of a
# host share its cores. With a case's rounds spread over so many passes, less than half of them are
# disturbed. Rounds of one pass are alike, so a pass counts as one sample. All passes weigh the same
# where the number of rounds is a multiple of this.
PASSES = 10
# A case that needs a larger share of the machine's memory is left out.
_SHARE = 0.8


@dataclass(frozen=True)
class Contender:
    """A back end, or a revision of a back end, that is compared with others.

    Attributes:
        name: in the tables.
        backend: name in BACKENDS.
        tree: folder with the packages that its workers import; None for the installed packages.
    """

    name: str
    backend: str
    tree: Path | None = None


class _Key(NamedTuple):
    """What two cases must have in common to use the same group of workers.

    The link is part of it, because a connection keeps the frame size that it was opened with.
    """

    contender: str
    size: int
    link: netns.Link | None


class Runner:
    """Runs cases on contenders; a context manager.

    A contender that fails in a case is left out of that case, and takes part in the next one with
    new processes.

    Args:
        contenders: in the order of their turns.
        passes: number of passes over which the rounds of a case are spread.
        renew: start new processes for each pass. Two processes of the same program differ by up to
            30 %, by where their memory and threads happen to be, and more rounds in the same
            process do not even that out.
    """

    def __init__(
        self, contenders: Sequence[Contender], *, passes: int = PASSES, renew: bool = False
    ) -> None:
        self.contenders = list(contenders)
        self._passes, self._renew = passes, renew
        self._groups: dict[_Key, Group] = {}
        self._used: dict[_Key, float] = {}  # when a group ended its last turn
        self._hosts: tuple[netns.Host, netns.Host] | None = None
        self._stack = contextlib.ExitStack()  # removes the hosts at the end

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
        """Run cases, each with its number of rounds; yield a result when its case is done."""
        total = sum(
            _turns(case, part) for case, rounds in cases for part in self._parts(case, rounds)
        )
        bar = tqdm(
            total=total * len(self.contenders),
            disable=not sys.stderr.isatty(),
            leave=False,
            unit="round",
        )
        with bar:
            later = list(cases)
            for _, neighbours in itertools.groupby(cases, key=lambda entry: _alike(entry[0])):
                stretch = list(neighbours)
                results = [self._prepare(case) for case, _ in stretch]
                for number in range(self._passes):
                    for result, (case, rounds) in zip(results, stretch, strict=True):
                        bar.set_description(case.name)
                        self._run(result, number, self._parts(case, rounds), bar)
                    if self._renew:
                        self._leave_unneeded([])
                yield from results
                del later[: len(stretch)]
                self._leave_unneeded([case for case, _ in later])

    def _prepare(self, case: Case) -> CaseResult:
        result = CaseResult(case, rounds={one.name: [] for one in self.contenders})
        for contender in self.contenders:
            why = _why_not(case, BACKENDS[contender.backend])
            if why:
                result.skips[contender.name] = why
        return result

    def _parts(self, case: Case, rounds: int) -> list[int]:
        """Return the number of a case's rounds in each pass."""
        if self._is_large(case):
            return [rounds, *[0] * (self._passes - 1)]
        ends = [rounds * number // self._passes for number in range(self._passes + 1)]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def _run(self, result: CaseResult, passing: int, parts: Sequence[int], bar: tqdm) -> None:
        """Run a case's rounds of a pass; `parts` has the number of its rounds in each pass."""
        rounds = parts[passing]
        if rounds > 0:
            self._shape(result)
        due = sum(parts[: passing + 1]) / max(sum(parts), 1)
        enough = _ENOUGH_SECONDS * due * max(self._passes / PASSES, 1)
        for turn, one in self._order(result, rounds):
            # The first turn is not counted: it connects and allocates, or the caches hold data of
            # another case.
            counts = result.case.alone or turn > 0
            bar.update()
            out = one.name in result.skips or one.name in result.failures
            if out or _sits_out(result, one.name, enough, counts=counts):
                continue
            took = self._turn(result, one, passing if counts else None)
            result.turns[one.name].append(took)

    def _order(self, result: CaseResult, rounds: int) -> Iterator[tuple[int, Contender]]:
        """Yield the turns of a pass: number of the contender's turn, and contender."""
        turns = _turns(result.case, rounds)
        if self._is_large(result.case):
            yield from ((turn, one) for one in self.contenders for turn in range(turns))
            return
        for turn in range(turns):
            # The order alternates, so that no contender always finds the caches of the other one.
            result.begun += result.case.alone or turn > 0
            for one in reversed(self.contenders) if result.begun % 2 else self.contenders:
                yield turn, one

    def _is_large(self, case: Case) -> bool:
        """Return whether the machine's memory does not do for all contenders at once. Then each has
        all of its turns in a row, because new processes need some rounds to get warm."""
        needed = sum(case.memory(one.backend) for one in self.contenders)
        return needed > psutil.virtual_memory().total

    def _shape(self, result: CaseResult) -> None:
        """Make the network that a case needs; where that is impossible, skip the case for all."""
        if result.case.link is None:
            return
        try:
            if self._hosts is None:
                self._hosts = self._stack.enter_context(netns.two_hosts())
            netns.shape(self._hosts, result.case.link)
        except netns.NotPossible as reason:
            for contender in self.contenders:
                result.skips.setdefault(contender.name, str(reason))

    def _turn(self, result: CaseResult, contender: Contender, passing: int | None) -> float:
        """Run a round, which counts in a pass, if there is one; return how long it took, s."""
        case, key = result.case, _key(result.case, contender)
        try:
            self._make_room(key, case.memory(contender.backend))
            start = time.monotonic()
            if case.alone:
                with contextlib.closing(self._new_group(key, contender)) as group:
                    one = case.round(group)
            else:
                group = self._group(key, contender)
                if passing is not None and self._is_cold(key, result.turns[contender.name]):
                    case.round(group)
                start = time.monotonic()
                one = case.round(group)
                self._used[key] = time.monotonic()
        except WorkerFailed as failure:
            result.failures[contender.name] = str(failure)
            broken = self._groups.pop(key, None)
            self._used.pop(key, None)
            if broken is not None:
                broken.close()
            return 0.0
        took = time.monotonic() - start
        if passing is not None:
            result.rounds[contender.name].append(replace(one, passing=passing))
        return took

    def _make_room(self, key: _Key, needed: int) -> None:
        """End the groups of all others if they hold memory that the group in turn needs, B."""
        if needed > psutil.virtual_memory().available:
            for other in self._groups.keys() - {key}:
                self._leave(other)

    def _is_cold(self, key: _Key, turns: Sequence[float]) -> bool:
        """Return whether a group has to warm up for a case in which its turns took so long, s."""
        pause = time.monotonic() - self._used.get(key, -math.inf)
        return pause > _PAUSE and not (turns and turns[-1] > _VERY_LONG)

    def _group(self, key: _Key, contender: Contender) -> Group:
        if key not in self._groups:
            self._groups[key] = self._new_group(key, contender).__enter__()
        return self._groups[key]

    def _new_group(self, key: _Key, contender: Contender) -> Group:
        hosts = self._hosts if key.link is not None else None
        return Group(contender.backend, key.size, hosts=hosts, tree=contender.tree)

    def _leave_unneeded(self, cases: Sequence[Case]) -> None:
        """End the groups that none of these cases uses, because they hold memory and wake up."""
        needed = {_key(case, one) for case in cases if not case.alone for one in self.contenders}
        for key in self._groups.keys() - needed:
            self._leave(key)

    def _leave(self, key: _Key) -> None:
        self._used.pop(key, None)
        try:
            self._groups.pop(key).__exit__(None, None, None)
        except WorkerFailed as failure:
            # The figures are complete, but a group that cannot end properly is worth a line.
            print(f"{key.contender} at its end: {failure}", file=sys.stderr)


def _alike(case: Case) -> tuple[bool, int, bool]:
    """Return what cases must have in common for their passes to alternate.

    Cases between hosts alternate among themselves only: their rounds are long, so few have a round
    before them that is not counted, and after a pause of 30 s receivers give their buffers back.
    """
    return case.alone, case.size, case.link is not None


def _turns(case: Case, rounds: int) -> int:
    """Return how many turns a contender has in a pass; in a group that lives on, one of them is not
    counted."""
    return rounds + (rounds > 0 and not case.alone)


def _sits_out(result: CaseResult, name: str, enough: float, *, counts: bool) -> bool:
    """Return whether a contender skips a turn, which would take long and tell little.

    Args:
        enough: how long its turns so far may have taken, s.
        counts: whether the turn would count.
    """
    turns, rounds = result.turns[name], len(result.rounds[name])
    if rounds == 0:
        return False
    if turns[-1] > _ENOUGH_SECONDS or (rounds >= _ENOUGH_ROUNDS and sum(turns) > enough):
        return True
    return not counts and turns[-1] > _LONG


def _key(case: Case, contender: Contender) -> _Key:
    return _Key(contender.name, case.size, case.link)


def _why_not(case: Case, backend: type[Backend]) -> str:
    missing = case.needs - backend.functions - backend.offers
    if missing:
        return f"it has no {', '.join(sorted(missing))}"
    needed = case.memory(backend.name)
    if needed > _SHARE * psutil.virtual_memory().total:
        return f"it would need about {needed / 1e9:.0f} GB of memory"
    return ""
