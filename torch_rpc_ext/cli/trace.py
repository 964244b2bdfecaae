"""``python -m torch_rpc_ext trace``: record a running group for some seconds."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_rpc_ext._base.printable import printable
from torch_rpc_ext.cli import common, guest

if TYPE_CHECKING:
    from torch_rpc_ext.profiler import profile

__all__ = ["main"]

_EXAMPLES = """examples:
  MASTER_ADDR=host0 MASTER_PORT=29500 python -m torch_rpc_ext trace --seconds 5 --out trace.json
      all workers of the dynamic group (world_size=None) whose store is at host0:29500;
      open trace.json in https://ui.perfetto.dev
  python -m torch_rpc_ext trace worker1 worker2 --plot trace.png --init-method tcp://host0:29500
      two workers; also a picture

"""


def main(arguments: list[str]) -> int:
    """Join a group and record it.

    Args:
        arguments: of the command.

    Returns:
        The exit status, see common.EXIT_STATUSES.
    """
    parser = common.parser(
        "trace",
        "Record the calls and operators of the workers of a dynamic group "
        "(world_size=None) and write one trace of all. While it runs, the group has one more "
        "member, and calls take longer. Ctrl-C ends the recording early and keeps it.",
        _EXAMPLES + common.EXIT_STATUSES,
    )
    common.add_workers(parser)
    common.add_seconds(parser, "--seconds", 5.0, "how long")
    parser.add_argument(
        "--out",
        default="trace.json",
        metavar="FILE",
        help="the trace (default %(default)s)",
    )
    parser.add_argument("--plot", metavar="FILE", help="also a picture, e.g. trace.png")
    parser.add_argument(
        "--no-operators", action="store_true", help="calls only: smaller, and costs the group less"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    guest.add_arguments(parser)
    given = parser.parse_args(arguments)
    for path in filter(None, (given.out, given.plot)):
        # Checked before recording, which slows the group down.
        if not os.access(Path(path).resolve().parent, os.W_OK):
            raise ValueError(f"{path} cannot be written: no such folder, or no right to")
    if given.plot:
        import matplotlib  # noqa: F401
    with guest.joined(given, max_message_bytes=0):  # recordings are as large as they are
        prof = _record(given)
    prof.export_chrome_trace(given.out)
    if given.plot:
        prof.plot(given.plot)
    _print(prof, given)
    return common.UNWELL if prof.missing else common.OK


def _record(given: argparse.Namespace) -> profile:
    from torch_rpc_ext.profiler import profile

    workers = given.workers or guest.other_workers()
    limit = given.seconds + 60  # the workers stop by themselves if this process is killed
    with profile(workers, operators=not given.no_operators, limit=limit) as prof:
        try:
            time.sleep(given.seconds)
        except KeyboardInterrupt:
            print("ending early", file=sys.stderr)
    return prof


def _print(prof: profile, given: argparse.Namespace) -> None:
    if not given.json:
        # For a file or a pipe lines are not folded.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in prof.summary(width).split("\n"):  # the names of functions are the workers'
            print(printable(line))
        print(f"trace: {given.out} (open it in https://ui.perfetto.dev)")
        return
    answer: dict[str, Any] = {
        "trace": given.out,
        "seconds": (prof.end_ns - prof.begin_ns) / 1e9,
        "clock_error_us": {name: clock.error_ns / 1e3 for name, clock in prof.clocks.items()},
        "dropped": {name: r.dropped for name, r in prof.recordings.items()},
        "missing": prof.missing,
        "rows": [row._asdict() for row in prof.table()],
    }
    print(json.dumps(answer, indent=2))
