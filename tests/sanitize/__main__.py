"""``python -m tests.sanitize``: what `make sanitize` runs.

First the stress programs, which have no torch in them, under ThreadSanitizer and AddressSanitizer;
then the extension under AddressSanitizer: tests through processes, and a minute of chaos.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from tests.sanitize import extension, programs


def main() -> int:
    """Run the command line; the exit status is 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("programs", "extension"))
    parser.add_argument("--seconds", type=float, default=20, help="for each stress program")
    parser.add_argument("--chaos-seconds", type=float, default=60)
    arguments = parser.parse_args()
    wrong = []
    if arguments.only != "extension":
        wrong += _run_programs(arguments.seconds)
    if arguments.only != "programs":
        wrong += _run_extension(arguments.chaos_seconds)
    print("\n".join(wrong) or "nothing was found", flush=True)
    return 1 if wrong else 0


def _run_programs(seconds: float) -> list[str]:
    wrong = []
    for sanitizer in programs.SANITIZERS:
        for name, program in programs.build(sanitizer).items():
            found = programs.run(program, seconds)
            print(f"{sanitizer:8} {name:10} {'FOUND' if found else 'ok'}", flush=True)
            wrong += [found] if found else []
    return wrong


def _run_extension(chaos_seconds: float) -> list[str]:
    print("building the extension with AddressSanitizer", flush=True)
    extension.build()
    steps: dict[str, Callable[[], str]] = {
        "check": extension.check,
        "tests": extension.run_tests,
        "chaos": lambda: extension.run_chaos(chaos_seconds),
    }
    wrong = []
    for name, step in steps.items():
        found = step()
        print(f"address  {name:10} {'FOUND' if found else 'ok'}", flush=True)
        wrong += [found] if found else []
    return wrong


if __name__ == "__main__":
    sys.exit(main())
