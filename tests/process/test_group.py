"""Tests of group.py itself: its reports can be relied on."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import util

import pytest
from torch.distributed import rpc

from tests.process.group import Group, WorkerDied, workers


def _say_and_raise() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    raise ValueError("from the worker")


def test_an_exception_comes_back_with_traceback_and_output() -> None:
    with Group(1, init=False) as group:
        with pytest.raises(ValueError, match="from the worker") as caught:
            group.run(_say_and_raise)
        assert "_say_and_raise" in caught.value.__notes__[0]
        assert "to stdout" in group.output() and "to stderr" in group.output()


def test_a_worker_that_dies_is_named() -> None:
    with Group(2, init=False) as group:
        with pytest.raises(WorkerDied, match=r"worker1 ended \(exit code 3\)"):
            group[1].run(os._exit, 3)


def test_a_worker_that_hangs_is_reported_with_its_stack() -> None:
    with Group(1, init=False) as group:
        group.run(os.getpid)  # it runs, and handles the signal for stacks
        with pytest.raises(TimeoutError, match="sleep on worker0"):
            group[0].start(time.sleep, 60).result(0.2)
        # The worker may get no core for a while, and writes its stack then.
        deadline = time.monotonic() + 30
        while "_serve" not in group.output():
            assert time.monotonic() < deadline, group.output()
            time.sleep(0.05)


def test_workers_inherit_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_TEST", "yes")
    with Group(1, init=False, env={"SET_FOR_WORKER": "too"}) as group:
        assert group.run(os.getenv, "SET_BY_TEST") == "yes"
        assert group.run(os.getenv, "SET_FOR_WORKER") == "too"


def _end_with(code: int) -> None:
    """Let this process end with the exit code after all that it has to do has succeeded."""
    util.Finalize(None, os._exit, (code,), exitpriority=0)


def test_a_bad_exit_code_after_shutdown_fails_the_test() -> None:
    group = Group(2)
    group[1].run(_end_with, 7)
    with pytest.raises(AssertionError, match="exit codes after shutdown: .*'worker1': 7"):
        group.close()


@workers(2, everywhere=True)
@pytest.mark.parametrize("value", [1, 2])
def test_the_decorator_runs_everywhere(value: int) -> None:
    assert value in (1, 2)
    assert rpc.get_worker_info().name in ("worker0", "worker1")
