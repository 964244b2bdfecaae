"""``python -m benchmarks``: measure the back ends against each other."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, report
from benchmarks.backends import BACKENDS, BASELINE, SUBJECT
from benchmarks.cases import CASES
from benchmarks.cases.interface import Case
from benchmarks.results import CaseResult
from benchmarks.runner import Runner

_QUICK_ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None for sys.argv's.

    Returns:
        0, or 1 if a back end that can be used has failed in a case.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{SUBJECT} against {BASELINE}, side by side in one run.",
        epilog=f"cases: {' '.join(CASES)}",
    )
    parser.add_argument("--cases", nargs="+", default=["*"], help="names or patterns; all")
    parser.add_argument("--rounds", type=int, help="of every case, instead of its own number")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds of each")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON lines")
    given = parser.parse_args(arguments)
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {given.rounds}")
    chosen = _choose(parser, given.cases)
    if given.out is not None and not given.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {given.out.parent}")  # now, not in five minutes

    usable = _usable()
    described, others, start = machine.describe(), machine.Others(), time.monotonic()
    with Runner(usable) as runner:
        results = list(runner.run([(case, _rounds(case, given)) for case in chosen]))
    described["seconds"] = round(time.monotonic() - start, 1)
    described["others_cpu_share"] = round(others.share(), 3)

    report.print_table(results, SUBJECT, BASELINE)
    print(_footnote(described))
    if given.out is not None:
        with given.out.open("w") as out:
            report.write(out, described, results, SUBJECT, BASELINE)
    return 1 if _failed(results) else 0


def _choose(parser: argparse.ArgumentParser, patterns: Sequence[str]) -> list[Case]:
    for pattern in patterns:
        if not fnmatch.filter(CASES, pattern):
            parser.error(f"--cases: no case is named {pattern!r}; there are {', '.join(CASES)}")
    return [
        case
        for name, case in CASES.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]


def _usable() -> list[str]:
    usable = []
    for name, backend in BACKENDS.items():
        why = backend.why_not()
        if why:
            print(f"{name} is left out: {why}", file=sys.stderr)
        else:
            usable.append(name)
    return usable


def _rounds(case: Case, given: argparse.Namespace) -> int:
    if given.rounds is not None:
        return int(given.rounds)
    return min(case.rounds, _QUICK_ROUNDS) if given.quick else case.rounds


def _failed(results: Sequence[CaseResult]) -> bool:
    return any(result.failures for result in results)


def _footnote(described: dict[str, object]) -> str:
    share = described["others_cpu_share"]
    assert isinstance(share, float)
    busy = f"; others used {share:.0%} of the machine meanwhile" if share >= 0.05 else ""
    return (
        f"\n{described['cores']} cores, {described['cpu']}, torch {described['torch']}, UCX "
        f"{described['ucx']}; {described['seconds']} s{busy}\n"
        f"Limits here: a process wakes another in {described['wake_up_us']} us, memcpy "
        f"{described['memcpy_gb_per_s']} GB/s.\n"
        "ratio: how many times better, taken round by round, median; cpu: the same of the CPU time "
        "per call of\nall workers; floor: the ratio of the handbook's prototype."
    )


if __name__ == "__main__":
    # So that the processes under measurement do not share cores with idle compute threads.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    sys.exit(main())
