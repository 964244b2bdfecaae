"""Groups without a fixed size: workers join and leave while others work."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import check_alive, wait_for_file, wait_until_stopped
from tests.process.group import Group
from tests.support.backend import needs_ucx


def names() -> list[str]:
    return sorted(info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos())


def call_without_pause(to: str, begun: Path, end: Path) -> None:
    """Call until the file ``end`` is there, and check that every call succeeds."""
    count = 0
    while not end.exists():
        assert rpc.rpc_sync(to, f.identity, args=(count,), timeout=30) == count
        begun.touch()
        count += 1


def init_one_by_one(group: Group, **options: Any) -> None:
    for worker in group:
        worker.init(None, **options).result()


def leave() -> None:
    rpc.shutdown()


def test_workers_see_who_joined() -> None:
    with Group(3, dynamic=True, init=False) as group:
        init_one_by_one(group)
        assert group.run_all(names) == [["worker0", "worker1", "worker2"]] * 3
        assert group.run(f.nested, 6, 3) == 6
        for worker in group:
            worker.run(leave)


def test_all_join_at_once() -> None:
    with Group(4, dynamic=True, timeout=90) as group:
        assert group.run_all(names) == [[f"worker{i}" for i in range(4)]] * 4
        for worker in group:
            worker.run(leave)


def test_join_and_leave_while_calls_run(tmp_path: Path) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        busy = group[0].start(call_without_pause, "worker1", begun, end)
        wait_for_file(begun)
        for number in range(3):
            guest = group.add("guest", 2 + number)
            assert guest.run(names) == ["guest", "worker0", "worker1"]
            guest.run(check_alive, "worker0")
            guest.run(leave)
            assert group[1].run(names) == ["worker0", "worker1"]
        end.touch()
        busy.result()
        for worker in (group[0], group[1]):
            worker.run(leave)


def announce_only_after(entered: Path, go: Path) -> None:
    """Make init_rpc wait once this worker is in the directory, before it tells the others."""
    from torch_rpc_ext._group import dynamic

    announce = dynamic.announce_join

    def later(session: Any) -> None:
        entered.touch()
        wait_for_file(go)
        announce(session)

    dynamic.announce_join = later


@needs_ucx("joins by a token, so nobody leaves meanwhile")
def test_one_leaves_while_another_joins(tmp_path: Path) -> None:
    """The one that leaves does not know the newcomer yet, and so tells it nothing."""
    entered, go = tmp_path / "entered", tmp_path / "go"
    with Group(3, dynamic=True, init=False) as group:
        for worker in (group[0], group[1]):
            worker.init(None).result()
        group[2].run(announce_only_after, entered, go)
        joining = group[2].init(None)
        wait_for_file(entered)
        group[1].run(leave)
        go.touch()
        joining.result()
        assert group[2].run(names) == ["worker0", "worker2"]
        assert group[0].run(names) == ["worker0", "worker2"]
        for worker in (group[2], group[0]):
            worker.run(leave)


def error_of_call(to: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, f.nothing, timeout=5)
    return str(raised.value)


def test_a_call_to_one_that_left_names_it() -> None:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        group[1].run(leave)
        assert "worker1" in group.run(error_of_call, "worker1")
        group[0].run(leave)


@needs_ucx("keeps the dead worker's name and address")
def test_a_restarted_worker_takes_its_name_again() -> None:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        group[1].run(check_alive, "worker0")
        group[1].kill()
        assert "worker1" in group.run(error_of_call, "worker1")
        again = group.add("worker1", 1)
        assert group.run(f.nested, 4, 2) == 4
        again.run(leave)
        group[0].run(leave)


def leave_alone() -> float:
    """Leave without a word to the others, while the process lives on; return how long it took."""
    begin = time.monotonic()
    rpc.shutdown(graceful=False)
    return time.monotonic() - begin


def wait_until_they_are(expected: list[str]) -> None:
    end = time.monotonic() + 40
    while names() != expected:
        assert time.monotonic() < end, names()
        time.sleep(0.01)


@needs_ucx("keeps the worker that left")
def test_one_that_leaves_alone_is_no_member_any_more() -> None:
    with Group(3, dynamic=True, init=False) as group:
        init_one_by_one(group)
        group[1].run(leave_alone)
        for worker in (group[0], group[2]):
            worker.run(wait_until_they_are, ["worker0", "worker2"])
        # Its process lives, but nobody waits for it, and another process may take its name.
        begin = time.monotonic()
        newcomer = group.add("worker1", 1)
        assert newcomer.run(names) == ["worker0", "worker1", "worker2"]
        newcomer.run(leave)
        assert time.monotonic() - begin < 8, "something waited 10 s for a worker that has left"
        for worker in (group[2], group[0]):
            worker.run(leave)


def leave_alone_with_a_silent_store() -> float:
    from torch_rpc_ext._group import sessions

    session = sessions.require()

    class Silent:
        def check(self, keys: list[str]) -> bool:
            time.sleep(30)
            return True

    session.directory._store.store = Silent()
    return leave_alone()


@needs_ucx("asks no store")
def test_one_that_leaves_alone_waits_a_moment_for_the_store() -> None:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        assert group[1].run(leave_alone_with_a_silent_store) < 8
        group[0].run(leave)


def fork_a_child_that_leaves() -> None:
    child = os.fork()
    if child == 0:
        from torch_rpc_ext._lifecycle import lifetime

        lifetime.leave()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_ucx("hangs in a fork beside a live agent")
def test_a_forked_child_does_not_take_its_parent_out() -> None:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        group[1].run(fork_a_child_that_leaves)
        newcomer = group.add("worker2", 2)
        assert newcomer.run(names) == ["worker0", "worker1", "worker2"]
        for worker in (newcomer, group[1], group[0]):
            worker.run(leave)


kept: list[Any] = []


def hold_rref_of(owner: str) -> None:
    kept.append(rpc.remote(owner, f.identity, args=(1,)))
    assert kept[0].to_here() == 1


def wait_until_nobody_knows(name: str) -> None:
    end = time.monotonic() + 40
    while name in names():
        assert time.monotonic() < end
        time.sleep(0.01)


def pass_on_the_rref() -> Any:
    return rpc.rpc_sync("worker2", f.fetch, args=(kept[0],), timeout=60)


took_it = threading.Event()


def take_and_go_on(_: Any) -> None:
    took_it.set()
    time.sleep(0.3)


def leave_when_it_has_come() -> None:
    assert took_it.wait(30)
    rpc.shutdown()


def pass_to_one_that_leaves() -> None:
    rpc.rpc_sync("worker2", take_and_go_on, args=(kept[0],), timeout=60)


def wait_until_it_waits_for_the_owner() -> None:
    """Wait until the arguments are read, and the function has still to begin."""
    end = time.monotonic() + 30
    agent = rpc.api._get_current_rpc_agent()
    while int(agent.get_metrics()["agent.server_active_async_calls"]) != 1:
        assert time.monotonic() < end
        time.sleep(0.01)


def seconds_to_leave() -> float:
    begin = time.monotonic()
    rpc.shutdown()
    return time.monotonic() - begin


@needs_ucx("waits 100 s for the confirmation")
def test_one_that_leaves_confirms_the_rrefs_that_it_got() -> None:
    with Group(3, dynamic=True, init=False) as group:
        init_one_by_one(group)
        group.run(hold_rref_of, "worker1")
        # Then torch runs the function before it confirms the RRef to worker0.
        group[1].signal(signal.SIGSTOP)
        wait_until_stopped(group[1].child.pid)
        call = group[0].start(pass_to_one_that_leaves)
        group[2].run(wait_until_it_waits_for_the_owner)
        leaving = group[2].start(leave_when_it_has_come)
        group[1].signal(signal.SIGCONT)
        call.result()
        leaving.result()
        group.run(drop_the_rref)
        assert group.run(seconds_to_leave) < 30
        group[1].run(leave)


def drop_the_rref() -> None:
    kept.clear()


def error_of_passing_it_on() -> str:
    with pytest.raises(RuntimeError) as raised:
        pass_on_the_rref()
    drop_the_rref()
    return str(raised.value)


def begin_to_leave_with_an_rref_in_use(group: Group) -> Any:
    """worker1 leaves; it waits until worker0 drops an RRef, but no worker counts it as a member."""
    init_one_by_one(group)
    group.run(hold_rref_of, "worker1")
    leaving = group[1].start(leave)
    for worker in (group[0], *group.workers[2:]):
        worker.run(wait_until_nobody_knows, "worker1")
    return leaving


@needs_ucx("does not find the owner any more")
def test_an_rref_is_used_until_its_owner_has_left() -> None:
    with Group(3, dynamic=True, init=False) as group:
        leaving = begin_to_leave_with_an_rref_in_use(group)
        assert group.run(pass_on_the_rref) == 1
        group.run(drop_the_rref)
        leaving.result(20)
        for worker in (group[2], group[0]):
            worker.run(leave)


def wait_until_nothing_leads_to(name: str) -> None:
    """Wait until the connection to a worker has ended."""
    end = time.monotonic() + 30
    agent: Any = rpc.api._get_current_rpc_agent()
    while any(peer["worker"] == name for peer in agent.describe_peers()):
        assert time.monotonic() < end
        time.sleep(0.01)


def be_patient_about_rrefs() -> None:
    from torch_rpc_ext._lifecycle import shutdown

    shutdown._RREF_PATIENCE = timedelta(seconds=50)


@needs_ucx("waits 10 s for the owner")
def test_an_rref_of_an_owner_that_left_holds_nothing_up() -> None:
    with Group(2, dynamic=True, init=False) as group:
        begin_to_leave_with_an_rref_in_use(group)
        group[1].kill()
        group[0].run(wait_until_nothing_leads_to, "worker1")
        group[0].run(be_patient_about_rrefs)
        group[0].run(drop_the_rref)
        assert group[0].run(seconds_to_leave) < 30
        assert "Error occurred when deleting" not in group.output()


@pytest.mark.slow  # 26 s: both workers try to reach the owner as long as torch would
@needs_ucx("does not begin the function")
def test_a_function_begins_with_an_rref_of_an_owner_that_left() -> None:
    with Group(3, dynamic=True, init=False) as group:
        begin_to_leave_with_an_rref_in_use(group)
        group[1].kill()
        error = group.run(error_of_passing_it_on)
        assert '"worker1": it has left the group' in error, error
        # worker0 waits until worker2 has told it that it has the RRef, too.
        for worker in (group[0], group[2]):
            worker.run(leave)


def keep_values_at(to: str, values: range) -> list[int]:
    rrefs = [rpc.remote(to, f.identity, args=(value,)) for value in values]
    kept.extend(rrefs)
    return [rref.to_here() for rref in rrefs]


@needs_ucx("gives both lives' RRefs the same ids")
def test_rrefs_of_two_lives_are_told_apart() -> None:
    with Group(2, dynamic=True, init=False) as group:
        init_one_by_one(group)
        assert group[1].run(keep_values_at, "worker0", range(5)) == [0, 1, 2, 3, 4]
        group[1].kill()
        again = group.add("worker1", 1)
        # worker0 still holds the values of the former life.
        assert again.run(keep_values_at, "worker0", range(10, 15)) == [10, 11, 12, 13, 14]
        group.close(gently=False)
