"""torch_rpc_ext.launch: worker processes for notebooks and scripts."""

from __future__ import annotations

import _thread
import array
import contextlib
import fcntl
import gc
import io
import linecache
import os
import signal
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import psutil
import pytest
import torch
from torch.distributed import rpc as untyped_rpc

from tests.support.backend import ROOT, backend_name
from torch_rpc_ext.launch import Worker, WorkerExitedError, WorkerGroup, _rpc
from torch_rpc_ext.launch.process import split_lines

sys.path.append(str(ROOT / "tutorials"))
import execute  # noqa: E402

rpc: Any = untyped_rpc
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
PATIENCE = 150.0  # s, for the start of a worker and a call, on a busy machine


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    """Two workers without RPC, which the tests share that do not change them."""
    with WorkerGroup(2) as group:
        group.run(len, "up")  # so that no test's limits include the start of the workers
        yield group


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def gone(*pids: int) -> bool:
    """Wait for a while; return whether all these processes have ended."""
    return wait_until(lambda: not any(map(is_running, pids)))


# What runs.


def test_results_come_in_the_order_of_the_ranks(group: WorkerGroup) -> None:
    pids = group.run(os.getpid)
    assert pids == [worker.pid for worker in group]
    assert len({*pids, os.getpid()}) == 3
    assert group["worker1"].run(os.getpid) == group[1].pid == pids[1]
    assert len(group) == 2


def test_functions_and_classes_that_nobody_can_import(group: WorkerGroup) -> None:
    factor = 3

    class Answer:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    def scale(x: torch.Tensor) -> Answer:
        return Answer(x * factor)

    answers = group.run(scale, torch.ones(2))
    assert [answer.value.tolist() for answer in answers] == [[3, 3], [3, 3]]


def test_calls_of_one_worker_run_one_after_the_other(group: WorkerGroup) -> None:
    calls: list[Future[float]] = []
    calls.append(group[0].submit(lambda: (time.sleep(0.3), time.monotonic())[1]))
    calls.append(group[0].submit(time.monotonic))
    first, second = (call.result(PATIENCE) for call in calls)
    assert first <= second


def test_a_worker_has_our_path_and_folder(group: WorkerGroup) -> None:
    folder, path, threads = group[0].run(
        lambda: (os.getcwd(), list(sys.path), os.environ["OMP_NUM_THREADS"])
    )
    assert folder == os.getcwd()
    assert [os.path.abspath(p) for p in sys.path] == path
    assert threads == os.environ.get("OMP_NUM_THREADS", "1")


def test_an_error_keeps_its_type_and_the_worker_lives(group: WorkerGroup) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        group[1].run(lambda: 1 // 0)
    assert "on worker1:" in caught.value.__notes__[0] and "1 // 0" in caught.value.__notes__[0]
    with pytest.raises(SystemExit):
        group[1].run(sys.exit, 3)
    with pytest.raises(RuntimeError, match="Odd: 7"):
        group[1].run(raise_odd)
    with pytest.raises(TypeError, match="pickle"):
        group[1].run(threading.Lock)
    assert group[1].run(len, "four") == 4


class NoText(Exception):
    def __init__(self, _code: int) -> None:
        super().__init__()

    def __str__(self) -> str:
        raise LookupError("no text")


def raise_without_text() -> None:
    raise NoText(7)


def replace_stdout(how: str) -> str:
    before = sys.stdout
    if how == "none":
        sys.stdout = None
    elif how == "closed":
        sys.stdout = io.StringIO()
        sys.stdout.close()
    else:
        sys.stdout = object()
    _streams.append(before)
    return how


def restore_stdout() -> None:
    sys.stdout = _streams.pop()


_streams: list[Any] = []


def test_a_function_may_leave_what_it_likes(group: WorkerGroup) -> None:
    with pytest.raises(RuntimeError, match="NoText"):
        group[1].run(raise_without_text)
    for how in ("none", "closed", "an object"):
        assert group[1].run(replace_stdout, how) == how
        group[1].run(restore_stdout)


def test_an_error_in_a_cell_of_a_notebook_shows_the_line(group: WorkerGroup) -> None:
    source, cell = "def divide():\n    return 1 // 0  # the line\n", "<a cell>"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, cell, "exec"), names)
    linecache.cache[cell] = (len(source), None, source.splitlines(True), cell)
    with pytest.raises(ZeroDivisionError) as caught:
        group[1].run(names["divide"])
    assert f'File "{cell}", line 2, in divide\n' in caught.value.__notes__[0]
    assert "return 1 // 0  # the line" in caught.value.__notes__[0]


class Odd(Exception):
    """Cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(str(first))


def raise_odd() -> None:
    raise Odd(7, 8)


# What is shown.


def test_output_is_shown_before_the_call_returns(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("from Python")
        print("to stderr", file=sys.stderr)
        os.write(1, b"from C\n")
        print("10%\r50%\r100%")

    with WorkerGroup(["ps"]) as group:
        capsys.readouterr()
        group[0].run(speak)
        shown = capsys.readouterr().out
        group[0].run(lambda: print("no newline", end=""))
        worker = group[0]
        group.stop()
        worker._thread.join(PATIENCE)  # it shows the rest; stop() waits for it for 1 s only
        rest = capsys.readouterr().out
    assert shown.splitlines() == ["[ps] from Python", "[ps] to stderr", "[ps] from C", "[ps] 100%"]
    assert rest == "[ps] no newline\n"


def test_output_can_go_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[tuple[str, str]] = []
    with WorkerGroup(1, show=lambda name, line: lines.append((name, line))) as group:
        group.run(print, "ä")
    assert lines == [("worker0", "ä")]
    assert not capsys.readouterr().out


def test_an_error_of_show_harms_no_call(caplog: pytest.LogCaptureFixture) -> None:
    def show(name: str, line: str) -> None:
        raise BrokenPipeError(f"nobody reads {line}")

    with WorkerGroup(["ps"], show=show) as group:
        more_than_a_pipe_holds = "line\n" * 50_000
        assert group[0].submit(print, more_than_a_pipe_holds).result(PATIENCE) is None
        assert group[0].submit(len, "four").result(PATIENCE) == 4
    [record] = [one for one in caplog.records if one.name.startswith("torch_rpc_ext.launch")]
    assert record.getMessage() == "the output of ps cannot be shown"
    assert record.exc_info is not None and "nobody reads line" in str(record.exc_info[1])


def test_output_without_line_ends_is_cut() -> None:
    lines: list[str] = []
    with WorkerGroup(1, show=lambda name, line: lines.append(line)) as group:
        group[0].submit(print, "ä" * 300_000, end="", flush=True).result(PATIENCE)
        assert [len(line) for line in lines] == [65536] * 4
        group[0].submit(print, "!").result(PATIENCE)
    assert "".join(lines) == "ä" * 300_000 + "!"


def test_only_the_last_version_of_a_progress_bar_is_kept() -> None:
    bar = "\r".join("x" * 1000 + f"{done}%" for done in range(100))
    last = "x" * 1000 + "99%"
    assert split_lines(f"first\n10%\r20%\r\n{bar}") == (["first", "20%"], last)
    # What follows may be the line end, or the next version.
    assert split_lines(f"{bar}\r") == ([], f"{last}\r")
    assert split_lines(f"{last}\r\n") == ([last], "")
    assert split_lines(f"{last}\r100%\n") == (["100%"], "")


def leave_a_child_that_prints() -> int:
    code = "import time\nwhile True: print('still here', flush=True); time.sleep(0.05)"
    return subprocess.Popen([sys.executable, "-c", code]).pid


def test_a_child_that_prints_outlives_its_worker() -> None:
    heard = threading.Event()
    with WorkerGroup(["ps"], show=lambda name, line: heard.set()) as group:
        child = group[0].submit(leave_a_child_that_prints).result(PATIENCE)
        try:
            assert heard.wait(PATIENCE)
            asleep = group[0].submit(time.sleep, 1000)
            os.kill(group[0].pid, signal.SIGKILL)
            with pytest.raises(WorkerExitedError, match="did not finish sleep"):
                asleep.result(PATIENCE)
        finally:
            os.kill(child, signal.SIGKILL)


class Leaving:
    """Unpickling this object calls sys.exit(3)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_thread_that_reads_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave() -> bool:
        raise SystemExit

    with WorkerGroup(["ps"]) as group:
        with pytest.raises(SystemExit):  # the call's own, which ends no thread
            group[0].submit(Leaving).result(PATIENCE)
        monkeypatch.setattr(group[0], "_take_reply", leave)
        group[0].submit(len, "four")
        asleep = group[0].submit(time.sleep, 1000)
        with pytest.raises(WorkerExitedError, match="did not finish sleep"):
            asleep.result(PATIENCE)


# With RPC.


@pytest.mark.timeout(400)  # the workers import torch
@pytest.mark.parametrize("backend", ["UCX", "TENSORPIPE"])
def test_rpc_with_this_process_as_a_worker(backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    agent = {"UCX": "UcxAgent", "TENSORPIPE": "TensorPipeAgent"}[backend]
    with WorkerGroup(["ps", "trainer"]) as group:
        group.run(import_torch)
        for _ in range(2):  # the second time after a shutdown
            group.init_rpc(backend, join="notebook", num_worker_threads=3, rpc_timeout=100)
            assert rpc.get_worker_info().id == 0
            assert rpc.rpc_sync("ps", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
            assert set(group.run(agent_name)) == {agent} == {agent_name()}
            with pytest.raises(RuntimeError, match="initialized already"):
                group.init_rpc(backend)
            group.shutdown_rpc(timeout=PATIENCE)
            assert not rpc.api._is_current_rpc_agent_set()
    assert "deprecated" not in "".join(capfd.readouterr())


@pytest.mark.timeout(400)  # two groups, one after the other, whose workers import torch
def test_fresh_workers_meet_a_process_that_has_had_rpc_before() -> None:
    """Upstream's counters differ between the processes; that matters to TENSORPIPE, and not to
    UCX."""
    _rpc._align(7)
    for _ in range(2):
        with WorkerGroup(["ps"]) as group:
            group.run(import_torch)
            group.init_rpc("TENSORPIPE", join="notebook")
            assert call("ps") == [1, 2]


def import_torch() -> None:
    """Do what takes the workers long, before this process waits for them in init_rpc, which has a
    limit. They import torch with this module."""


def agent_name() -> str:
    return type(rpc.api._get_current_rpc_agent()).__name__


def call(to: str) -> Any:
    return rpc.rpc_sync(to, sorted, args=([2, 1],))


def test_wrong_arguments_are_named_and_harm_nobody(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match="UCX.*got 'NCCL'"):
        group.init_rpc("NCCL")
    for backend in ("UCX", "TENSORPIPE"):
        with pytest.raises(TypeError, match="num_threads"):
            group.init_rpc(backend, num_threads=3)
    with pytest.raises(RuntimeError, match="worker0.*has that name"):
        group.init_rpc(backend_name(), join="worker0")
    with pytest.raises(KeyError, match="no worker 'ps'; there are worker0, worker1"):
        group["ps"]
    with pytest.raises(ValueError, match="different names"):
        WorkerGroup(["a", "a"])
    with pytest.raises(ValueError, match="at least 1"):
        WorkerGroup(0)
    wrong: Any
    for wrong in ("ps", 1.5):
        with pytest.raises(ValueError, match=f"a list of names, got {wrong!r}"):
            WorkerGroup(wrong)
    for wrong in (["a", ""], ["a", 1]):
        with pytest.raises(ValueError, match=f"must be a text, got {wrong[1]!r}"):
            WorkerGroup(wrong)
    with pytest.raises(RuntimeError, match="not started"):
        WorkerGroup(1).run(print)
    with pytest.raises(RuntimeError, match="started already"):
        group.start()
    assert group.run(len, "four") == [4, 4]


# How it ends.


def test_stop_ends_all_and_may_be_called_again() -> None:
    group = WorkerGroup(2).start()
    workers = list(group)
    group.run(os.getpid)
    group.stop()
    group.stop()
    assert [worker.exitcode for worker in workers] == [0, 0]
    with group:  # a group can be started again
        assert group.run(len, "a") == [1, 1]


def test_a_killed_worker_is_named() -> None:
    spoken = threading.Event()
    with WorkerGroup(2, show=lambda name, line: spoken.set()) as group:
        group.init_rpc(backend_name())  # only the workers, not this process
        assert not rpc.api._is_current_rpc_agent_set()
        assert group[0].run(call, "worker1") == [1, 2]
        asleep = group[1].submit(speak_and_sleep)
        assert spoken.wait(PATIENCE)
        group[1].kill()
        with pytest.raises(WorkerExitedError) as caught:
            asleep.result(PATIENCE)
        text = str(caught.value)
        assert "worker 'worker1' has ended (exit code -9)" in text and "speak_and_sleep" in text
        assert "about to sleep" in text
        with pytest.raises(WorkerExitedError, match="cannot run len"):
            group[1].run(len, "a")
        assert group[0].run(len, "a") == 1
        worker = group[0]
    assert worker.exitcode == 0  # the worker that lived ended by itself


def test_who_does_not_leave_is_named() -> None:
    with WorkerGroup(2) as group:
        group.init_rpc(backend_name())
        group[1].submit(time.sleep, 1000)
        # worker0 waits as long, and fails if worker1 then takes as long again to answer it. This
        # process must look before that, also on a busy machine.
        with pytest.raises(TimeoutError, match=r"worker1 did not return from shutdown\(\) in 5 s"):
            group.shutdown_rpc(timeout=5)
        group[1].kill()


def speak_and_sleep() -> None:
    print("about to sleep")
    time.sleep(1000)


def test_an_error_in_the_block_kills_what_still_runs() -> None:
    with pytest.raises(KeyError, match="mine"), WorkerGroup(1) as group:
        group[0].submit(time.sleep, 1000)
        pid = group[0].pid
        raise KeyError("mine")
    assert gone(pid)


def test_a_worker_that_does_not_end_is_killed_and_named() -> None:
    group = WorkerGroup(["ps", "stuck"]).start()
    group.run(len, "a")
    group["stuck"].submit(time.sleep, 1000)
    pids = [worker.pid for worker in group]
    group["ps"].end()
    assert group["ps"].wait(60)  # so it is not late
    with pytest.warns(UserWarning, match="^stuck did not end within 1 s: killed"):
        group.stop(timeout=1)
    assert gone(*pids)


def test_a_forgotten_group_ends() -> None:
    group = WorkerGroup(1).start()
    [pid] = group.run(os.getpid)
    del group
    gc.collect()
    assert gone(pid)


SCRIPT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGURG, lambda *_: None)  # it only ends the main thread's system call
from torch_rpc_ext.launch import WorkerGroup

def work():
    child = subprocess.Popen(["sleep", "1000"])  # what a worker has started ends with it
    print("child", child.pid, flush=True)
    time.sleep(1000)

group = WorkerGroup(1).start()
print("worker", group[0].pid, flush=True)
if sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(1000)  # holds our side of the pipe open
if sys.argv[1] == "exit":
    group[0].run(print, "up")
    sys.exit()
try:
    group.run(work)
except KeyboardInterrupt:
    print("interrupted", group[0].run(len, "four"), flush=True)
"""


def start_script(how: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a program that has workers; return it and the pids that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        env=ENV,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    return process, [int(line.split()[-1]) for line in lines if line.split()[-1].isdigit()]


@pytest.mark.parametrize("how", ["kill", "fork", "exit"])
def test_no_worker_outlives_its_program(how: str) -> None:
    process, pids = start_script(how)
    try:
        if how != "exit":
            assert len(pids) == 2 and all(map(is_running, pids))
            process.kill()
        process.wait(PATIENCE)
        assert gone(*pids)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if how == "fork" else None
        process.communicate()


def test_ctrl_c_interrupts_the_function_and_the_worker_lives() -> None:
    process, pids = start_script("wait")
    os.killpg(process.pid, signal.SIGINT)
    end, shown = time.monotonic() + PATIENCE, None
    while shown is None:
        assert time.monotonic() < end, "the program does not end"
        try:
            shown, _ = process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            # The signal does not end a wait that begins just after it. Another signal does.
            process.send_signal(signal.SIGURG)
    assert shown.splitlines()[-1] == "interrupted 4"
    assert process.returncode == 0
    assert gone(*pids)


@contextlib.contextmanager
def ctrl_c_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Within the block, wait for Ctrl-C, which comes when the condition is true."""

    def press() -> None:
        assert wait_until(condition, PATIENCE)
        signal.pthread_kill(main_thread, signal.SIGINT)
        # The signal does not end a wait that begins just after it. Another signal does.
        while not heard.wait(0.5):
            signal.pthread_kill(main_thread, signal.SIGURG)

    main_thread, heard = threading.get_ident(), threading.Event()
    before = signal.signal(signal.SIGURG, lambda *_: None)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        heard.set()
        thread.join()
        signal.signal(signal.SIGURG, before)


def bytes_on_the_way(worker: Worker) -> int:
    """How many bytes of requests the worker's process has not read yet."""
    count = array.array("i", [0])
    fcntl.ioctl(worker._pipe.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def touch_and_sleep(path: Path, data: bytes) -> None:
    path.touch()
    time.sleep(1000)


def test_ctrl_c_while_arguments_are_sent(tmp_path: Path) -> None:
    """One worker runs the function, another has received a part of its arguments."""
    begun = tmp_path / "begun"
    with WorkerGroup(2) as group:
        _, pid = group.run(os.getpid)
        os.kill(pid, signal.SIGSTOP)
        with ctrl_c_when(lambda: begun.exists() and bytes_on_the_way(group[1]) > 0):
            group.run(touch_and_sleep, begun, bytes(10_000_000))
        os.kill(pid, signal.SIGCONT)
        # Each worker takes this up when it has left the function.
        assert [worker.submit(len, "four").result(PATIENCE) for worker in group] == [4, 4]


def test_ctrl_c_leaves_the_function_before_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with WorkerGroup(1) as group:
        first = group[0].submit(pipe.read_text)
        with ctrl_c_when(lambda: len(group[0]._calls) == 2):
            group[0].run(time.sleep, 1000)
        pipe.write_text("go on")
        assert first.result(PATIENCE) == "go on"
        assert group[0].submit(len, "four").result(PATIENCE) == 4


def test_interrupt_reaches_a_worker_that_still_starts() -> None:
    with WorkerGroup(1) as group:
        asleep, after = group[0].submit(time.sleep, 1000), group[0].submit(len, "four")
        group[0].interrupt()
        with pytest.raises(KeyboardInterrupt):
            asleep.result(PATIENCE)
        assert after.result(PATIENCE) == 4
        group[0].interrupt()  # does nothing: no function runs
        assert group[0].submit(len, "four").result(PATIENCE) == 4


def sleep_as_the_signal_comes(pipe: Path) -> None:
    """Sleep, and let SIGINT come as it may on a busy machine: after Python has looked for signals
    for the last time, and before the system call has begun. Python is told, the sleep goes on."""
    kill = signal.pthread_kill

    def tell(thread: int, number: int) -> None:
        if number == signal.SIGINT:
            _thread.interrupt_main(number)
        else:
            kill(thread, number)

    signal.pthread_kill = tell
    pipe.write_text("goes to sleep")
    time.sleep(1000)


def test_interrupt_that_comes_as_the_function_goes_to_sleep(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with WorkerGroup(1) as group:
        asleep = group[0].submit(sleep_as_the_signal_comes, pipe)
        assert pipe.read_text() == "goes to sleep"
        time.sleep(0.2)  # if the function does not yet sleep, this test tests nothing new
        group[0].interrupt()
        with pytest.raises(KeyboardInterrupt):
            asleep.result(PATIENCE)
        assert group[0].submit(len, "four").result(PATIENCE) == 4


# In a notebook.

CELLS = [
    "from torch_rpc_ext.launch import WorkerGroup; import os, time",
    "group = WorkerGroup(2).start()",
    "def hello(name):\n    print('hello', name)\n    return os.getpid()",
    "group.run(hello, 'first')",
    "print('between')",
    "group[1].run(hello, 'second')",
    "future = group[0].submit(time.sleep, 1000)",
]


@pytest.mark.timeout(700)
def test_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS]
    )
    with tempfile.TemporaryDirectory(prefix="kernel_") as sockets:
        client = nbclient.NotebookClient(
            notebook,
            km=execute.kernel(sockets),
            timeout=600,
            startup_timeout=600,
            resources={"metadata": {"path": "."}},
        )
        with client.setup_kernel(cleanup_kc=True):
            check_cells(client, notebook)


def check_cells(client: Any, notebook: Any) -> None:
    for index, cell in enumerate(notebook.cells):
        client.execute_cell(cell, index)
    first, between, second = (streams(notebook.cells[index]) for index in (3, 4, 5))
    assert sorted(first.splitlines()) == ["[worker0] hello first", "[worker1] hello first"]
    assert between == "between\n"
    assert second == "[worker1] hello second\n"
    results = notebook.cells[3].outputs[-1]["data"]["text/plain"]
    pids = [int(pid) for pid in results.strip("[]").split(",")]
    assert all(map(is_running, pids))
    kernel = client.km.provisioner.pid
    os.kill(kernel, signal.SIGKILL)
    assert gone(*pids)


def streams(cell: Any) -> str:
    return "".join(output["text"] for output in cell.outputs if output.output_type == "stream")
