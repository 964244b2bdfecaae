"""Inject the faults, and judge what the workers report.

Two groups of four workers run side by side: a dynamic group on this host, and a static group whose
even ranks run on one host and whose odd ranks run on another (in network namespaces; where those
are forbidden, the static group runs on this host too). worker0 of each group is never killed: the
test measures this survivor. A killed worker is started again under its name and rank while the load
goes on. In the end the static group shuts down gracefully.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.chaos import load
from tests.process.group import Group, Worker
from tests.support import netns

ROUND = 6.0  # s of load
KEEPALIVE = 1.0
#: How much more a survivor may hold at the end than after the first rounds. In MB: memory that is
#: resident (malloc() keeps free what it has taken for some twenty threads), memory that malloc()
#: has given out, and shared memory. The rest are counts.
SLACK = {
    "memory": 150.0,
    "allocated": 10.0,
    "shared": 120.0,
    "fds": 12.0,
    "threads": 12.0,
    "pending": 0.0,
}
#: What each cut of the link may leave behind (docs/faults.md, "Not promised").
FDS_PER_CUT = 1.0
WARM_UP = 2  # rounds
ROUNDS = WARM_UP + 6  # at least: in fewer, the descriptors of single rounds would decide
#: The kinds of faults, the gravest first. "delay" stops a process for less than the keepalive time,
#: "stop" for more. "cut" takes the link between the hosts down, for less or more than the keepalive
#: time; "slow" delays its packets.
KINDS = ("kill", "cut", "stop", "slow", "delay")

Hosts = tuple[netns.Host, netns.Host]


@dataclass(frozen=True)
class Fault:
    """A fault, its victims, and when it began and ended (CLOCK_MONOTONIC)."""

    kind: str
    victims: frozenset[str]
    start: float
    end: float


@dataclass
class Findings:
    """The results of all rounds."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    calls: int = 0
    restarts: int = 0

    def take(self, where: str, report: load.Report, faults: list[Fault]) -> None:
        """Count a worker's calls by the fault that their target suffered at the time."""
        self.wrong += [f"{where}: {text}" for text in report.wrong]
        for call in report.calls:
            met = [
                fault.kind
                for fault in faults
                # Calls may still meet the consequences of a fault for a while after it.
                if fault.victims.intersection(call.targets)
                and fault.start < call.end < fault.end + 10
                if call.start < fault.end + 1
            ]
            # Of several faults at about the same time, the gravest counts.
            gravest = min(met, key=KINDS.index) if met else "none"
            self.outcomes.setdefault(gravest, Counter())[call.outcome] += 1
            self.calls += 1

    def table(self) -> str:
        """A table: how many calls had which outcome, for each kind of fault."""
        names = sorted({name for row in self.outcomes.values() for name in row})
        rows = [["target's fault", "injected", *names]]
        for kind in ["none", *sorted(set(self.outcomes) - {"none"})]:
            row = self.outcomes.get(kind, Counter())
            injected = str(self.faults[kind]) if kind != "none" else ""
            rows.append([kind, injected, *(str(row[name]) for name in names)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )


class Fleet:
    """One group, and the faults that it suffers. One thread uses a Fleet: the one that calls
    round()."""

    def __init__(
        self, size: int, dynamic: bool, seed: str, findings: Findings, hosts: Hosts | None = None
    ) -> None:
        self.hosts, self.findings = hosts, findings
        self.source = random.Random(seed)
        self.name = "dynamic" if dynamic else "static"
        self.cuts = 0
        self.descriptors: list[dict[str, int]] = []
        self.held: list[dict[str, float]] = []
        options = {"keepalive": KEEPALIVE, "rpc_timeout": 20.0, "num_worker_threads": 4}
        self.group = Group(
            size,
            dynamic=dynamic,
            timeout=150,  # torch waits 100 s for RRefs whose users vanished, see docs/faults.md
            options={**options, "interface": "eth0"} if hosts else options,
            hosts=[hosts[rank % 2] for rank in range(size)] if hosts else None,
        )

    def round(self, number: int) -> None:
        """One round: load and faults, then a pause in which every worker must serve calls."""
        names = [worker.name for worker in self.group]
        running: dict[str, tuple[Worker, Any]] = {}
        end = time.monotonic() + ROUND

        def begin(worker: Worker, seconds: float) -> None:
            others = [name for name in names if name != worker.name]
            seed = self.source.randrange(1 << 30)
            running[worker.name] = (worker, worker.start(load.run, others, seconds, seed))

        for worker in self.group:
            begin(worker, ROUND)
        faults: list[Fault] = []
        while time.monotonic() < end - 1.5:
            time.sleep(self.source.uniform(0.1, 0.8))
            victim = self.source.choice(self.group.workers[1:])
            victims = frozenset({victim.name})
            kind = self.source.choice(("kill", "stop", "delay", *self._of_the_link()))
            start = time.monotonic()
            if kind == "kill":
                victim.kill()
                running.pop(victim.name)
                time.sleep(self.source.uniform(0, 1))
                self.findings.restarts += 1
                begin(self.group.start_again(victim.rank), max(end - time.monotonic(), 0.5))
            elif kind in ("cut", "slow"):
                victims = frozenset(names)
                self._disturb_the_link(kind)
            else:
                self._stop(victim, kind)
            self.findings.faults[kind] += 1
            faults.append(Fault(kind, victims, start, time.monotonic()))
        for worker, call in running.values():
            report = call.result(60)
            self.findings.take(f"round {number}, {self.name} {worker.name}", report, faults)
        self._quiet()

    def _stop(self, victim: Worker, kind: str) -> None:
        pid = netns.pid_inside(victim.child.pid) if self.hosts else victim.child.pid
        os.kill(pid, signal.SIGSTOP)
        longest = (1.5, 3.0) if kind == "stop" else (0.02, 0.4)
        time.sleep(self.source.uniform(*longest))
        os.kill(pid, signal.SIGCONT)

    def _of_the_link(self) -> tuple[str, ...]:
        if self.hosts is None:
            return ()
        return ("cut", "slow") if _can_be_slow(self.hosts) else ("cut",)

    def _disturb_the_link(self, kind: str) -> None:
        assert self.hosts is not None
        if kind == "slow":
            netns.shape(self.hosts, netns.Link(delay_ms=self.source.choice((20, 100))))
            time.sleep(self.source.uniform(0.5, 2.0))
            netns.shape(self.hosts, netns.Link())
            return
        self.cuts += 1
        self.hosts[1].run("ip", "link", "set", "eth0", "down")
        time.sleep(self.source.uniform(0.1, 3 * KEEPALIVE))
        self.hosts[1].run("ip", "link", "set", "eth0", "up")

    def _quiet(self) -> None:
        names = [worker.name for worker in self.group]
        for worker in self.group:
            worker.run(load.serves, [name for name in names if name != worker.name])
        time.sleep(0.5)
        self.held.append(self.group.run(load.footprint))
        self.descriptors.append(self.group.run(load.descriptors))

    def peers(self) -> str:
        """What each worker that still answers knows of the others."""
        lines = []
        for worker in self.group:
            with contextlib.suppress(Exception):
                lines.append(f"{worker.name} sees {worker.run(load.peers)}")
        return "\n".join(lines)

    def judge_growth(self) -> list[str]:
        """Compare what the survivor held in the first and in the last rounds; return what grew too
        much."""
        if len(self.held) < ROUNDS:
            return [f"{self.name}: {len(self.held)} rounds, too few to say whether anything grew"]
        samples = self.held[WARM_UP:]
        third = max(len(samples) // 3, 1)
        wrong = []
        for what, allowed in SLACK.items():
            slack = allowed + (FDS_PER_CUT * self.cuts if what == "fds" else 0)
            first = statistics.median(sample[what] for sample in samples[:third])
            last = statistics.median(sample[what] for sample in samples[-third:])
            print(
                f"{self.name} survivor's {what}: {first:.0f} in the first rounds, {last:.0f} last"
            )
            if last > first + slack:
                kinds = f": {self._grown_descriptors(third)}" if what == "fds" else ""
                wrong.append(f"{self.name}: {what} grew from {first:.0f} to {last:.0f}{kinds}")
        return wrong

    def _grown_descriptors(self, third: int) -> dict[str, int]:
        samples = self.descriptors[WARM_UP:]
        kinds = {kind for sample in samples for kind in sample}

        def median(kind: str, some: list[dict[str, int]]) -> float:
            return statistics.median(sample.get(kind, 0) for sample in some)

        growth = {
            kind: round(median(kind, samples[-third:]) - median(kind, samples[:third]))
            for kind in kinds
        }
        return {kind: grown for kind, grown in growth.items() if grown != 0}

    def close(self, gently: bool) -> None:
        self.group.close(gently=gently)


@functools.cache
def _can_be_slow(hosts: Hosts) -> bool:
    try:
        netns.shape(hosts, netns.Link(delay_ms=1))
        netns.shape(hosts, netns.Link())
    except netns.NotPossible as reason:
        print(f"the cable cannot be made slow: {reason}")
        return False
    return True


@contextlib.contextmanager
def _hosts(say: Callable[[str], None]) -> Iterator[Hosts | None]:
    with contextlib.ExitStack() as stack:
        hosts: Hosts | None = None
        try:
            hosts = stack.enter_context(netns.two_hosts())
        except netns.NotPossible as reason:
            say(f"all on this host, no cables: {reason}")
        yield hosts


def run(seconds: float, seed: int, say: Callable[[str], None] = print) -> Findings:
    """Run for about ``seconds``, and at least ROUNDS rounds; Findings.wrong says what went
    wrong."""
    say(f"chaos: {seconds:.0f} s, seed {seed}")
    findings = Findings()
    with _hosts(say) as hosts:
        fleets = [
            Fleet(4, True, f"{seed}/dynamic", findings),
            Fleet(4, False, f"{seed}/static", findings, hosts),
        ]
        _drive(fleets, seconds, findings)
    say(findings.table())
    say(f"{findings.calls} calls, {findings.restarts} restarts, {len(findings.wrong)} findings")
    for text in findings.wrong:
        say(f"FINDING (seed {seed}): {text}")
    return findings


def _drive(fleets: list[Fleet], seconds: float, findings: Findings) -> None:
    end = time.monotonic() + seconds

    def drive(fleet: Fleet) -> None:
        number = 0
        try:
            while time.monotonic() < end or number < ROUNDS:
                fleet.round(number)
                number += 1
        except BaseException as problem:  # noqa: BLE001  each problem is a finding
            output = fleet.group.output()[-20_000:]
            notes = "".join(getattr(problem, "__notes__", []))
            findings.wrong.append(
                f"round {number}, {fleet.name}: {problem!r} {notes}\n{fleet.peers()}\n{output}"
            )

    threads = [threading.Thread(target=drive, args=(fleet,)) for fleet in fleets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fleet in fleets:
        findings.wrong += fleet.judge_growth()
        try:
            fleet.close(gently=not findings.wrong)
        except BaseException as problem:  # noqa: BLE001  each problem is a finding
            # The end of the output of each process shows where that process stands.
            ends = [text[-5000:] for text in fleet.group.output().split("\n---- ")]
            output = "\n---- ".join(ends)
            findings.wrong.append(f"the end of the {fleet.name} group: {problem!r}\n{output}")
