"""The command line: measure, compare, report."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, records, table, trees
from benchmarks.backends import BACKENDS, BASELINE, GPU_BASELINE, GPU_SUBJECT, SUBJECT
from benchmarks.cases import CASES
from benchmarks.cases.interface import Case
from benchmarks.records import Record
from benchmarks.runner import PASSES, Contender, Runner
from tests.support.gpu import NO_GPU, why_no_gpu

_QUICK_ROUNDS = 3


def measure(arguments: Sequence[str]) -> int:
    """Measure our back end beside others; returns the exit status."""
    parser = _parser("", f"{SUBJECT} against {BASELINE} and others, side by side in one run.")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=[name for name, backend in BACKENDS.items() if not backend.gpu],
        help="all but those that need a peer's package",
    )
    parser.add_argument("--all", action="store_true", help="all back ends, also the long cases")
    given = _parse(parser, arguments)
    names = given.backends or [
        name
        for name, backend in BACKENDS.items()
        if not backend.gpu and (given.all or not backend.peer)
    ]
    usable, skips = _usable(names)
    chosen = _choose(parser, given.cases, long=given.all)
    return _run(given, chosen, [Contender(name, name) for name in usable], SUBJECT, skips)


def cuda(arguments: Sequence[str]) -> int:
    """Measure tensors on a GPU; returns the exit status, NO_GPU without one."""
    parser = _parser("cuda", f"{GPU_SUBJECT} against {GPU_BASELINE} on one GPU.", gpu=True)
    given = _parse(parser, arguments)
    chosen = _choose(parser, given.cases, long=True, gpu=True)
    why = why_no_gpu()
    if why:
        print(f"nothing is measured: {why}", file=sys.stderr)
        return NO_GPU
    usable, skips = _usable([name for name, backend in BACKENDS.items() if backend.gpu])
    contenders = [Contender(name, name) for name in usable]
    return _run(given, chosen, contenders, GPU_SUBJECT, skips)


def compare(arguments: Sequence[str]) -> int:
    """Measure the working tree beside another revision; returns the exit status."""
    parser = _parser("compare", "The working tree, as it is built, against another revision.")
    parser.add_argument("revision", help="as git names it")
    parser.add_argument(
        "--passes",
        type=int,
        default=PASSES,
        help="new processes so many times; each has as many rounds as a pass of a case has",
    )
    given = _parse(parser, arguments)
    if given.passes < 1:
        parser.error(f"--passes must be 1 or more, got {given.passes}")
    chosen = _choose(parser, given.cases, long=False)
    with trees.built(given.revision) as other, trees.working() as ours:
        contenders = [
            Contender("working tree", SUBJECT, ours),
            Contender(given.revision, SUBJECT, other),
        ]
        return _run(given, chosen, contenders, contenders[0].name, [], passes=given.passes)


def report(arguments: Sequence[str]) -> int:
    """Make the page and the plots of a stored run; returns the exit status."""
    from benchmarks import page  # imported here, because only this module needs matplotlib

    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=report.__doc__)
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="file",
        help="what --out has written; cases of a later file replace those of an earlier one",
    )
    parser.add_argument("--docs", type=Path, default=page.DOCS, help="folder to write into")
    given = parser.parse_args(arguments)
    try:
        stored = functools.reduce(records.merged, map(records.read, given.files))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    page.write(stored, given.docs)
    return 0


def _parser(command: str, description: str, *, gpu: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}".strip(),
        description=description,
        epilog=f"cases: {' '.join(_cases(gpu=gpu))}",
    )
    parser.add_argument("--cases", nargs="+", default=[], help="names or patterns")
    parser.add_argument("--rounds", type=int, help="of every case, instead of its own number")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds of each")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON lines")
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    given = parser.parse_args(arguments)
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {given.rounds}")
    if given.out is not None and not given.out.absolute().parent.is_dir():
        # Said before the measurement, which takes minutes.
        parser.error(f"--out: there is no folder {given.out.parent}")
    return given


def _cases(*, gpu: bool) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if case.gpu == gpu}


def _choose(
    parser: argparse.ArgumentParser, patterns: Sequence[str], *, long: bool, gpu: bool = False
) -> list[Case]:
    cases = _cases(gpu=gpu)
    for pattern in patterns:
        if not fnmatch.filter(cases, pattern):
            parser.error(f"--cases: no case is named {pattern!r}; there are {', '.join(cases)}")
    if not patterns:
        return [case for case in cases.values() if long or not case.long]
    return [
        case
        for name, case in cases.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]


def _usable(names: Sequence[str]) -> tuple[list[str], list[Record]]:
    """Return the back ends that can be used, and for each other one a record that says why not."""
    usable, skips = [], []
    for name in names:
        why = BACKENDS[name].why_not()
        if why:
            skips.append({"type": "skip", "case": None, "backend": name, "why": why})
        else:
            usable.append(name)
    return usable, skips


def _run(
    given: argparse.Namespace,
    chosen: Sequence[Case],
    contenders: Sequence[Contender],
    subject: str,
    skips: list[Record],
    *,
    passes: int | None = None,
) -> int:
    """Measure and print; with `passes` the contenders are revisions, and each pass starts new
    processes."""
    for note in table.missing(skips):  # said first, because the user may want to install it
        print(note, file=sys.stderr)
    described: dict[str, Any] = {"type": "machine", **machine.describe(), "subject": subject}
    others, start = machine.Others(), time.monotonic()
    found: list[Record] = [described, *skips]
    revisions = passes is not None
    count = passes or PASSES
    # The number of rounds in each process does not depend on the number of passes.
    todo = [(case, math.ceil(_rounds(case, given) * count / PASSES)) for case in chosen]
    with Runner(contenders, passes=count, renew=revisions) as runner:
        for result in runner.run(todo):
            found.extend(records.of_result(result, subject, revisions=revisions))
            if given.out is not None:  # after each case, in case the run does not reach its end
                records.write(given.out, found)
    described["seconds"] = round(time.monotonic() - start, 1)
    described["others_cpu_share"] = round(others.share(), 3)
    print(f"{table.table(found)}\n\n{table.footnote(described)}")
    if given.out is not None:
        records.write(given.out, found)
    return 1 if records.of_type(found, "failure") else 0


def _rounds(case: Case, given: argparse.Namespace) -> int:
    if given.rounds is not None:
        return int(given.rounds)
    return min(case.rounds, _QUICK_ROUNDS) if given.quick else case.rounds
