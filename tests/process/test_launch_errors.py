"""torch_rpc_ext.launch when something fails: functions, callbacks, workers."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.backend import backend_name
from torch_rpc_ext.launch import Worker, WorkerExitedError, WorkerGroup, _rpc

PATIENCE = 150.0  # s, for the start of a worker and a call, on a busy machine


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    """Two workers, which the tests share that do not change them."""
    with WorkerGroup(2) as group:
        group.run(len, "up")  # so that no test's limits include the start of the workers
        yield group


# Errors of a function.


class Reduced(Exception):
    """Is pickled without its attributes, so without its notes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, self.args


class Strange(Exception):
    """Is no exception after unpickling."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, self.args


def fail_with(kind: type[Exception]) -> None:
    error = kind("disk 7 is full")
    error.add_note("my own note")
    raise error


def fail_with_a_plugin(folder: str) -> None:
    sys.path.insert(0, folder)
    try:
        fail_with(importlib.import_module("only_there").PluginError)
    finally:
        sys.path.remove(folder)


def test_an_error_has_the_traceback_once_whatever_its_class(
    group: WorkerGroup, tmp_path: Path
) -> None:
    (tmp_path / "only_there.py").write_text("class PluginError(Exception): pass\n")
    with pytest.raises(RuntimeError) as plugin:
        group[1].run(fail_with_a_plugin, str(tmp_path))
    with pytest.raises(RuntimeError) as strange:
        group[1].run(fail_with, Strange)
    with pytest.raises(Reduced) as reduced:
        group[1].run(fail_with, Reduced)
    assert str(plugin.value) == "only_there.PluginError: disk 7 is full"
    assert str(strange.value) == f"{__name__}.Strange: disk 7 is full"
    assert str(reduced.value) == "disk 7 is full"
    for error in (plugin.value, strange.value, reduced.value):
        [note] = error.__notes__
        assert note.startswith("on worker1:\n") and "in fail_with\n" in note
        assert note.endswith("my own note")
    with pytest.raises(LookupError) as plain:
        group[1].run(fail_with, LookupError)
    own, trace = plain.value.__notes__
    assert own == "my own note" and trace.startswith("on worker1:\n")


# What runs when a call is done.


def test_a_callback_may_run_something_on_the_same_worker(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    answer: Future[list[int]] = Future()
    with WorkerGroup(1) as group:
        first = group[0].submit(pipe.read_text)
        first.add_done_callback(lambda _: answer.set_result(group.run(len, "four")))
        pipe.write_text("go on")
        assert answer.result(PATIENCE) == [4]


def test_a_callback_that_waits_holds_up_no_other_call(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    go_on = threading.Event()
    with WorkerGroup(1) as group:
        try:
            first = group[0].submit(pipe.read_text)
            first.add_done_callback(lambda _: go_on.wait())
            pipe.write_text("go on")
            assert first.result(PATIENCE) == "go on"
            assert group[0].submit(len, "four").result(PATIENCE) == 4
            calls = [group[0].submit(time.sleep, 1000) for _ in range(3)]
            for call in calls:
                call.add_done_callback(lambda _: go_on.wait())
            group[0].kill()
            for call in calls:
                with pytest.raises(WorkerExitedError, match="did not finish sleep"):
                    call.result(PATIENCE)
        finally:
            go_on.set()


def test_an_exit_in_a_callback_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: Future[Any]) -> None:
        raise SystemExit

    os.mkfifo(pipe := tmp_path / "pipe")
    with WorkerGroup(["ps"]) as group:
        first = group[0].submit(pipe.read_text)
        first.add_done_callback(leave)
        pipe.write_text("go on")
        assert first.result(PATIENCE) == "go on"
        assert group[0].submit(len, "four").result(PATIENCE) == 4
        end = time.monotonic() + PATIENCE
        while "a callback of a call on ps failed" not in caplog.text:
            assert time.monotonic() < end, "nothing is logged"
            time.sleep(0.05)


# Workers that end.


def test_show_may_kill_all_workers() -> None:
    def kill_all(name: str, line: str) -> None:  # in the thread that reads worker0's output
        for worker in workers:
            worker.kill()

    workers: list[Worker] = []
    with WorkerGroup(2, show=kill_all) as group:
        workers.extend(group)
        asleep = group[1].submit(time.sleep, 1000)
        group[0].submit(print, "the end")
        with pytest.raises(WorkerExitedError, match="did not finish sleep"):
            asleep.result(PATIENCE)
        assert [worker.exitcode for worker in group] == [-9, -9]


def test_a_failed_kill_spares_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    workers = list(group := WorkerGroup(3).start())
    monkeypatch.setattr(workers[1], "kill", fail)
    with pytest.raises(RuntimeError, match="mine"):
        group.stop(graceful=False)
    monkeypatch.undo()
    assert [worker.exitcode for worker in workers] == [-9, None, -9]
    workers[1].kill()


def test_init_rpc_begins_on_no_worker_when_one_has_ended() -> None:
    with WorkerGroup(2) as group:
        group[1].kill()
        with pytest.raises(WorkerExitedError, match="'worker1' has ended.*cannot run"):
            group.init_rpc(backend_name())
        # Otherwise worker0 would wait for worker1 in init_rpc.
        assert group[0].submit(_rpc.init_count).result(PATIENCE) == 0


def test_init_rpc_is_interrupted_when_another_worker_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Future[Any]:
        raise WorkerExitedError("ended just now", "worker1", -9)

    os.mkfifo(pipe := tmp_path / "pipe")
    with WorkerGroup(2) as group:
        monkeypatch.setattr(group[1], "_begin", fail)
        before = group[0].submit(pipe.read_text)
        with pytest.raises(WorkerExitedError, match="ended just now"):
            group.init_rpc(backend_name())
        pipe.write_text("go on")
        assert before.result(PATIENCE) == "go on"  # only init_rpc was interrupted
        assert group[0].submit(_rpc.init_count).result(PATIENCE) == 0
