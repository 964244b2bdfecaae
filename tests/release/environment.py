"""Virtual environments of the release's own, apart from the one that is worked in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    """Run a command; its failure ends us, its own output says why.

    Args:
        *command: program and arguments.
        cwd: where it runs.
        **variables: of the environment, beside ours.
    """
    print("+", *command, flush=True)
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean(**variables))
    if done.returncode != 0:
        sys.exit(f"{Path(command[0]).name} failed with status {done.returncode}")


def clean(**variables: str) -> dict[str, str]:
    """Return our environment without what would let a process find the source tree."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, **variables}


def make(folder: Path, packages: Sequence[str], torch: str = "") -> Path:
    """Make a virtual environment, or complete it.

    Args:
        folder: of the environment.
        packages: requirements of pip.
        torch: requirement of torch; empty for the torch of the running Python.

    Returns:
        The environment's Python.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
    if torch:
        # First and alone, so that nothing else decides on its version.
        run(python, "-m", "pip", "install", "-q", torch)
    else:
        borrow(python)
    run(python, "-m", "pip", "install", "-q", *packages)
    return python


def borrow(python: Path) -> None:
    """Let an environment find what the running Python's has, after its own packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ours, theirs = (
        subprocess.run([each, "-c", code], check=True, capture_output=True, text=True)
        for each in (sys.executable, str(python))
    )
    line = f"import site; site.addsitedir({ours.stdout.strip()!r})\n"
    Path(theirs.stdout.strip(), "venv.pth").write_text(line)
