"""The extension with AddressSanitizer and UndefinedBehaviorSanitizer, and tests that use it.

It is built in a copy of the tree, build/asan/tree: the tree's own extension stays as it is. torch,
Python and UCX are not instrumented; what they do wrong with memory of ours is seen all the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.cxx import ROOT

_FOLDER = ROOT / "build" / "asan"
_TREE = _FOLDER / "tree"
_REPORTS = _FOLDER / "reports"
_COPIED = ("csrc", "scripting", "tests", "torch_rpc_ext")
_COPIED_FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")

_SANITIZE = "-fsanitize=address,undefined"
# vptr: the types of torch's classes are not visible everywhere.
_FLAGS = f"{_SANITIZE} -fno-sanitize=vptr -fno-omit-frame-pointer -O1 -g1"
_TESTS = (
    "tests/process/test_calls.py",
    "tests/process/test_death.py",
    "tests/process/test_death_rrefs.py",
    "tests/process/test_dynamic.py",
    "tests/process/test_handover.py",
    "tests/process/test_hostile.py",
    "tests/process/test_tensors.py",
    "tests/unit/test_wire.py",
    "tests/unit/test_wire_hostile.py",
    # Minutes each with sanitizers; the fuzz targets flip, cut and lie, too.
    "--deselect=tests/unit/test_wire_hostile.py::test_every_bit",
    "--deselect=tests/unit/test_wire_hostile.py::test_every_truncation",
)


def build() -> None:
    """Build it, anew only where something has changed; the first time takes ten minutes.

    Raises:
        RuntimeError: it cannot be built; the text is the compiler's.
    """
    _copy_tree()
    environment = {**os.environ, "CFLAGS": _FLAGS, "CXXFLAGS": _FLAGS, "LDFLAGS": _SANITIZE}
    ended = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=_TREE,
        env=environment,
        capture_output=True,
        text=True,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"setup.py failed:\n{ended.stdout[-6000:]}{ended.stderr[-2000:]}")


def run_tests() -> str:
    """Run what uses calls, tensors, death and strangers; what is wrong, empty for nothing."""
    return _run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-n2", *_TESTS)


def run_chaos(seconds: float) -> str:
    """Run tests/chaos; what is wrong, empty for nothing."""
    return _run("-m", "tests.chaos", "--seconds", str(seconds), "--seed", "1")


def check() -> str:
    """Whether the extension that tests import is the one in the copy, under the sanitizer."""
    text = "from torch_rpc_ext._native import loader; print(loader.load().__file__)"
    ended = subprocess.run(
        [sys.executable, "-c", text], cwd=_TREE, env=_environment(), capture_output=True, text=True
    )
    right = ended.stdout.startswith(str(_TREE)) and ended.returncode == 0
    return "" if right else f"not the extension of {_TREE}: {ended.stdout}{ended.stderr}"


def _run(*arguments: str) -> str:
    shutil.rmtree(_REPORTS, ignore_errors=True)
    _REPORTS.mkdir(parents=True)
    ended = subprocess.run([sys.executable, *arguments], cwd=_TREE, env=_environment())
    # A process that is killed on purpose has a report, too, if something was wrong before.
    reports = [path.read_text(errors="replace")[:6000] for path in sorted(_REPORTS.iterdir())]
    wrong = "" if ended.returncode == 0 else f"{' '.join(arguments[:2])} failed, see above"
    return "\n".join([*reports, wrong]).strip()


def _environment() -> dict[str, str]:
    libraries = [_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    asan = {
        "detect_leaks": "0",  # Python and torch leave much behind at their end
        "alloc_dealloc_mismatch": "0",  # torch's allocators
        "detect_odr_violation": "0",  # libraries that are in the process twice
        "log_path": str(_REPORTS / "asan"),
    }
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in asan.items()),
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={_REPORTS / 'ubsan'}",
    }


def _library(name: str) -> str:
    """A library of the compiler: Python is not instrumented, so they must come first."""
    command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        raise RuntimeError(f"the compiler has no {name}: install its sanitizers, or use g++")
    return path


def _copy_tree() -> None:
    for name in _COPIED:
        for path in (_TREE / name).rglob("*"):
            # What is gone from the tree must not be compiled.
            if path.suffix in (".cpp", ".h", ".py") and not _original(path).exists():
                path.unlink()
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(
            ROOT / name, _TREE / name, ignore=ignore, copy_function=_copy, dirs_exist_ok=True
        )
    for name in _COPIED_FILES:
        _copy(str(ROOT / name), str(_TREE / name))


def _original(path: Path) -> Path:
    return ROOT / path.relative_to(_TREE)


def _copy(source: str, target: str) -> None:
    """Keep the time of a file that has not changed: ninja compiles by that."""
    there = Path(target)
    if not there.exists() or there.read_bytes() != Path(source).read_bytes():
        shutil.copyfile(source, target)
