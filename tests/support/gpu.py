"""Prepares a machine that has a GPU and no package registry: `make test-gpu` and `make bench-gpu`
begin with this.

``python -m tests.support.gpu --wheels FOLDER test -m tests.gpu`` takes missing packages from
wheels, builds the extension in place against the torch that is installed, and runs
``python -m tests.gpu``. It downloads nothing, and installs nothing outside of build/. On a machine
without a GPU it says so, and its exit status is NO_GPU.

The machine's own Python runs this, so it imports only the standard library, and torch to find out
whether there is a GPU.
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

#: Exit status on a machine without a GPU: nothing was done, and nothing has failed.
NO_GPU = 77
#: Module -> pip's name of the package that contains it.
_ALWAYS = {
    "setuptools": "setuptools",
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
        # Modules of tests/support, for the network of other benchmark cases.
        "pytest": "pytest",
    },
}


class NotReady(Exception):
    """This machine lacks something; the text says what, and what to do."""


def why_no_gpu() -> str:
    """Return why torch has no GPU here; an empty string if it has one."""
    import torch

    if torch.version.cuda is None:
        return f"there is no GPU: torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "there is no GPU that torch can use"


def environment() -> dict[str, str]:
    """Return an environment in which Python finds our packages, and those from wheels."""
    paths = [str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def install(wheels: Path) -> None:
    """Unpack all wheels of a folder into SITE; does nothing if the folder has none.

    Raises:
        NotReady: pip refuses a wheel, for example because of its Python or platform.
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
    """Check that modules can be found, in SITE too.

    Raises:
        NotReady: modules are missing.
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
    """Build the extension in place, and egg_info, whose entry point lets torch find our back end.

    Raises:
        NotReady: the extension cannot be built; the compiler's output was printed before.
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
