"""What `make test` and CI run: tests, fast first; ends at the first part that fails. With --all,
what `make test-all` runs: also those that are rare.

Parts that wait more than they compute run several at a time. One closing line sums up all parts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from tests.support.child import ONE_THREAD

# (name, paths and options of pytest). Upstream's cases mostly wait for each other, so four at a
# time keep two cores busy; gigabyte tensors want the machine's memory for themselves. Who is done
# takes of what others have left; until then each has whole modules, and their fixtures once.
_STEALING = ["--dist", "worksteal"]
PARTS = [
    ("rules", ["tests/rules"]),
    # Those on a GPU are collected everywhere, and skipped.
    ("unit", ["tests/unit", "tests/fuzz", "tests/gpu", "-n", "2"]),
    # A process of its own: numba reads whether to simulate when it is imported.
    ("simulator", ["tests/simulator", "-n", "2"]),
    (
        "process",
        ["tests/process", "-m", "not slow and not rare and not notebook", "-n", "3", *_STEALING],
    ),
    # Each starts a dozen of workers, one after the other.
    ("notebooks", ["tests/process/test_tutorials.py", "-m", "notebook and not rare", "-n", "2"]),
    ("upstream", ["tests/upstream", "-n", "4", *_STEALING]),
    ("slow", ["tests/process", "-m", "slow"]),
]
RARE = ("rare", ["tests/process", "-m", "rare"])
COMPILE = "from tests.support import fake_cuda, native; fake_cuda.build(), native.build()"
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def run(name: str, arguments: list[str]) -> tuple[int, dict[str, int]]:
    """Run one part; its exit code and counts."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    print(f"==== {name}: pytest {' '.join(arguments)}", flush=True)
    with subprocess.Popen(
        command, env={**ONE_THREAD, **os.environ}, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        last = ""
        assert process.stdout is not None
        for line in process.stdout:
            # A hundred lines that say "no CUDA device" hide the others.
            if not line.startswith("SKIPPED") or "no CUDA device" not in line:
                print(line, end="", flush=True)
            last = line if COUNT.search(line) else last
    counts = {what.rstrip("s"): int(number) for number, what in COUNT.findall(last)}
    return process.returncode, counts


def main() -> int:
    """Run all parts."""
    started = time.monotonic()
    totals: dict[str, int] = {}
    # Before the tests that need it, whose time-outs do not allow for a compiler.
    print("==== compiling the CPU's stand-in for CUDA, and what tests use of the core", flush=True)
    code = subprocess.run([sys.executable, "-c", COMPILE], check=False).returncode
    if code != 0:
        return code
    for name, arguments in [*PARTS, *([RARE] if "--all" in sys.argv[1:] else [])]:
        code, counts = run(name, arguments)
        for what, number in counts.items():
            totals[what] = totals.get(what, 0) + number
        if code != 0:
            print(f"==== {name} failed", flush=True)
            break
    minutes = (time.monotonic() - started) / 60
    print(f"==== {minutes:.1f} minutes")
    failed = totals.get("failed", 0) + totals.get("error", 0)
    print(f"{totals.get('passed', 0)} passed, {failed} failed, {totals.get('skipped', 0)} skipped")
    return code


if __name__ == "__main__":
    sys.exit(main())
