"""One wheel for each Python, of those that a CI has made for each Python and each torch.

`python -m tests.release.merge FOLDER` writes them to dist/; the Python needs the package wheel.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.release.wheel import DIST, merge


def merged(folder: Path, into: Path) -> list[Path]:
    """Merge the wheels of a folder, those below it too.

    Args:
        folder: wheels that have the same name are for the same Python.
        into: is made where it is not.

    Returns:
        What was written.
    """
    wheels = defaultdict(list)
    for wheel in sorted(folder.rglob("*.whl")):
        wheels[wheel.name].append(wheel)
    into.mkdir(parents=True, exist_ok=True)
    made = []
    for same in wheels.values():
        with tempfile.TemporaryDirectory() as work:
            one = merge(same, Path(sys.executable), Path(work))
            made.append(Path(shutil.copy(one, into)))
    return made


def main() -> int:
    """Do it; the exit status is 1 where there is none."""
    parser = argparse.ArgumentParser(prog="python -m tests.release.merge")
    parser.add_argument("folder", type=Path)
    made = merged(parser.parse_args().folder, DIST)
    print(*made, sep="\n")
    return int(not made)


if __name__ == "__main__":
    sys.exit(main())
