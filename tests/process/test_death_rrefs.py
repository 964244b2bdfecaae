"""The death of a worker: its RRefs, the values that it held, and its autograd contexts."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc
from torch.distributed.rpc import RRef

from tests.process import functions as f
from tests.process.deaths import QUICK, check_alive, peer_lost
from tests.process.group import Group
from tests.support.backend import needs_ucx
from torch_rpc_ext import errors
from torch_rpc_ext._native import loader


def use_lost_rrefs() -> None:
    for call in f.uses_of_held_rrefs():
        assert peer_lost(call) < QUICK
    f.HELD.clear()


@needs_ucx("its errors are RuntimeErrors without names")
def test_rrefs_of_a_dead_owner_raise_at_once() -> None:
    with Group(3) as group:
        group.run(f.hold_rrefs)
        group[1].kill()
        group.run(use_lost_rrefs)
        group[2].run(check_alive, "worker0")


def fetch(rref: Any) -> Any:
    return rref.to_here()


@torch.jit.script
def fetch_in_script(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here()


def pass_on_lost_rref() -> None:
    tensor = f.HELD["tensor"]
    for call in (
        lambda: rpc.rpc_sync("worker2", fetch, args=(tensor,)),
        lambda: rpc.remote("worker2", fetch, args=(tensor,)).to_here(),
    ):
        assert peer_lost(call) < QUICK
    with pytest.raises(RuntimeError, match='on worker "worker1" failed .*died'):
        rpc.rpc_sync("worker2", fetch_in_script, args=(tensor,))
    f.HELD.clear()


@needs_ucx("does not begin, as the owner never confirms that the RRef has one user more")
def test_a_function_begins_with_an_rref_of_a_dead_owner() -> None:
    with Group(3) as group:
        group.run(f.hold_rrefs)
        group[2].run(check_alive, "worker1")
        group[1].kill()
        group.run(pass_on_lost_rref)
        assert group[2].run(pending_users) == 0
        group[2].run(check_alive, "worker0")


def pass_on_rref_of_an_unknown_dead_owner() -> None:
    from torch_rpc_ext.errors import PeerLostError

    with pytest.raises(PeerLostError) as raised:
        rpc.rpc_sync("worker2", fetch, args=(f.HELD["tensor"],))
    assert raised.value.worker == "worker1", repr(raised.value)
    f.HELD.clear()


@pytest.mark.slow  # 13 s: worker2 tries to reach the owner as long as torch would
@needs_ucx("does not begin, as the owner never confirms that the RRef has one user more")
def test_a_function_begins_with_an_rref_of_a_dead_owner_that_was_never_called() -> None:
    with Group(3) as group:
        group.run(f.hold_rrefs)
        group[1].kill()
        group.run(pass_on_rref_of_an_unknown_dead_owner)
        assert group[2].run(pending_users) == 0
        group[2].run(check_alive, "worker0")


def pending_users() -> int:
    return int(rpc._get_debug_info()["num_pending_users"])


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def begin_pass() -> None:
    """Begin a forward pass over all other workers, and never end it."""
    autograd._new_context()
    tensor = torch.ones(2, requires_grad=True)
    for worker in ("worker0", "worker2"):
        tensor = rpc.rpc_sync(worker, double, args=(tensor,))


@needs_ucx("keeps them (pytorch issue 26379)")
def test_autograd_contexts_of_a_dead_worker_are_released() -> None:
    with Group(3) as group:
        group[1].run(begin_pass)
        group[0].run(begin_own)
        assert group[0].run(f.contexts) == 2 and group[2].run(f.contexts) == 2
        group[1].kill()
        for rank in (0, 2):
            group[rank].run(f.wait_for_contexts, 1)


def owned_values() -> int:
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


def hold_values_of_worker0() -> None:
    f.HELD["theirs"] = [rpc.remote("worker0", f.identity, args=(i,)) for i in range(5)]
    f.HELD["tensors"] = [rpc.remote("worker0", torch.neg, args=(torch.ones(3),)) for _ in range(3)]
    for rref in f.HELD["theirs"] + f.HELD["tensors"]:
        rref.to_here()
    rpc.rpc_sync("worker2", take_over_rref, args=(f.HELD["theirs"][4],))


def take_over_rref(rref: Any) -> None:
    f.HELD["passed on"] = rref


def use_passed_on() -> int:
    return int(f.HELD["passed on"].to_here())


@needs_ucx("keeps them")
def test_values_that_a_dead_worker_held_are_released() -> None:
    with Group(3) as group:
        group[1].run(hold_values_of_worker0)
        assert group[0].run(owned_values) == 8
        group[1].kill()
        deadline = time.monotonic() + 30
        while group[0].run(owned_values) != 1:
            assert time.monotonic() < deadline, group[0].run(owned_values)
            time.sleep(0.05)
        assert group[2].run(use_passed_on) == 4  # it was passed on, and a live worker holds it


def begin_own() -> None:
    """Begin a forward pass that does not involve worker1: its context must stay."""
    autograd._new_context()
    rpc.rpc_sync("worker2", double, args=(torch.ones(2, requires_grad=True),))


def create_rrefs_until_it_dies() -> None:
    from torch_rpc_ext.errors import PeerLostError

    with pytest.raises(PeerLostError):
        while True:
            for _ in range(20):
                rpc.remote("worker1", f.sleep, args=(0.05,))
            rpc.remote("worker1", f.nothing).to_here()


@needs_ucx("its errors are RuntimeErrors without names")
def test_killed_while_it_creates_rrefs() -> None:
    """The callers survive."""
    with Group(3, dynamic=True) as group:
        calls = [group[rank].start(create_rrefs_until_it_dies) for rank in (0, 2)]
        time.sleep(0.5)
        group[1].kill()
        for call in calls:
            call.result(30)
        group[0].run(check_alive, "worker2")
        group.close(gently=False)


def create_rrefs_too_late(to: str) -> None:
    rrefs = [rpc.remote(to, f.sleep, args=(0.5,), timeout=0.1) for _ in range(3)]
    for rref in rrefs:
        with pytest.raises(RuntimeError, match="has not answered"):
            rref._get_future().wait()
        with pytest.raises(RuntimeError, match="timed out"):
            rref.to_here(timeout=10)
    right = rpc.remote(to, f.identity, args=(1,))
    assert right.to_here() == 1


def create_rrefs_late_and_use_them_at_once(count: int) -> None:
    """Whoever gets the error uses the RRef before anything else can happen."""
    wrong: list[str] = []
    # On a single core, a woken thread may run before the thread that woke it goes on.
    core = {min(os.sched_getaffinity(0))}
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), core)

    def create() -> None:
        for _ in range(count):
            rref = rpc.remote("worker0", f.sleep, args=(0.05,), timeout=0.002)
            try:
                rref._get_future().wait()
            except RuntimeError:
                try:
                    rref.to_here()
                    wrong.append("has a value")
                except RuntimeError as error:
                    if "timed out" not in str(error):
                        wrong.append(str(error))

    threads = [threading.Thread(target=create, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        if thread.is_alive():
            wrong.append("to_here() waits for ever")
    assert not wrong, wrong


@needs_ucx("the error may be there before the RRef knows of it")
def test_an_rref_of_ones_own_whose_creation_timed_out_is_used_at_once() -> None:
    with Group(1) as group:
        group[0].run(create_rrefs_late_and_use_them_at_once, 100)
        group.close(gently=False)


@needs_ucx("marks the first one only, for each of them (static handlers of RRef::handleError)")
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_each_rref_whose_creation_timed_out_says_so(to: str) -> None:
    with Group(2) as group:
        group[0].run(create_rrefs_too_late, to)


def create_rref_too_late_and_wait_for_it() -> None:
    """As its owner, who waits for the value itself and not for a call."""
    with pytest.raises(RuntimeError, match="has not answered|timed out"):
        rpc.remote("worker0", f.sleep, args=(2.0,), timeout=0.5).to_here()


@needs_ucx("waits for ever")
def test_whoever_waits_for_an_rref_of_its_own_hears_that_its_creation_timed_out() -> None:
    with Group(1) as group:
        group[0].run(create_rref_too_late_and_wait_for_it)
        group.close(gently=False)


LATER = threading.Event()


def value_later() -> int:
    assert LATER.wait(60)
    return 7


def pass_on_before_the_time_out() -> None:
    rref = rpc.remote("worker0", value_later, timeout=2.0)
    fetched = rpc.rpc_async("worker1", fetch, args=(rref,), timeout=60)
    with pytest.raises(RuntimeError):
        rref._get_future().wait()
    LATER.set()
    assert fetched.wait() == 7


def test_whoever_else_has_an_rref_whose_creation_timed_out_gets_its_value() -> None:
    with Group(2) as group:
        group[0].run(pass_on_before_the_time_out)
        group.close(gently=False)


def create_rrefs_beside_calls() -> None:
    """As where a handler of signals makes a call right after rpc.remote() has made its own."""
    native: Any = loader.load()
    watch_creation, calls = native.watch_creation, []

    def call_and_watch(timeout: float) -> Any:
        def watch(rref: Any) -> None:
            calls.append(rpc.rpc_async("worker1", f.sleep, args=(0.5,), timeout=timeout))
            watch_creation(rref)

        return watch

    try:
        native.watch_creation = call_and_watch(0.05)
        good = rpc.remote("worker1", f.sleep, args=(0.3,))
        native.watch_creation = call_and_watch(0)
        late = rpc.remote("worker1", f.sleep, args=(0.5,), timeout=0.05)
    finally:
        native.watch_creation = watch_creation
    with pytest.raises(RuntimeError, match="has not answered"):
        calls[0].wait()
    calls[1].wait()
    assert good.to_here() == 0.3
    with pytest.raises(RuntimeError, match="timed out"):
        late.to_here()


@needs_ucx("marks no RRef")
def test_the_rref_of_the_call_that_failed_is_marked() -> None:
    with Group(2) as group:
        group[0].run(create_rrefs_beside_calls)
        group.close(gently=False)


def lose_the_owner(pid: int) -> list[Any]:
    rrefs = [rpc.remote("worker1", f.sleep, args=(60,)) for _ in range(2)]
    rpc.rpc_sync("worker1", f.nothing)  # worker1 has the requests before this one
    os.kill(pid, signal.SIGKILL)
    for use in (
        lambda: rrefs[0].to_here(),
        lambda: rrefs[0].rpc_sync().is_integer(),
        lambda: rpc.rpc_sync("worker2", fetch, args=(rrefs[1],)),
    ):
        with pytest.raises(errors.PeerLostError, match='"worker1" failed .*died') as lost:
            use()
        assert lost.value.worker == "worker1"
    return rrefs


def lose_the_owner_and_drop_the_rrefs(pid: int) -> None:
    rrefs = lose_the_owner(pid)
    rrefs.clear()
    gc.collect()  # pytest's record of an error refers to the frames of the error
    # torch would tell the owner again and again for 9 s.
    assert rpc._get_debug_info()["num_pending_futures"] == "0"


@needs_ucx('says "timed out", and not who died')
def test_rrefs_whose_owner_died_before_they_were_there_say_so() -> None:
    with Group(3) as group:
        group[1].killed = True
        group[0].run(lose_the_owner_and_drop_the_rrefs, group[1].child.process.pid)
        group.close(gently=False)


def lose_an_rref() -> None:
    rref = rpc.remote("worker1", f.kill_self)
    with pytest.raises(RuntimeError):
        rref.to_here()


@needs_ucx("an RRef that was never confirmed is waited for")
def test_leaving_after_an_rref_failed_is_quick() -> None:
    with Group(2, dynamic=True) as group:
        group[1].killed = True
        group[0].run(lose_an_rref)
        start = time.monotonic()
        group[0].run(rpc.shutdown)
        assert time.monotonic() - start < 60  # torch waits for 100 s
