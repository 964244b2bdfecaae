"""Builds small C++ programs by ninja, which recompiles only what has changed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
INCLUDES = ("-std=c++20", f"-I{CSRC}", f"-I{ROOT / 'tests'}")
WARNINGS = ("-Wall", "-Wextra", "-Werror")

#: The time-out of a test that calls build(), s: on a busy machine the compiler takes longer than
#: other tests may.
TIMEOUT = 1200

_RULES = """
rule compile
  command = $compiler -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $compiler $flags $in -o $out $libraries
"""


def build(
    folder: Path,
    programs: Mapping[str, Sequence[Path]],
    *,
    compiler: str,
    flags: Sequence[str],
    libraries: Sequence[str] = (),
) -> dict[str, Path]:
    """Build programs.

    Args:
        folder: where objects and programs go; made if it does not exist.
        programs: name -> its source files, some of which may be shared.
        compiler: command of a C++ compiler.
        flags: for compiling and linking.
        libraries: for linking, after the objects.

    Returns:
        Name -> the program's file.

    Raises:
        RuntimeError: a program cannot be built; the text is the compiler's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    objects = {
        source: folder / "objects" / source.relative_to(ROOT).with_suffix(".o")
        for sources in programs.values()
        for source in sources
    }
    lines = [
        f"compiler = {compiler}",
        f"flags = {' '.join((*INCLUDES, *WARNINGS, *flags))}",
        f"libraries = {' '.join(libraries)}",
        _RULES,
        *(f"build {made}: compile {source}" for source, made in objects.items()),
    ]
    built = {name: folder / name for name in programs}
    for name, sources in programs.items():
        lines.append(f"build {built[name]}: link {' '.join(str(objects[s]) for s in sources)}")
    with _locked(folder / "lock"):
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
        ended = subprocess.run(
            # Not ninja's own choice, two more: a compiler of torch's headers takes a gigabyte.
            [_ninja(), "-C", str(folder), "--quiet", "-j", str(os.cpu_count() or 1)],
            capture_output=True,
            text=True,
        )
    if ended.returncode != 0:
        raise RuntimeError(f"{compiler} failed:\n{ended.stdout[-6000:]}{ended.stderr[-2000:]}")
    return built


@cache
def accepts(compiler: str, flag: str) -> bool:
    """Whether programs can be compiled and linked with a flag. A sanitizer's library may be
    missing."""
    command = [compiler, flag, "-x", "c++", "-", "-o", os.devnull]
    ended = subprocess.run(command, input="int main() {}", text=True, capture_output=True)
    return ended.returncode == 0


def _ninja() -> str:
    """The path of ninja: that of this Python environment, or else the system's."""
    here = str(Path(sys.executable).parent)
    found = shutil.which("ninja", path=os.pathsep.join((here, os.environ.get("PATH", ""))))
    if found is None:
        raise RuntimeError("ninja is missing: run `pip install ninja`")
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process build at a time, because tests run in parallel."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
