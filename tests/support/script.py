"""Runs scripts in new interpreters, for tests of a whole program from its first import to its exit
code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.backend import ROOT, backend_name


@dataclass(frozen=True)
class Ended:
    """How a script ended: its exit code (-N for signal N), what it wrote, and how many seconds it
    took."""

    code: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        end = f"exit code {self.code} after {self.seconds:.1f} s"
        return f"{end}\n-- stdout\n{self.out}\n-- stderr\n{self.err}"


class Script:
    """A running script and all its children, in a session of their own.

    Owns: the session; all of it is killed by close().
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "RPC_TEST_BACKEND": backend_name(),
            **(env or {}),
        }
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            list(argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, word: str) -> None:
        """Wait until the script has printed the line ``word``; fails if the script ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(f"ended without {word!r}: {self.end(5)}")

    def end(self, timeout: float = 150) -> Ended:
        """Wait for the script's end. If it does not end in time, kill it and fail the test with
        what it wrote."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = self.process.communicate(timeout=10)
            raise AssertionError(
                f"still running after {timeout} s\n-- stdout\n{out}\n-- stderr\n{err}"
            ) from None
        return Ended(self.process.returncode, out, err, time.monotonic() - self._started)

    def kill_all(self) -> None:
        """Send SIGKILL to all processes of the session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the processes that still run."""
        self.kill_all()
        self.process.communicate()


@contextlib.contextmanager
def running(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Script]:
    """Run a command during the block; at its end kill the command and all its children."""
    script = Script(argv, env)
    try:
        yield script
    finally:
        script.close()


def run(argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 150) -> Ended:
    """Run a command to its end."""
    with running(argv, env) as script:
        return script.end(timeout)


def python(
    code: str,
    *args: str,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 150,
) -> Ended:
    """Run Python code, which may be indented, in a new interpreter."""
    return run([sys.executable, *flags, "-c", textwrap.dedent(code), *args], env, timeout)


def write(directory: Path, name: str, code: str) -> str:
    """Write a script to a file, which mp.spawn needs; return its path."""
    path = directory / name
    path.write_text(textwrap.dedent(code))
    return str(path)
