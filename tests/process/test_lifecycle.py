"""init_rpc and shutdown take a bounded time, can be interrupted and repeated, and print nothing."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import wait_for_file, wait_until_serving
from tests.process.group import SECONDS, Group, shutdown, workers
from tests.support import script
from tests.support.backend import needs_ucx, on_ucx
from torch_rpc_ext.retry import RetryPolicy

# The beginning of a program of one process; its `init()` starts RPC.
PROGRAM = """
    import os, sys, tempfile
    import torch
    from torch.distributed import rpc
    from tests.support.backend import backend_options, backend_type

    def init(name="me", rank=0, world_size=1, path=None, **options):
        path = path or tempfile.mktemp()
        rpc.init_rpc(name, backend=backend_type(), rank=rank, world_size=world_size,
                     rpc_backend_options=backend_options(f"file://{path}", **options))
"""


def wait_until_it_waits(group: Group, rank: int) -> None:
    """Wait until the worker has told the store that it is there, and so waits for the others."""
    store = Path(group.init_method.removeprefix("file://"))
    deadline = time.monotonic() + 60
    while f"/rank/{rank}".encode() not in store.read_bytes():
        assert time.monotonic() < deadline, f"worker{rank} has not come"
        time.sleep(0.01)


def be_patient_with_the_store() -> None:
    """Let an operation of the store take long, though init_timeout is short."""
    from torch_rpc_ext._group import stores

    stores._LEAST_PATIENCE = SECONDS


@needs_ucx("says only that a store key timed out")
def test_init_timeout_names_the_missing_ranks() -> None:
    with Group(2, init=False) as group:
        group[0].run(be_patient_with_the_store)
        # The other worker would wait for longer than this test may take: rank 0 tells it the end.
        other = group[1].init(4, init_timeout=600)
        wait_until_it_waits(group, 1)
        calls = [group[0].init(4, init_timeout=2), other]
        for call in calls:
            with pytest.raises(Exception, match=r"after 2 s: rank\(s\) 2, 3 of 4 have not joined"):
                call.result()


@needs_ucx("waits for its store, deaf to signals")
def test_ctrl_c_during_init() -> None:
    with Group(1, init=False) as group:
        call = group[0].init(2, init_timeout=600)
        wait_until_it_waits(group, 0)
        assert not call.done()
        group[0].signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            call.result()


@needs_ucx("is deaf to signals in a shutdown")
def test_ctrl_c_during_shutdown() -> None:
    code = (
        PROGRAM
        + """
    import time, signal, threading, traceback
    init()
    def functions_of_main():
        frame = sys._current_frames()[threading.main_thread().ident]
        return [frame.f_code.co_name for frame, _ in traceback.walk_stack(frame)]
    def interrupt_the_shutdown():
        while "shutdown" not in functions_of_main():
            time.sleep(0.01)
        time.sleep(0.5)  # most likely, it waits for the call by then
        os.kill(os.getpid(), signal.SIGINT)
    future = rpc.rpc_async("me", time.sleep, args=(600,))
    threading.Thread(target=interrupt_the_shutdown).start()
    try:
        rpc.shutdown(timeout=600)
    except KeyboardInterrupt:
        print("interrupted")
    """
    )
    ended = script.python(code)
    assert "interrupted" in ended.out, ended


def begin_and_wait(begun: Path, end: Path, *_: object) -> None:
    """Wait for the file ``end``, for longer than a test waits for a worker."""
    begun.touch()
    wait_for_file(end, 2 * SECONDS)


def call_in_a_thread(seconds: float) -> None:
    """Let another thread of this worker wait for an answer."""
    call = functools.partial(rpc.rpc_sync, "worker1", f.sleep, args=(seconds,))
    threading.Thread(target=call, daemon=True).start()


@needs_ucx("waits in C++, deaf to signals")
@pytest.mark.parametrize("waits", ["alone", "beside another thread", "for much"])
def test_ctrl_c_during_a_call(waits: str) -> None:
    too_long = 600.0
    with Group(2) as group:
        arguments: tuple[Any, ...] = (too_long,)
        if waits == "beside another thread":
            group[0].run(call_in_a_thread, too_long)
            wait_until_serving(group[1])
        elif waits == "for much":
            arguments = (too_long, torch.ones(5_000_000))
        call = group[0].start(
            rpc.rpc_sync, "worker1", f.sleep, args=arguments, timeout=2 * too_long
        )
        wait_until_serving(group[1], 2 if waits == "beside another thread" else 1)
        group[0].signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            call.result()
        assert group[0].run(rpc.rpc_sync, "worker1", f.name_here) == "worker1"
        group.close(gently=False)  # a graceful end would wait for the sleeping call


def call_itself(*files: Path) -> None:
    rpc.rpc_sync("worker0", begin_and_wait, args=files, timeout=0)


def fetch(*files: Path) -> None:
    rpc.remote("worker1", begin_and_wait, args=files, timeout=0).to_here(timeout=0)


def fetch_in_context(*files: Path) -> None:
    with dist_autograd.context():
        fetch(*files)


def retry(*files: Path) -> None:
    RetryPolicy().rpc_async("worker1", begin_and_wait, args=files, timeout=0).wait()


def name_here(*_: object) -> str:
    return f.name_here()


def wait_for_room(*files: Path, call: Callable[..., object] = rpc.rpc_sync) -> None:
    rpc.rpc_async("worker1", begin_and_wait, args=files, timeout=0)
    # The RRef must be released as if the call had never been made.
    call("worker1", name_here, args=(rpc.RRef(0),), timeout=0)


def interrupt(wait: Callable[..., object], begun: Path, end: Path) -> None:
    """Raise the KeyboardInterrupt that ends ``wait(begun, end)``."""

    def ctrl_c() -> None:
        wait_for_file(begun)
        time.sleep(0.5)  # most likely, the main thread waits by then
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ctrl_c)
    thread.start()
    try:
        wait(begun, end)
    finally:
        thread.join()
        end.touch()


@needs_ucx("waits in C++, deaf to signals")
@pytest.mark.parametrize(
    "wait, options",
    [
        (call_itself, {}),
        (fetch, {}),
        (fetch_in_context, {}),
        (retry, {}),
        (wait_for_room, {"max_calls_in_flight": 1}),
        (functools.partial(wait_for_room, call=rpc.rpc_async), {"max_calls_in_flight": 1}),
        (functools.partial(wait_for_room, call=rpc.remote), {"max_calls_in_flight": 1}),
    ],
    ids=[
        "itself",
        "to_here",
        "to_here in a context",
        "retry",
        "room",
        "room of rpc_async",
        "room of remote",
    ],
)
def test_ctrl_c_ends_each_wait(
    wait: Callable[..., object], options: dict[str, Any], tmp_path: Path
) -> None:
    with Group(2, options=options) as group:
        with pytest.raises(KeyboardInterrupt):
            group[0].run(interrupt, wait, tmp_path / "begun", tmp_path / "end")
        for worker in ("worker0", "worker1"):
            assert group[0].run(rpc.rpc_sync, worker, f.name_here) == worker


def handle_signals(folder: Path) -> None:
    """Make a file for each SIGUSR1 that this worker handles: "1", "2" and so on."""
    numbers = itertools.count(1)
    signal.signal(signal.SIGUSR1, lambda *_: (folder / str(next(numbers))).touch())


@needs_ucx("waits in C++, deaf to signals")
def test_a_signal_is_handled_during_a_call_and_does_not_end_it(tmp_path: Path) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    with Group(2) as group:
        group[0].run(handle_signals, tmp_path)
        call = group[0].start(rpc.rpc_sync, "worker1", begin_and_wait, args=(begun, end), timeout=0)
        wait_for_file(begun)
        for number in (1, 2):
            group[0].signal(signal.SIGUSR1)
            wait_for_file(tmp_path / str(number))
            assert not call.done()
        end.touch()
        call.result()


def signal_another_thread_during_a_call(folder: Path, size: int) -> None:
    begun, end = folder / "begun", folder / "end"
    handle_signals(folder)

    def signal_itself() -> None:
        wait_for_file(begun, SECONDS)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    threading.Thread(target=signal_itself).start()
    rpc.rpc_sync("worker1", begin_and_wait, args=(begun, end, torch.ones(size)), timeout=0)


@needs_ucx("waits in C++, deaf to signals")
@pytest.mark.parametrize("size", [1, 5_000_000], ids=["leading", "not leading"])
def test_a_signal_that_went_to_another_thread_is_handled_soon(size: int, tmp_path: Path) -> None:
    """The kernel may deliver a signal to any thread; Python runs its handler on the main thread."""
    with Group(2) as group:
        call = group[0].start(signal_another_thread_during_a_call, tmp_path, size)
        wait_for_file(tmp_path / "1", SECONDS)  # which the handler makes while the call runs
        assert not call.done()
        (tmp_path / "end").touch()
        call.result()


@workers(3, everywhere=True)
def test_graceful_shutdown_waits_for_work() -> None:
    rank = rpc.get_worker_info().id
    futures = [rpc.rpc_async(f"worker{(rank + 1) % 3}", f.sleep, args=(0.3,)) for _ in range(3)]
    rpc.shutdown()
    assert all(future.done() for future in futures)
    assert not rpc.api._is_current_rpc_agent_set()


def shut_down_within_centuries() -> None:
    rpc.shutdown(timeout=threading.TIMEOUT_MAX)


@needs_ucx("may take so long a time-out for a negative one")
def test_graceful_shutdown_with_the_longest_timeout() -> None:
    """Added to a clock that counts ns in 64 bits, that many seconds overflow."""
    with Group(2) as group:
        group.run_all(shut_down_within_centuries)


def leave_during_a_call(begun: Path, end: Path) -> None:
    rpc.rpc_async("worker1", begin_and_wait, args=(begun, end), timeout=0)
    wait_for_file(begun)
    rpc.shutdown(graceful=False)


def test_immediate_shutdown_does_not_wait(tmp_path: Path) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    with Group(2) as group:
        group.run(leave_during_a_call, begun, end)  # within half the time that the call takes
        end.touch()
        group[1].run(leave)


def leave() -> None:
    rpc.shutdown(graceful=False)


class Lingering:
    """A value whose end takes until another worker has tried to call."""

    def __init__(self, begun: str, tried: str) -> None:
        self.begun, self.tried = Path(begun), Path(tried)

    def __del__(self) -> None:
        self.begun.touch()
        wait_for_file(self.tried)


HELD: list[Any] = []


def hold_a_lingering_value(to: str, begun: str, tried: str) -> None:
    HELD.append(rpc.remote(to, Lingering, args=(begun, tried)))
    HELD[0]._get_future().wait()


def call_in_between(to: str, begun: str, tried: str) -> str:
    wait_for_file(Path(begun))
    try:
        return f"answered: {rpc.rpc_sync(to, torch.add, args=(torch.ones(1), 1), timeout=20)}"
    except RuntimeError as error:
        return str(error)
    finally:
        Path(tried).touch()


@needs_ucx("serves on, and may crash when a peer deletes an RRef meanwhile")
def test_nothing_is_served_while_the_table_of_rrefs_is_taken_apart(tmp_path: Path) -> None:
    """Upstream takes the table apart without a lock; a request that deleted an RRef meanwhile
    crashed the worker."""
    begun, tried = str(tmp_path / "begun"), str(tmp_path / "tried")
    with Group(2) as group:
        group[0].run(hold_a_lingering_value, "worker1", begun, tried)
        call = group[0].start(call_in_between, "worker1", begun, tried)
        group[1].run(shutdown, graceful=False)
        assert "the peer shut down" in call.result()
        group[0].run(shutdown, graceful=False)


def calls_after_the_stop() -> list[str]:
    rpc.api._get_current_rpc_agent().stop()
    errors = []
    for call in (rpc.rpc_sync, rpc.remote):
        with pytest.raises(RuntimeError) as caught:
            call("worker1", torch.add, args=(torch.ones(1), 1))
        assert "this worker shut down" in str(caught.value)
        errors.append(type(caught.value).__name__)
    return errors


@needs_ucx("its agent has no stop()")
def test_calls_of_a_worker_that_stops_say_so() -> None:
    with Group(2) as group:
        assert group.run(calls_after_the_stop) == ["ShutDownError", "ShutDownError"]
        for worker in (group[0], group[1]):
            worker.run(shutdown, graceful=False)


def test_init_again() -> None:
    with Group(2, init=False) as group:
        for _ in range(3):
            group.init_all()
            assert group.run_all(call_all, 2) == [["worker0", "worker1"]] * 2
            for call in [worker.start(rpc.shutdown) for worker in group]:
                call.result()


@needs_ucx("refuses another rank in the same process (pytorch issue 46491)")
def test_init_again_with_another_rank_and_world_size() -> None:
    with Group(3, init=False) as group:
        for ranks in ([0, 1, 2], [2, 0, 1], [1, 0], [0], [0, 1, 2]):
            for worker, rank in zip(group, ranks, strict=False):
                worker.rank, worker.name = rank, f"worker{rank}"
            taking_part = list(group)[: len(ranks)]
            for call in [worker.init(len(ranks)) for worker in taking_part]:
                call.result()
            for rank, worker in zip(ranks, taking_part, strict=True):
                assert worker.run(call_all, len(ranks)) == [
                    f"worker{i}" for i in range(len(ranks))
                ], rank
            for call in [worker.start(rpc.shutdown) for worker in taking_part]:
                call.result()


def test_a_second_group_with_a_fresh_process() -> None:
    """Upstream counts the meetings of workers with these names in each process."""
    with Group(3, init=False) as group:
        first, second, fresh = group
        for other in (second, fresh):
            other.name, other.rank = "worker1", 1
            for call in [worker.init(2) for worker in (first, other)]:
                call.result()
            assert first.run(call_all, 2) == ["worker0", "worker1"]
            for call in [worker.start(rpc.shutdown) for worker in (first, other)]:
                call.result()


def call_all(count: int) -> list[str]:
    return [rpc.rpc_sync(f"worker{i}", f.name_here) for i in range(count)]


COMPUTE = """
    import threading, time
    begun, go_on, computes = threading.Event(), threading.Event(), threading.Event()
    def sleep():
        begun.set()
        time.sleep(600)
    def wait_to_go_on():
        go_on.wait()
    def compute():
        x = torch.ones(300, 300)
        while True:
            torch.mm(x, x)
            computes.set()
    def nap(*_):
        while True:
            time.sleep(0.001)
            computes.set()
"""
LEAVINGS = {
    "at the end": "",
    "sys.exit": "sys.exit(0)",
    "with a call under way": "future = rpc.rpc_async('me', time.sleep, args=(600,))",
    "with an rref": "rref = rpc.remote('me', torch.neg, args=(torch.ones(3),)); rref.to_here()",
    "with a thread in a call": (
        "call = threading.Thread(target=rpc.rpc_sync, args=('me', sleep));"
        "call.daemon = True;"
        "call.start(); begun.wait(60)"
    ),
    # Such a thread comes back from C++ into Python again and again, also while Python ends.
    "with a thread in torch": "threading.Thread(target=compute, daemon=True).start()",
    "with a function in torch": "future = rpc.rpc_async('me', compute); computes.wait(60)",
    # Python ends the thread of such a function while libtorch has the GIL for the function.
    "with a function in Python": "future = rpc.rpc_async('me', nap); computes.wait(60)",
    # The call may end only then: of one that has ended, the main thread would run the callback.
    "with a callback in Python": (
        "future = rpc.rpc_async('me', wait_to_go_on).then(nap); go_on.set(); computes.wait(60)"
    ),
    # A call whose time-out passes before its function could begin never begins it.
    "with a function that was given up": (
        "future = rpc.rpc_async('me', nap, timeout=0.5)\n"
        "    while not computes.wait(1): future = rpc.rpc_async('me', nap, timeout=0.5)\n"
        "    import contextlib\n    with contextlib.suppress(RuntimeError): future.wait()\n"
        "    rpc.shutdown()"
    ),
    "with a function of an earlier group": (
        "future = rpc.rpc_async('me', sleep); begun.wait(60);"
        "rpc.shutdown(graceful=False); init(); rpc.shutdown(graceful=False)"
    ),
}


@needs_ucx("sometimes aborts in std::terminate")
@pytest.mark.parametrize("leaving", LEAVINGS)
def test_leaving_without_shutdown(leaving: str) -> None:
    code = f"{COMPUTE}\n    init()\n    {LEAVINGS[leaving]}\n"
    ended = script.python(PROGRAM + code)
    assert ended.code == 0 and "terminate called" not in ended.err, ended


def test_leaving_with_an_exception_keeps_its_exit_code() -> None:
    ended = script.python(PROGRAM + "    init(); raise ValueError('mine')\n")
    assert ended.code == 1 and "ValueError: mine" in ended.err, ended
    assert not on_ucx() or "terminate called" not in ended.err, ended


#: What a program does between atexit.register(rpc.shutdown) and its init_rpc.
BEFORE_INIT = {
    "nothing": "",
    "an earlier session": "init(); rpc.shutdown()",
    "a fork": (
        "pid = os.fork()\n    if pid: os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
}


@pytest.mark.parametrize("before", BEFORE_INIT)
def test_a_program_may_register_its_shutdown_before_init(before: str) -> None:
    code = f"""
    import atexit, time
    def work():
        time.sleep(1)
        print("worked")
    atexit.register(rpc.shutdown)
    {BEFORE_INIT[before]}
    init()
    future = rpc.rpc_async("me", work)
"""
    ended = script.python(PROGRAM + code)
    assert (ended.code, ended.out) == (0, "worked\n") and "Traceback" not in ended.err, ended


QUIET = (
    PROGRAM
    + """
    init()
    rpc.rpc_sync("me", torch.add, args=(torch.ones(2), 1))
    rpc.rpc_sync("me", torch.nn.functional.relu, args=(torch.ones(2),))
    rpc.shutdown()
"""
)


@needs_ucx("warns at every init (pytorch issue 149393)")
def test_init_calls_and_shutdown_write_nothing() -> None:
    for _ in range(3):
        ended = script.python(QUIET)
        # On a busy machine the threads may take longer to end than shutdown waits for them. What
        # happens each time is a fault.
        if "is still running" not in ended.err:
            break
    assert (ended.code, ended.out, ended.err) == (0, "", ""), ended


@needs_ucx("warns at every init (pytorch issue 149393)")
@pytest.mark.parametrize(
    "category", ["DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning"]
)
def test_no_warning_at_init(category: str) -> None:
    # Set after torch was imported: its own warnings at import do not count.
    ended = script.python(
        QUIET.replace(
            "    init()\n",
            f"    import warnings; warnings.simplefilter('error', {category})\n    init()\n",
        )
    )
    assert ended.code == 0, ended


FORK = (
    PROGRAM
    + """
    from torch.utils.data import DataLoader, TensorDataset
    if __name__ == "__main__":
        init()
        call = lambda: rpc.rpc_sync("me", torch.add, args=(torch.ones(2), 1)).sum().item()
        assert call() == 4
        for _ in range(2):
            for (batch,) in DataLoader(TensorDataset(torch.ones(64)), batch_size=8, num_workers=2):
                assert call() == 4
        pid = os.fork()
        if pid == 0:
            sys.exit(5)  # a child that runs Python's atexit hooks
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        assert call() == 4
        rpc.shutdown()
        print("done")
"""
)


def test_fork_and_dataloader_beside_a_live_agent() -> None:
    ended = script.python(FORK)
    if not on_ucx() and "done" not in ended.out:
        pytest.skip("TENSORPIPE: fork beside a live agent hangs or aborts (pytorch issue 113600)")
    assert ended.code == 0 and "done" in ended.out, ended
    assert "terminate called" not in ended.err, ended


def use_memory() -> None:
    rpc.rpc_sync("worker1", f.identity, args=(torch.ones(1_000_000),))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_init_and_shutdown_leave_no_files_and_threads_behind() -> None:
    counts = []
    with Group(2, init=False) as group:
        for _ in range(6):
            group.init_all()
            group.run(use_memory)
            for call in [worker.start(rpc.shutdown) for worker in group]:
                call.result()
            time.sleep(0.2)
            counts.append((group.run(open_files), group.run(threads)))
        # The first rounds may create what stays, such as a thread pool or an eventfd; after that
        # nothing may grow. A thread may still be ending for a while after its shutdown.
        deadline = time.monotonic() + 30
        while counts[-1][0] > counts[2][0] + 1 or counts[-1][1] > counts[2][1] + 1:
            assert time.monotonic() < deadline, counts
            time.sleep(0.2)
            counts.append((group.run(open_files), group.run(threads)))
