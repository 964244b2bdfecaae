"""`make compat TORCH=torch==2.15.0`: this project with another torch, in an environment of its own.

A copy of what git tracks is built there. Then run: `import torch` with every warning an error, and
the parts below. One row of docs/compatibility.md is printed at the end. For less than that:
`make compat TORCH=... COMPAT="--parts upstream brief --jobs 2"`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.release.environment import ROOT, clean, run

WORK = ROOT / "build" / "compat"


@dataclass(frozen=True)
class Part:
    """A column of the table."""

    title: str
    arguments: tuple[str, ...]
    #: Processes of pytest, where the command line does not say how many.
    jobs: int


_QUICK = ("-m", "not slow and not rare and not notebook", "--dist", "worksteal")
#: What depends most on torch: calls, tensors, names of torch, TorchScript.
_BRIEF = ("test_calls.py", "test_tensors.py", "test_torch_names.py", "test_scripting.py")
PARTS = {
    "upstream": Part("upstream's suites", ("tests/upstream",), 4),
    "process": Part("process tests", ("tests/process", *_QUICK), 3),
    "brief": Part(
        "of the process tests", (*(f"tests/process/{name}" for name in _BRIEF), *_QUICK), 3
    ),
    "other": Part("other tests", ("tests/unit", "tests/fuzz", "tests/gpu"), 2),
}
_SILENT = (
    "import torch, torch.distributed.rpc as rpc; print(torch.__version__, rpc.BackendType.UCX)"
)


def copy(folder: Path) -> None:
    """Copy what git tracks, as it is now; what is there and the same keeps its time stamp."""
    named = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, named.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if not source.exists():
            target.unlink(missing_ok=True)
        elif not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def tested(python: Path, folder: Path, arguments: list[str]) -> str:
    """Run tests; pytest's counts, such as "362 passed, 4 skipped"."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    print("+", *command, flush=True)
    with subprocess.Popen(
        command, cwd=folder, env=clean(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed|error)", line) else last
    counts = re.findall(r"\d+ (?:passed|failed|skipped|error)", last)
    return ", ".join(counts) or f"ended with {process.returncode}"


def main() -> int:
    """Try it; the exit status is 1 where a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.release.compat")
    parser.add_argument("--torch", required=True, help="requirement, such as torch==2.15.0")
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=PARTS,
        default=["upstream", "process", "other"],
        help="what is run after the build; without a name nothing",
    )
    parser.add_argument("--jobs", type=int, help="processes of pytest")
    given = parser.parse_args()
    started = time.monotonic()
    folder = WORK / given.torch
    copy(folder)
    run("make", f"TORCH={given.torch}", "build", ".venv/.stamps/test", cwd=folder)
    python = folder / ".venv" / "bin" / "python"
    built = time.monotonic() - started
    run(python, "-W", "error", "-c", _SILENT, cwd=folder)
    row = {}
    for part in (PARTS[name] for name in given.parts):
        jobs = str(given.jobs or part.jobs)
        row[part.title] = tested(python, folder, [*part.arguments, "-n", jobs])
    print(f"\n| {' | '.join(['torch', *row])} |")
    print(f"| {' | '.join([given.torch.removeprefix('torch=='), *row.values()])} |")
    minutes = (time.monotonic() - started) / 60
    print(f"built in {built / 60:.1f} minutes, {minutes:.1f} in all")
    return int(any(word in counts for counts in row.values() for word in ("failed", "err", "end")))


if __name__ == "__main__":
    sys.exit(main())
