"""``python -m benchmarks.applications``: run the paper's applications, count their lines, make the
page of a stored run."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import machine, records
from benchmarks.applications import APPLICATIONS, idle, lines, report
from benchmarks.applications.interface import DEFAULT_WAYS, WAYS, Application, Job
from benchmarks.applications.runner import run
from benchmarks.processes import WorkerFailed
from benchmarks.records import Record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None for sys.argv's.

    Returns:
        0, or 1 if a way that can be used has failed.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] == "lines":
        return _lines()
    if given and given[0] == "idle":
        print(idle.text({kind: idle.measure(kind) for kind in idle.KINDS}))
        return 0
    if given and given[0] == "report":
        return _report(given[1:])
    return _measure(given)


def _measure(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.applications",
        description=__doc__,
        epilog="further commands: lines, idle, report FILE",
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(APPLICATIONS)}; all if none")
    parser.add_argument("--small", action="store_true", help="the cases of the tests, seconds each")
    parser.add_argument("--cases", nargs="+", default=[], help="names or patterns")
    parser.add_argument("--rounds", type=int, help="of every case, instead of its own number")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(DEFAULT_WAYS))
    parser.add_argument("--out", type=Path, help="file for the figures as JSON lines")
    given = parser.parse_args(arguments)
    for name in given.names:
        if name not in APPLICATIONS:
            parser.error(f"no application is named {name!r}; there are {', '.join(APPLICATIONS)}")
    if given.out is not None and not given.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {given.out.parent}")
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {given.rounds}")
    chosen = [
        (application, _cases(application, given))
        for name, application in APPLICATIONS.items()
        if not given.names or name in given.names
    ]
    if not any(jobs for _, jobs in chosen):
        names = ", ".join(job.name for one, _ in chosen for job in one.jobs(small=given.small))
        parser.error(f"--cases: no case is named {' or '.join(given.cases)}; there are {names}")
    return _run(chosen, given.ways, given.out, small=given.small)


def _cases(application: Application, given: argparse.Namespace) -> list[Job]:
    return [
        replace(job, rounds=given.rounds or job.rounds)
        for job in application.jobs(small=given.small)
        if not given.cases or any(fnmatch.fnmatch(job.name, one) for one in given.cases)
    ]


def _run(
    chosen: Sequence[tuple[Application, Sequence[Job]]],
    ways: Sequence[str],
    out: Path | None,
    *,
    small: bool,
) -> int:
    described: Record = {"type": "machine", **machine.describe()}
    described["applications"] = [application.name for application, jobs in chosen if jobs]
    others, start = machine.Others(), time.monotonic()
    found = [described]
    for kind in idle.KINDS if not small else ():
        try:
            found.append({"type": "idle", "kind": kind, "threads": idle.measure(kind)})
        except WorkerFailed as failure:
            print(f"idle, {kind}: {failure}", file=sys.stderr)
    for application, jobs in chosen:
        found.extend(report.of_application(application) if jobs else ())
    for result in run(chosen, ways):
        found.extend(report.of_result(result))
        described["seconds"] = round(time.monotonic() - start, 1)
        described["others_cpu_share"] = round(others.share(), 3)
        if out is not None:  # what there is, should the run not come to its end
            records.write(out, found)
    print(f"\n{report.table(found, APPLICATIONS)}")
    return 1 if records.of_type(found, "failure") else 0


def _lines() -> int:
    for name, application in APPLICATIONS.items():
        print(f"{name}\n{lines.text(lines.of_application(name), application.paper_lines)}")
    return 0


def _report(arguments: Sequence[str]) -> int:
    from benchmarks.applications import page  # the one that needs matplotlib

    parser = argparse.ArgumentParser(prog="python -m benchmarks.applications report")
    parser.add_argument(
        "files", type=Path, nargs="+", help="what --out has written, of one run or of several"
    )
    parser.add_argument("--docs", type=Path, default=page.DOCS, help="folder to write into")
    given = parser.parse_args(arguments)
    try:
        stored = [record for file in given.files for record in records.read(file)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    page.write(stored, given.docs)
    return 0


if __name__ == "__main__":
    # So that the processes do not share cores with idle compute threads.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    sys.exit(main())
