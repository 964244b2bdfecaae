"""``python -m benchmarks``: measure, also on a GPU, compare revisions, make the page of a stored
run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from benchmarks import commands

_COMMANDS = {
    "compare": commands.compare,
    "cuda": commands.cuda,
    "report": commands.report,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after the program's name; None for those in sys.argv.

    Returns:
        0, 1 if a back end that can be used has failed in a case, or NO_GPU of tests/support/gpu.py.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in _COMMANDS:
        return _COMMANDS[given[0]](given[1:])
    return commands.measure(given)


if __name__ == "__main__":
    # One compute thread each, so that the measured processes leave the cores to each other.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    sys.exit(main())
