"""A worker of a static group dies and is started again: it belongs to the group as before."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc
from torch.distributed.rpc import RRef

from tests.process import functions as f
from tests.process.deaths import QUICK, check_alive, occupy
from tests.process.group import Group, Worker
from tests.support import netns
from tests.support.backend import needs_ucx
from torch_rpc_ext._group import sessions
from torch_rpc_ext._group.stores import Deadline, poll

pytestmark = needs_ucx("takes no worker back")


def names() -> set[str]:
    return {info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()}


def test_the_next_call_reaches_it_and_its_own_reach_all() -> None:
    with Group(3) as group:
        group.run(check_alive, "worker1")
        group[1].kill()
        again = group.start_again(1)
        for rank in (0, 2):  # worker2 has never called worker1 before
            group[rank].run(check_alive, "worker1")
            again.run(check_alive, f"worker{rank}")
        assert group.run_all(names) == [{"worker0", "worker1", "worker2"}] * 3
        assert group.run(f.nested, 6, 3) == 6


def look_up_while_it_returns() -> None:
    session, enough = sessions.require(), threading.Event()

    def return_again_and_again() -> None:
        times = 0
        while times < 10_000 or not enough.is_set():
            session.agent.add_member(*session.members["worker1"].row())
            times += 1

    with ThreadPoolExecutor(1) as pool:
        returning = pool.submit(return_again_and_again)
        try:
            for _ in range(1_000):
                assert rpc.get_worker_info("worker1").id == 1
            enough.set()
            while not returning.done():
                assert rpc.get_worker_info("worker1").id == 1
        finally:
            enough.set()
        returning.result()


def test_its_name_is_known_while_it_returns() -> None:
    with Group(2) as group:
        group.run(look_up_while_it_returns)


def test_it_died_before_anybody_called_it() -> None:
    with Group(3) as group:
        group[2].kill()
        group.start_again(2)
        group.run(check_alive, "worker2")
        group[1].run(check_alive, "worker2")


def be_impatient_with(busy: str) -> None:
    """Let init_rpc wait only a moment for the busy worker, as long as it takes for the others."""
    from torch_rpc_ext._group import returning

    module: Any = returning
    ask = module._ask

    def ask_each(names: Any, function: Any, me: Any, _: float) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for name in names:
            said |= ask([name], function, me, 0.3 if name == busy else 30.0)
        return said

    module._ask = ask_each


def test_a_busy_worker_hears_of_it_later(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Group(3, options={"num_worker_threads": 1}) as group:
        group.run(check_alive, "worker1")
        group.run(occupy, gate)
        group[1].kill()
        group.renew(1).run(be_impatient_with, "worker0")
        group[1].init(3).result()
        gate.touch()
        group[1].run(check_alive, "worker0")  # after it in worker0's only thread
        group.run(check_alive, "worker1")


def test_many_lives() -> None:
    """Two workers die and return several times, and have to tell each other about it."""
    with Group(4) as group:
        for _ in range(3):
            for rank in (1, 3):
                group[rank].kill()
            for rank in (3, 1):
                group.start_again(rank)
            group.run_all(check_all)
        group.run_all(meet)


def check_all() -> None:
    for name in names():
        check_alive(name)


def meet() -> None:
    assert rpc.api._all_gather(1) == dict.fromkeys(names(), 1)


def test_two_come_back_at_once() -> None:
    with Group(4) as group:
        for rank in (1, 2):
            group[rank].kill()
        for call in [group.renew(rank).init(4) for rank in (1, 2)]:
            call.result()
        group.run_all(check_all)


@pytest.mark.parametrize("waiting", [False, True], ids=["before", "during"])
def test_barriers_count_on(waiting: bool) -> None:
    """Barriers work after a worker has died, also while others wait for it in a barrier."""
    with Group(3) as group:
        group.run_all(meet)
        group.run_all(meet)
        group[2].kill()
        calls = [group[rank].start(meet) for rank in (0, 1)] if waiting else []
        time.sleep(0.3 * waiting)
        again = group.start_again(2)
        if not waiting:
            calls = [group[rank].start(meet) for rank in (0, 1)]
        again.run(meet)
        for call in calls:
            call.result()


def is_waiting(name: str) -> bool:
    """On the leader: whether that worker has said that it waits in a barrier."""
    with rpc.api._all_gather_dict_lock:
        states = rpc.api._all_gather_sequence_id_to_states.values()
        return any(name in state.gathered_objects for state in states)


def wait_until_waiting(name: str) -> None:
    assert poll(lambda: is_waiting(name), Deadline(30))


def gather(value: str) -> dict[str, str]:
    gathered: dict[str, str] = rpc.api._all_gather(value)
    return gathered


@pytest.mark.parametrize("others", [(), (1,), (0, 1)], ids=["alone", "with 1", "with 0 and 1"])
def test_one_that_waited_in_a_barrier_comes_back(others: tuple[int, ...]) -> None:
    """What a worker said before it died, that it is in the barrier, counts no more."""
    with Group(4) as group:
        group.run_all(meet)
        group[2].start(gather, "former")
        group.run(wait_until_waiting, "worker2")
        calls = [group[rank].start(gather, "present") for rank in others]
        group[2].kill()
        again = group.start_again(2)
        calls += [group[rank].start(gather, "present") for rank in (0, 1, 3) if rank not in others]
        calls.append(again.start(gather, "present"))
        for call in calls:
            assert set(call.result().values()) == {"present"}
        group.run_all(meet)


def serve_until_shutdown() -> None:
    rpc.shutdown()


def test_one_that_served_in_shutdown_comes_back() -> None:
    with Group(2) as group:
        group[1].start(serve_until_shutdown)
        group.run(wait_until_waiting, "worker1")
        group.run(check_alive, "worker1")
        group[1].kill()
        group.start_again(1)
        group.run(check_alive, "worker1")
        assert not group.run(is_waiting, "worker1")


def test_rank_0_comes_back() -> None:
    """Rank 0 can return if the store does not run in its process."""
    with Group(3) as group:
        group[1].run(check_alive, "worker0")
        group[0].kill()
        again = group.start_again(0)
        again.run(check_all)
        group[2].run(check_alive, "worker0")


def call_until_lost(to: str) -> tuple[str, float]:
    from torch_rpc_ext.errors import PeerLostError

    start = time.monotonic()
    with pytest.raises(PeerLostError) as raised:
        rpc.rpc_sync(to, f.sleep, args=(30.0,))
    assert raised.value.worker == to
    return str(raised.value), time.monotonic() - start


def hold() -> None:
    f.hold_rrefs()
    rpc.rpc_sync("worker2", keep, args=(f.HELD["tensor"],))


@torch.jit.script
def fetch(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here()


@torch.jit.script
def pass_on(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rpc.rpc_sync("worker2", fetch, (rref,))


def keep(rref: Any) -> None:
    f.HELD["passed on"] = rref


def owner_died(call: Any) -> None:
    from torch_rpc_ext.errors import PeerLostError

    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"owner of this RRef died.*worker1") as raised:
        call()
    assert raised.value.worker == "worker1"
    assert time.monotonic() - start < QUICK


def use_old() -> None:
    tensor = f.HELD["tensor"]
    for call in (
        *f.uses_of_held_rrefs(),
        lambda: rpc.rpc_sync("worker1", keep, args=(tensor,)),
        lambda: rpc.rpc_sync("worker2", keep, args=(tensor,)),
        in_a_context(tensor.to_here),
    ):
        owner_died(call)
    with pytest.raises(RuntimeError, match="owner of this RRef died"):
        pass_on(tensor)
    f.HELD.clear()


def in_a_context(call: Any) -> Any:
    def within() -> None:
        with autograd.context():
            call()

    return within


def use_passed_on() -> None:
    owner_died(f.HELD["passed on"].to_here)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_old_rrefs_say_that_their_owner_died(dynamic: bool) -> None:
    with Group(3, dynamic=dynamic) as group:
        group.run(hold)
        group[1].kill()
        group.start_again(1)
        group.run(use_old)
        group[2].run(use_passed_on)
        group.run(hold)  # new RRefs work as ever
        group[2].run(fetch_passed_on)


def fetch_passed_on() -> None:
    assert f.HELD["passed on"].to_here().sum() == 4


def begin_pass() -> int:
    """Begin a forward pass and never end it; return its id."""
    context = autograd._new_context()
    tensor = torch.ones(2, requires_grad=True)
    rpc.rpc_sync("worker0", torch.neg, args=(tensor,))
    return int(context._context_id())


def test_what_it_began_in_two_lives_is_told_apart() -> None:
    with Group(2) as group:
        first = group[1].run(begin_pass)
        group[1].kill()
        again = group.start_again(1)
        assert again.run(begin_pass) != first
        assert group.run(f.contexts) == 1
        again.run(end_passes)


def end_passes() -> None:
    autograd._release_context(autograd._current_context()._context_id())


def test_a_second_live_one_is_refused() -> None:
    from torch_rpc_ext.errors import RefusedError

    with Group(3) as group:
        group[0].run(check_alive, "worker1")
        second = Worker(group, "worker1", 1, None)
        try:
            with pytest.raises(RefusedError, match=r"worker1 .*is alive"):
                second.init(3).result()
        finally:
            second.kill()
            second.pipe.close()
            second.child.close()
        group.run_all(check_all)
        # That attempt has not taken the place of worker1: it may still come back.
        group[1].kill()
        group.start_again(1)
        group.run(check_alive, "worker1")


def test_a_call_under_way_fails_and_the_next_succeeds() -> None:
    with Group(2) as group:
        call = group[0].start(call_until_lost, "worker1")
        time.sleep(0.3)
        group[1].kill()
        text, seconds = call.result(60)
        assert "worker1" in text and seconds < QUICK, (text, seconds)
        group.start_again(1)
        group.run(check_alive, "worker1")


def test_all_die_and_a_new_group_is_formed() -> None:
    """The new group uses the same store, which still has the keys of the old group."""
    with Group(2) as group:
        for worker in group:
            worker.kill()
        for call in [group.renew(rank).init(2) for rank in (0, 1)]:
            call.result()
        group.run_all(check_all)


def test_after_the_end_of_the_group_a_new_one_is_formed(tmp_path: Path) -> None:
    """Other processes form the new group while those of the former group still run."""
    store = f"file://{tmp_path / 'store'}"
    with Group(2, init_method=store) as first:
        first.run_all(graceful)
        with Group(2, init_method=store) as second:
            second.run_all(check_all)


def graceful() -> None:
    rpc.shutdown()


def test_one_that_crashed_comes_back() -> None:
    """The interpreter of the worker ended normally, but without a graceful shutdown."""
    with Group(2) as group:
        group[1].run(check_alive, "worker0")
        group[1].killed = True
        group[1].leave()
        group[1].child.process.join(20)
        assert group[1].exitcode == 0
        group.start_again(1)
        group.run(check_alive, "worker1")


def other_worker1(group: Group, host: netns.Host) -> Worker:
    return Worker(group, "worker1", 1, None, host)


def finds_its_place_taken() -> None:
    """After the cut the worker connects anew, and is told that its place is taken."""
    from torch_rpc_ext.errors import PeerLostError, RefusedError

    end = time.monotonic() + 30
    while True:
        try:
            rpc.rpc_sync("worker0", f.nothing, timeout=5)
        except PeerLostError:
            assert time.monotonic() < end
            time.sleep(0.2)
        except RefusedError as refusal:
            assert "has been started again" in str(refusal), refusal
            return


def test_on_another_host_the_others_say_whether_the_former_lives(
    hosts: tuple[netns.Host, netns.Host],
) -> None:
    from torch_rpc_ext.errors import RefusedError

    options = {"keepalive": 1.0, "interface": "eth0"}
    places = [hosts[0], hosts[1], hosts[0]]
    with Group(3, hosts=places, options=options) as group:
        group.run(check_alive, "worker1")
        former = group[1]
        second = other_worker1(group, hosts[0])
        with pytest.raises(RefusedError, match=r"worker1 .*is alive"):
            second.init(3, **options).result()
        with netns.cut(hosts[1], hosts[0]):
            second.init(3, **options).result()
        group.workers[1] = second
        group.run_all(check_all)
        former.run(finds_its_place_taken)
        former.kill()
        former.child.close()
        group.run_all(check_all)
