"""Injects the faults, and judges.

Two groups of this host run side by side, a dynamic one of five workers and a static one of three.
worker0 of each is never killed: it is the survivor that is measured. In the dynamic group a killed
worker is started again under its name while the load goes on; the static group, whose members do
not come back, is made anew after a death.
"""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos import load
from tests.process.group import Group, Worker

ROUND = 6.0  # s of load
KEEPALIVE = 1.0
#: How much a survivor may hold more at the end than after the first rounds.
SLACK = {"memory": 60.0, "fds": 12.0, "threads": 12.0, "pending": 0.0}
WARM_UP = 2  # rounds
#: The gravest first. A delay is shorter than the keepalive time, a stop longer.
KINDS = ("kill", "stop", "delay")


@dataclass(frozen=True)
class Fault:
    """What was done to whom, and from when to when it lasted (CLOCK_MONOTONIC)."""

    kind: str
    victim: str
    start: float
    end: float


@dataclass
class Findings:
    """What came out, over all rounds."""

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
                # What a fault leaves behind may be seen for a moment.
                if fault.victim in call.targets and fault.start < call.end < fault.end + 10
                if call.start < fault.end + 1
            ]
            # Of several at about the same time, the gravest.
            gravest = min(met, key=KINDS.index) if met else "none"
            self.outcomes.setdefault(gravest, Counter())[call.outcome] += 1
            self.calls += 1

    def table(self) -> str:
        """Faults against outcomes."""
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
    """One group and what is done to it. Its thread is the one that calls run()."""

    def __init__(self, size: int, dynamic: bool, seed: str, findings: Findings) -> None:
        self.size, self.dynamic, self.findings = size, dynamic, findings
        self.source = random.Random(seed)
        self.name = "dynamic" if dynamic else "static"
        self.held: list[dict[str, float]] = []
        self.group = self._make()

    def _make(self) -> Group:
        return Group(
            self.size,
            dynamic=self.dynamic,
            timeout=90,
            options={"keepalive": KEEPALIVE, "rpc_timeout": 20.0, "num_worker_threads": 4},
        )

    def alive(self) -> list[Worker]:
        return [worker for worker in self.group if not worker.killed and worker.exitcode is None]

    def round(self, number: int) -> None:
        """Load and faults, then a quiet moment in which all must serve."""
        names = [worker.name for worker in self.alive()]
        running: dict[str, tuple[Worker, Any]] = {}
        end = time.monotonic() + ROUND

        def begin(worker: Worker, seconds: float) -> None:
            others = [name for name in names if name != worker.name]
            seed = self.source.randrange(1 << 30)
            running[worker.name] = (worker, worker.start(load.run, others, seconds, seed))

        for worker in self.alive():
            begin(worker, ROUND)
        faults: list[Fault] = []
        while time.monotonic() < end - 1.5:
            time.sleep(self.source.uniform(0.1, 0.8))
            victim = self.source.choice(self.alive()[1:] or self.alive())
            kind = self.source.choice(("kill", "stop", "delay", "delay"))
            start = time.monotonic()
            if kind == "kill":
                if victim.rank == 0:
                    continue
                victim.kill()
                running.pop(victim.name)
                if self.dynamic:
                    time.sleep(self.source.uniform(0, 1))
                    again = self._restart(victim)
                    begin(again, max(end - time.monotonic(), 0.5))
            else:
                victim.signal(signal.SIGSTOP)
                longest = (1.5, 3.0) if kind == "stop" else (0.02, 0.4)
                time.sleep(self.source.uniform(*longest))
                victim.signal(signal.SIGCONT)
            self.findings.faults[kind] += 1
            until = time.monotonic() if self.dynamic or kind != "kill" else end + 60
            faults.append(Fault(kind, victim.name, start, until))
        for worker, call in running.values():
            report = call.result(60)
            self.findings.take(f"round {number}, {self.name} {worker.name}", report, faults)
        self._quiet()

    def _restart(self, victim: Worker) -> Worker:
        self.group.workers.remove(victim)
        victim.pipe.close()
        victim.child.close()
        self.findings.restarts += 1
        return self.group.add(
            victim.name, victim.rank, keepalive=KEEPALIVE, rpc_timeout=20.0, num_worker_threads=4
        )

    def _quiet(self) -> None:
        alive = self.alive()
        names = [worker.name for worker in alive]
        for worker in alive:
            worker.run(load.serves, [name for name in names if name != worker.name])
        if not self.dynamic and len(alive) < self.size:
            self.group.close(gently=False)
            self.group = self._make()
        elif alive[0].rank == 0 and self.dynamic:
            time.sleep(0.5)
            self.held.append(alive[0].run(load.footprint))

    def judge_growth(self) -> list[str]:
        """Compare what the survivor held in the first rounds and in the last."""
        samples = self.held[WARM_UP:]
        if len(samples) < 3:
            return []
        third = max(len(samples) // 3, 1)
        wrong = []
        for what, slack in SLACK.items():
            first = statistics.median(sample[what] for sample in samples[:third])
            last = statistics.median(sample[what] for sample in samples[-third:])
            print(f"survivor's {what}: {first:.0f} in the first rounds, {last:.0f} in the last")
            if last > first + slack:
                wrong.append(f"{self.name}: {what} grew from {first:.0f} to {last:.0f}")
        return wrong

    def close(self) -> None:
        self.group.close(gently=False)


def run(seconds: float, seed: int, say: Callable[[str], None] = print) -> Findings:
    """Run for about so long; what is wrong is in the findings."""
    say(f"chaos: {seconds:.0f} s, seed {seed}")
    findings = Findings()
    fleets = [
        Fleet(size, dynamic, f"{seed}/{dynamic}", findings)
        for size, dynamic in ((5, True), (3, False))
    ]
    end = time.monotonic() + seconds

    def drive(fleet: Fleet) -> None:
        number = 0
        try:
            while time.monotonic() < end:
                fleet.round(number)
                number += 1
        except BaseException as problem:  # noqa: BLE001  it is a finding
            output = fleet.group.output()[-20_000:]
            notes = "".join(getattr(problem, "__notes__", []))
            findings.wrong.append(f"round {number}, {fleet.name}: {problem!r} {notes}\n{output}")

    threads = [threading.Thread(target=drive, args=(fleet,)) for fleet in fleets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fleet in fleets:
        findings.wrong += fleet.judge_growth()
        fleet.close()
    say(findings.table())
    say(f"{findings.calls} calls, {findings.restarts} restarts, {len(findings.wrong)} findings")
    for text in findings.wrong:
        say(f"FINDING (seed {seed}): {text}")
    return findings
