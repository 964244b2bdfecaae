"""Members of a dynamic group that are busy, or are not told, while others join and leave."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import occupy
from tests.process.group import Group, Worker
from tests.process.test_dynamic import leave, names
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("joins and leaves in its own way")


def be_impatient() -> None:
    from torch_rpc_ext._group import dynamic

    dynamic._NOTICE_TIMEOUT = 0.3


def wait_for_names(*expected: str) -> None:
    end = time.monotonic() + 40
    while names() != list(expected):
        assert time.monotonic() < end, names()
        time.sleep(0.02)


def call(to: str) -> int:
    return int(rpc.rpc_sync(to, f.identity, args=(1,), timeout=20))


@contextlib.contextmanager
def busy(worker: Worker, gate: Path) -> Iterator[None]:
    worker.run(occupy, gate)
    try:
        yield
    finally:
        gate.touch()


def members(size: int) -> Group:
    """Workers with one thread for requests each; the last is not in the group yet."""
    group = Group(size, dynamic=True, init=False)
    for worker in group:
        worker.run(be_impatient)
    for worker in group.workers[:-1]:
        worker.init(None, num_worker_threads=1).result()
    return group


def end(*workers: Worker) -> None:
    for worker in workers:
        worker.run(leave)


def test_a_busy_worker_hears_of_a_newcomer_later(tmp_path: Path) -> None:
    with members(2) as group:
        with busy(group[0], tmp_path / "gate"):
            group[1].init(None).result()
            assert group[0].run(names) == ["worker0"]
        group[0].run(wait_for_names, "worker0", "worker1")
        assert group[0].run(call, "worker1") == 1
        end(group[1], group[0])


def test_a_busy_worker_hears_that_one_left(tmp_path: Path) -> None:
    with members(2) as group:
        group[1].init(None).result()
        group[0].run(wait_for_names, "worker0", "worker1")
        with busy(group[0], tmp_path / "gate"):
            end(group[1])
            # It is told by the goodbye, for which it needs no thread for requests.
            group[0].run(wait_for_names, "worker0")
        end(group[0])


reading, answered = threading.Event(), threading.Event()
lost: list[str] = []


goodbyes = 0


def note(event: Any) -> None:
    global goodbyes
    if event.kind == "lost":
        lost.append(event.worker)
    elif event.kind == "left":
        goodbyes += 1


def have_a_store_that_does_not_answer() -> None:
    import torch_rpc_ext
    from torch_rpc_ext._group import dynamic, sessions

    read = dynamic.Directory.read

    def wait_and_read(directory: Any) -> Any:
        reading.set()
        assert answered.wait(60)
        return read(directory)

    sessions.require().directory.read = wait_and_read.__get__(sessions.require().directory)
    torch_rpc_ext.on_worker_event(note)


def wait_until_it_reads() -> None:
    assert reading.wait(40)


def hear_of_a_loss(worker: str) -> None:
    end = time.monotonic() + 40
    while worker not in lost:
        assert time.monotonic() < end, lost
        time.sleep(0.02)


def read_at_last() -> None:
    answered.set()


def test_a_store_that_does_not_answer_holds_up_no_event(tmp_path: Path) -> None:
    with members(4) as group:
        for worker in (group[1], group[2]):
            worker.run(call, "worker0")
        group[0].run(have_a_store_that_does_not_answer)
        with busy(group[0], tmp_path / "gate"):
            end(group[1])
            group[0].run(wait_until_it_reads)
            group[2].kill()
            group[0].run(hear_of_a_loss, "worker2")
        group[0].run(read_at_last)
        group[0].run(wait_for_names, "worker0", "worker2")


def test_one_joins_and_leaves_while_another_is_busy(tmp_path: Path) -> None:
    with members(3) as group:
        with busy(group[0], tmp_path / "gate"):
            group[2].init(None).result()
            group[1].run(wait_for_names, "worker0", "worker1", "worker2")
            end(group[2])
            group[1].run(wait_for_names, "worker0", "worker1")
        assert group[1].run(call, "worker0") == 1
        group[0].run(wait_for_names, "worker0", "worker1")
        end(group[1], group[0])


def hear_of(text: str) -> None:
    from torch_rpc_ext._group import dynamic

    dynamic.member_joined(text)


def own_text() -> str:
    from torch_rpc_ext._group import sessions

    return sessions.require().me.to_json()


def test_a_notice_of_a_join_that_comes_late_makes_no_ghost() -> None:
    with members(2) as group:
        group[1].init(None).result()
        group[0].run(wait_for_names, "worker0", "worker1")
        text = group[1].run(own_text)
        end(group[1])
        group[0].run(wait_for_names, "worker0")
        group[0].run(hear_of, text)
        assert group[0].run(names) == ["worker0"]
        end(group[0])


def test_ctrl_c_while_a_worker_joins(tmp_path: Path) -> None:
    with members(3) as group:
        with busy(group[0], tmp_path / "gate"):
            group[2].run(be_patient)
            joining = group[2].init(None)
            group[1].run(wait_for_names, "worker0", "worker1", "worker2")
            group[2].signal(signal.SIGINT)
            (tmp_path / "gate").touch()
            with pytest.raises(KeyboardInterrupt):
                joining.result()
        for worker in (group[0], group[1]):
            worker.run(wait_for_names, "worker0", "worker1")
        end(group[1], group[0])


def be_patient() -> None:
    from torch_rpc_ext._group import dynamic

    dynamic._NOTICE_TIMEOUT = 30.0


def be_interrupted(init_method: str, when: str) -> bool:
    """Join as a guest does, with Ctrl-C at that moment; return whether RPC still runs here."""
    from torch_rpc_ext._group import dynamic
    from torch_rpc_ext.cli import guest

    owner, name = {"in the directory": (dynamic.Directory, "join"), "joined": (guest, "_join")}[
        when
    ]
    function = getattr(owner, name)

    def and_ctrl_c(*args: Any) -> None:
        function(*args)
        raise KeyboardInterrupt

    setattr(owner, name, and_ctrl_c)
    given = argparse.Namespace(init_method=init_method, interface=None, join_timeout=10.0)
    with pytest.raises(KeyboardInterrupt), guest.joined(given):
        raise AssertionError("it has joined")
    return bool(rpc.api._is_current_rpc_agent_set())


def in_directory() -> list[str]:
    from torch_rpc_ext._group import sessions

    return sorted(sessions.require().directory.read().members)


@pytest.mark.parametrize("when", ["in the directory", "joined"])
def test_ctrl_c_while_a_guest_joins(when: str) -> None:
    with members(2) as group:
        assert not group[1].run(be_interrupted, group.init_method, when)
        group[0].run(wait_for_names, "worker0")
        assert group[0].run(in_directory) == ["worker0"]
        end(group[0])


def threads_of_the_group() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rpc-")]


def wait_for_goodbyes(expected: int) -> None:
    end = time.monotonic() + 40
    while goodbyes < expected:
        assert time.monotonic() < end, goodbyes
        time.sleep(0.02)


def test_one_thread_reads_the_store_for_all_goodbyes(tmp_path: Path) -> None:
    with members(5) as group:
        for worker in group.workers[1:4]:
            worker.run(call, "worker0")
        group[0].run(have_a_store_that_does_not_answer)
        with busy(group[0], tmp_path / "gate"):
            end(group[1])
            group[0].run(wait_until_it_reads)
            end(group[2], group[3])
            group[0].run(wait_for_goodbyes, 3)
            assert sorted(group[0].run(threads_of_the_group)) == ["rpc-events", "rpc-members"]
            group[0].run(read_at_last)
            group[0].run(wait_for_names, "worker0")


def leave_while_it_reads() -> list[str]:
    """Leave; return which threads of the group are left."""
    from torch_rpc_ext._group import sessions
    from torch_rpc_ext._upstream import hooks

    assert reading.wait(40)
    uninstall = hooks.uninstall

    def let_the_store_answer() -> None:
        hooks.uninstall = uninstall
        uninstall()
        # The store answers a little later: after a shutdown that did not wait for the answer.
        threading.Timer(0.3, answered.set).start()

    hooks.uninstall = let_the_store_answer
    session = sessions.require()
    rpc.shutdown()
    session.start_thread("rpc-late", threading.Event().wait)  # as for an event that comes late
    return threads_of_the_group()


def test_no_thread_reads_the_store_after_the_end(tmp_path: Path) -> None:
    """Python aborts a process that ends while a thread comes back from C++, from the store here."""
    with members(3) as group:
        group[1].run(call, "worker0")
        group[0].run(have_a_store_that_does_not_answer)
        with busy(group[0], tmp_path / "gate"):
            end(group[1])
        assert group[0].run(leave_while_it_reads) == []
