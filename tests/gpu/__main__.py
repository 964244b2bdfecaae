"""``python -m tests.gpu``: all that needs a GPU; ends at the first part that fails.

Upstream's CUDA cases skip those that want more GPUs than there are. The sanitizer's parts are left
out where it is not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import run
from tests.support.gpu import NO_GPU, why_no_gpu

PARTS = [
    ("on a GPU", ["tests/gpu", "-s"]),
    ("upstream's CUDA cases", ["tests/upstream/test_cuda.py"]),
]
# (tool, what it watches): races are of the one kernel that shares memory among threads; a profile
# cannot be made at the same time.
SANITIZED = [
    ("memcheck", "not bandwidth and not process and not synchronisation"),
    ("racecheck", "test_checksum and not checksums"),
]


def sanitizer() -> str | None:
    """Return the compute-sanitizer of the PATH or of the CUDA toolkit; None without one."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=str(home / "bin")
    )


def sanitized(program: str, tool: str, chosen: str) -> list[str]:
    """Return the command that runs some tests of tests/gpu under a tool of the sanitizer."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "900"]
    return [program, "--tool", tool, "--error-exitcode", "1", *pytest, "tests/gpu", "-k", chosen]


def main() -> int:
    """Run all parts."""
    why = why_no_gpu()
    if why:
        print(f"nothing is tested: {why}", file=sys.stderr)
        return NO_GPU
    for name, arguments in PARTS:
        code, _ = run.run(name, arguments)
        if code != 0:
            return code
    program = sanitizer()
    if program is None:
        print("==== compute-sanitizer is not installed: memcheck and racecheck are left out")
        return 0
    for tool, chosen in SANITIZED:
        print(f"==== {tool}", flush=True)
        code = subprocess.run(sanitized(program, tool, chosen)).returncode
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
