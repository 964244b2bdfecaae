"""``python -m tests.fuzz --seconds 600``: what `make fuzz` runs.

A target in C++ runs under clang's libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer,
one in Python (pickles.py) in a process of its own. What
a run learns is kept in build/fuzz/corpus for the next one. An input that fails is written to
tests/fuzz/findings: commit it with the fix, the tests replay it from then on.

``python -m tests.fuzz seeds`` writes the seed corpus anew, after a change of a format.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import registry
from tests.support import cxx

# No message of a peer justifies an allocation like this.
_MALLOC_LIMIT_MB = 64
_OPTIONS = (
    f"-malloc_limit_mb={_MALLOC_LIMIT_MB}",
    "-rss_limit_mb=1024",
    "-timeout=10",
    "-max_len=4096",
    "-use_value_profile=1",
    "-print_final_stats=1",
    "-verbosity=1",
)
_SANITIZE = ("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all")


@dataclass(frozen=True)
class Outcome:
    """What a target's run ended with.

    Attributes:
        executions: inputs that were tried.
        per_second: of those.
        coverage: edges of the program that were reached.
        failure: the end of the report; empty when nothing was found.
    """

    executions: int
    per_second: int
    coverage: int
    failure: str


def main() -> int:
    """Run the command line; the exit status is 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", choices=("run", "seeds"), default="run")
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    targets = [*registry.TARGETS, *registry.PYTHON_TARGETS]
    parser.add_argument("--target", action="append", choices=targets)
    arguments = parser.parse_args()
    names = arguments.target or targets
    natives = [name for name in names if name in registry.TARGETS]
    clang = shutil.which("clang++") or ""
    if not clang and (natives or arguments.command == "seeds"):
        print("make fuzz needs clang++ with libFuzzer: install it (Debian: apt install clang)")
        return 1
    if arguments.command == "seeds":
        return _write_seeds(clang)
    programs = natives and cxx.build(
        registry.BUILD / "libfuzzer",
        registry.programs(),
        compiler=clang,
        flags=("-O1", "-g", *_SANITIZE),
        libraries=("-lcrypto",),
    )
    workers = min(os.cpu_count() or 1, len(names))
    seconds = max(1, int(arguments.seconds / math.ceil(len(names) / workers)))
    with ThreadPoolExecutor(workers) as pool:
        runs = {
            name: pool.submit(_run, name, programs[name], seconds)
            if name in registry.TARGETS
            else pool.submit(_run_python, name, seconds)
            for name in names
        }
    outcomes = {name: run.result() for name, run in runs.items()}
    _report(outcomes)
    return 1 if any(outcome.failure for outcome in outcomes.values()) else 0


def _run(name: str, program: Path, seconds: int) -> Outcome:
    learnt = registry.BUILD / "corpus" / name
    findings = registry.FINDINGS / name
    for folder in (learnt, findings):
        folder.mkdir(parents=True, exist_ok=True)
    known = [folder for folder in (registry.CORPUS / name, findings) if folder.exists()]
    command = [
        str(program),
        *_OPTIONS,
        f"-max_total_time={seconds}",
        f"-artifact_prefix={findings}/",
        str(learnt),
        *map(str, known),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if not any(findings.iterdir()):
        findings.rmdir()
    text = ended.stderr
    coverage = re.findall(r"cov: (\d+)", text)
    return Outcome(
        executions=_number(r"stat::number_of_executed_units:\s*(\d+)", text),
        per_second=_number(r"stat::average_exec_per_sec:\s*(\d+)", text),
        coverage=int(coverage[-1]) if coverage else 0,
        failure=text[-4000:] if ended.returncode != 0 else "",
    )


def _run_python(name: str, seconds: int) -> Outcome:
    findings = registry.FINDINGS / name
    module = registry.PYTHON_TARGETS[name]
    command = [sys.executable, "-m", module, "--seconds", str(seconds), "--findings", str(findings)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
    text = ended.stdout
    return Outcome(
        executions=_number(r"(\d+) programs", text),
        per_second=_number(r"(\d+) a second", text),
        coverage=_number(r"(\d+) outcomes", text),
        failure=(text + ended.stderr)[-4000:] if ended.returncode != 0 else "",
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _report(outcomes: dict[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        if outcome.failure:
            print(f"==== {name}\n{outcome.failure}")
    print(f"{'target':16}{'executions':>14}{'per second':>12}{'edges':>8}  found")
    for name, outcome in outcomes.items():
        numbers = f"{outcome.executions:14,}{outcome.per_second:12,}{outcome.coverage:8}"
        print(f"{name:16}{numbers}  {'a failure, see above' if outcome.failure else 'nothing'}")


def _write_seeds(compiler: str) -> int:
    sources = [registry.HERE / "seeds.cpp", *registry.LIBRARY]
    built = cxx.build(
        registry.BUILD / "seeds",
        {"seeds": sources},
        compiler=compiler,
        flags=("-O1",),
        libraries=("-lcrypto",),
    )
    return subprocess.run([str(built["seeds"]), str(registry.CORPUS)]).returncode


if __name__ == "__main__":
    sys.exit(main())
