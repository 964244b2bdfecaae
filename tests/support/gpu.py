"""A machine with a GPU and no package registry: how `make test-gpu` and `make bench-gpu` begin.

``python -m tests.support.gpu --wheels FOLDER test -m tests.gpu`` takes missing packages from
wheels, builds the extension in place against the torch that is installed, and runs
``python -m tests.gpu``. Nothing is fetched, and nothing is installed outside of build/. Without a
GPU it says so, and its exit status is NO_GPU.

Run by the machine's own Python: imports nothing but the standard library and, for the question
whether there is a GPU, torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "gpu-site"

#: Exit status without a GPU: nothing has failed, and nothing was done.
NO_GPU = 77
#: Module -> the package that has it; what pip calls it.
_ALWAYS = {
    "setuptools": "setuptools",
    "attrs": "attrs",
    "ninja": "ninja",
    "numpy": "numpy",
    "libucx": "libucx-cu13",
}
NEEDS: Mapping[str, Mapping[str, str]] = {
    "test": {
        **_ALWAYS,
        "pytest": "pytest",
        "pytest_timeout": "pytest-timeout",
        "expecttest": "expecttest",
    },
    "bench": {
        **_ALWAYS,
        "psutil": "psutil",
        "tqdm": "tqdm",
        # Of the network that other cases have, in tests/support.
        "pytest": "pytest",
    },
}


class NotReady(Exception):
    """Something is missing on this machine; the text says what, and what to do."""


def why_no_gpu() -> str:
    """Return why torch has no GPU here; empty if it has one."""
    import torch

    if torch.version.cuda is None:
        return f"there is no GPU: torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "there is no GPU that torch can use"


def environment() -> dict[str, str]:
    """Return the environment in which our packages, and those from wheels, are found."""
    paths = [str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def install(wheels: Path) -> None:
    """Unpack all wheels of a folder into SITE; does nothing where there are none.

    Raises:
        NotReady: pip refuses one, for its Python or platform, say.
    """
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        return
    options = ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(SITE)]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, *found]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise NotReady(f"the wheels in {wheels} cannot be installed:\n{ended.stderr.strip()}")


def check(needs: Mapping[str, str], wheels: Path) -> None:
    """Look for modules, in SITE too.

    Raises:
        NotReady: some are missing.
    """
    sys.path.append(str(SITE))
    importlib.invalidate_caches()
    missing = [name for module, name in needs.items() if importlib.util.find_spec(module) is None]
    if missing:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise NotReady(
            f"missing here: {', '.join(missing)}. Where there is a registry, run\n"
            f"  pip download --no-deps --only-binary=:all: --python-version {version} "
            f"-d wheels {' '.join(missing)}\nand bring the folder here as {wheels}"
        )


def build() -> None:
    """Build the extension in place; egg_info has the entry point through which torch finds it.

    Raises:
        NotReady: it cannot be built; the compiler's output stands above.
    """
    command = [sys.executable, "setup.py", "-q", "egg_info", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=ROOT, env=environment()).returncode != 0:
        raise NotReady("the extension cannot be built; see README.md for what it takes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the machine and run a command there; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.gpu", description=__doc__)
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="a folder")
    parser.add_argument("purpose", choices=NEEDS, help="what the machine must have packages for")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="arguments for Python")
    given = parser.parse_args(arguments)
    if not given.command:
        parser.error("what is to be run is missing, e.g. -m tests.gpu")
    why = why_no_gpu()
    if why:
        print(f"nothing is done: {why}", file=sys.stderr)
        return NO_GPU
    try:
        install(given.wheels)
        check(NEEDS[given.purpose], given.wheels)
        build()
    except NotReady as problem:
        print(problem, file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, *given.command], cwd=ROOT, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
