"""`make wheel-test`: the wheel of dist/ in a fresh environment, outside of the source tree.

It runs what a newcomer would: pip, the README's first example, `info`; then some of the tests.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.release import environment
from tests.release.environment import ROOT, run
from tests.support import pages

#: Of tests/process: calls, tensors, takeover. They need none of the extras, and no time-out.
TESTS = ("test_calls.py", "test_tensors.py", "test_takeover.py")
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "expecttest>=0.3", "hypothesis>=6.100")


def answer(folder: Path, programs: Path, **variables: str) -> float:
    """Run the README's first example; how long it took, s."""
    example = pages.programs("README.md")[0]
    example.write(folder)
    started = time.monotonic()
    words = shlex.split(example.command)
    done = subprocess.run(
        [str(programs / words[0]), *words[1:]],
        cwd=folder,
        env=environment.clean(**variables),
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    seconds = time.monotonic() - started
    print(done.stdout, flush=True)
    if done.returncode != 0 or done.stdout.strip() != example.prints.strip():
        sys.exit(f"the README's example printed {done.stdout!r}, not {example.prints!r}")
    return seconds


def cpu() -> float:
    """Return the CPU time of the children that have ended, s."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def copy_tests(folder: Path) -> None:
    """Copy the tests and what they read, without the package."""
    for name in ("tests", "csrc"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)


def main() -> int:
    """Try it."""
    parser = argparse.ArgumentParser(prog="python -m tests.release.try_wheel")
    parser.add_argument("--torch", required=True, help="requirement, such as torch==2.13.0")
    given = parser.parse_args()
    this = "cp{}{}".format(*sys.version_info)
    wheels = sorted((ROOT / "dist").glob(f"*-{this}-*.whl"), key=lambda each: each.stat().st_mtime)
    if not wheels:
        sys.exit(f"there is no wheel for {this} in dist/: run `make wheel`")
    with tempfile.TemporaryDirectory(prefix="wheel_test_") as text:
        folder = Path(text)
        python = environment.make(folder / "venv", ["pip"], given.torch)
        # No compiler will do: what is used must be in the wheel.
        nothing = {"CXX": "no-compiler", "TORCH_EXTENSIONS_DIR": str(folder / "none")}
        before, started = cpu(), time.monotonic()
        run(python, "-m", "pip", "install", "-q", wheels[-1], cwd=folder)
        installed = time.monotonic() - started
        (folder / "work").mkdir()
        ran = answer(folder / "work", python.parent, **nothing)
        print(f"{wheels[-1].name}, {given.torch}: pip install {installed:.1f} s, ", end="")
        print(f"the README's example {ran:.1f} s, together {installed + ran:.1f} s", end=", ")
        print(f"{cpu() - before:.1f} s of CPU", flush=True)
        run(python, "-m", "torch_rpc_ext", "info", cwd=folder / "work", **nothing)
        run(python, "-m", "pip", "install", "-q", *TOOLS, cwd=folder)
        copy_tests(folder / "work")
        files = [f"tests/process/{name}" for name in TESTS]
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        options = ("-q", "-m", "not slow", "-p", "no:cacheprovider")
        run(python, "-m", "pytest", *options, *files, cwd=folder / "work", PATH=path, **nothing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
