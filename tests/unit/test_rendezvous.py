"""How workers meet through the store, with threads as workers and no agent."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from torch_rpc_ext import errors
from torch_rpc_ext._group.dynamic import Directory
from torch_rpc_ext._group.members import Member, host_identity, validate
from torch_rpc_ext._group.rendezvous import PREFIX, Group, Rendezvous, claim_kind
from torch_rpc_ext._group.store_opening import open_tcp

Stores = Callable[[], Any]
_serial = itertools.count()


@pytest.fixture(params=["file", "hash", "tcp"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """Returns a function that opens the same store anew, as each process does."""
    if request.param == "file":
        return lambda: dist.PrefixStore("a", dist.FileStore(str(tmp_path / "store")))
    if request.param == "hash":
        shared = dist.HashStore()
        return lambda: dist.PrefixStore("a", shared)
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    port = server.port

    def client(_: Any = server) -> Any:
        return dist.PrefixStore(
            "a", dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), False)
        )

    return client


def member(rank: int, name: str = "", **given: Any) -> Member:
    """A worker; each as if on a host of its own."""
    fields: dict[str, Any] = {
        "name": name or f"worker{rank}",
        "rank": rank,
        "address": bytes([rank, 0, 255]),
        "world_size": None,
        "device_count": 0,
        "device_maps": {},
        "devices": [],
        "wire": 1,
        "incarnation": f"{next(_serial)}",
        "host": f"elsewhere{rank}",
        "pid": os.getpid(),
    }
    return Member(**{**fields, **given})


def meet(store: Any, me: Member, world_size: int, seconds: float = 10) -> Group:
    """The whole of it, as _lifecycle/starting.py does it."""
    meeting = Rendezvous(store, me.name, me.rank, world_size, seconds)
    try:
        group = meeting.join(me._replace(world_size=world_size))
        meeting.confirm_start()
    except BaseException as problem:
        meeting.fail(problem)
        raise
    return group


def at_once(stores: Stores, members: list[Member], world_size: int, **given: Any) -> list[Any]:
    """Let all meet; a group, or the error, for each."""
    opened = [stores() for _ in members]  # takes time, which is not the meeting's
    with ThreadPoolExecutor(len(members)) as pool:
        futures: list[Future[Group]] = [
            pool.submit(meet, store, me, world_size, **given)
            for store, me in zip(opened, members, strict=True)
        ]
        return [future.exception() or future.result() for future in futures]


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def wait_for_entry(stores: Stores, rank: int) -> None:
    """Wait until a rank has its entry in the store."""
    store = stores()
    wait_until(lambda: store.check([f"{PREFIX}/rank/{rank}"]), f"rank {rank} does not come")


def test_all_see_the_same_group(stores: Stores) -> None:
    groups = at_once(stores, [member(rank) for rank in range(5)], 5)
    assert len({group.id for group in groups}) == 1 and len(groups[0].id) == 16
    for group in groups:
        assert list(group.members) == [f"worker{rank}" for rank in range(5)]
        assert group.members["worker3"].address == bytes([3, 0, 255])


def test_one_store_serves_group_after_group(stores: Stores) -> None:
    ids = set()
    for ranks in ([0, 1, 2], [2, 0, 1], [1, 0], [0], [0, 1, 2]):
        groups = at_once(stores, [member(rank) for rank in ranks], len(ranks))
        assert {type(group) for group in groups} == {Group}, groups
        ids.add(groups[0].id)
    assert len(ids) == 5


def test_time_out_names_the_missing(stores: Stores) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(meet, stores(), member(2), 4, 60)  # rank 0 tells it the end
        wait_for_entry(stores, 2)
        begin = time.monotonic()
        problems = [*at_once(stores, [member(0)], 4, seconds=0.5), waiting.exception()]
    assert time.monotonic() - begin < 30
    for problem in problems:
        assert isinstance(problem, errors.RpcError)
        assert "rank(s) 1, 3 of 4 have not joined" in str(problem)
        assert "init_timeout" in str(problem)
    # Nothing of it stays in the way.
    assert len(at_once(stores, [member(rank) for rank in range(2)], 2)[0].members) == 2


def test_time_out_without_rank_0(stores: Stores) -> None:
    problem = at_once(stores, [member(1)], 3, seconds=0.3)[0]
    assert "rank(s) 0, 2 of 3" in str(problem)


class Watched:
    """A store that notes which keys somebody has looked at."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        there = bool(self._store.check(keys))
        if not there:  # else it gets the key next
            self._seen += keys
        return there

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._seen.append(key)
        return value

    def wait_until_seen(self, beginning: str) -> None:
        wait_until(
            lambda: any(key.startswith(beginning) for key in self._seen[:]),
            f"nobody looks at {beginning}",
        )


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_one_fails_all_at_once(failing: int, stores: Stores) -> None:
    others = [rank for rank in range(3) if rank != failing]
    for _ in range(2):  # the second time the first failure of rank 0 is still in the store
        begin = time.monotonic()
        with ThreadPoolExecutor() as pool:
            watched = {rank: Watched(stores()) for rank in others}
            waiting = [pool.submit(meet, watched[rank], member(rank), 3, 60) for rank in others]
            if failing == 0:
                # They know what rank 0 has left in the store by now: what follows is news.
                for rank in others:
                    watched[rank].wait_until_seen(f"{PREFIX}/rank/0")
            else:
                watched[2].wait_until_seen(f"{PREFIX}/group/")  # rank 0 has taken it
            broken = Rendezvous(stores(), f"worker{failing}", failing, 3, 60)
            broken.fail(ValueError("no such interface"))
            for future in waiting:
                with pytest.raises(
                    errors.RpcError, match=rf"worker{failing} \(rank {failing}\).*no such interface"
                ):
                    future.result()
        assert time.monotonic() - begin < 30
    groups = at_once(stores, [member(rank) for rank in range(3)], 3)
    assert {type(group) for group in groups} == {Group}, groups


def test_who_comes_after_the_failure_of_rank_0_hears_of_it_at_the_end(stores: Stores) -> None:
    Rendezvous(stores(), "worker0", 0, 2, 20).fail(ValueError("no such interface"))
    with pytest.raises(errors.RpcError, match=r"rank\(s\) 0 of 2 have not.*no such interface"):
        meet(stores(), member(1), 2, seconds=1)


def test_failure_after_joining(stores: Stores) -> None:
    def fails(rank: int) -> None:
        meeting = Rendezvous(stores(), f"worker{rank}", rank, 3, 20)
        meeting.join(member(rank, world_size=3))
        if rank == 1:
            meeting.fail(RuntimeError("its agent broke"))
        else:
            meeting.confirm_start()

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(fails, rank) for rank in range(3)]
        for future in (futures[0], futures[2]):
            with pytest.raises(errors.RpcError, match="its agent broke"):
                future.result()


def test_names_must_be_unique(stores: Stores) -> None:
    for problem in at_once(stores, [member(0, "twin"), member(1, "twin")], 2):
        assert isinstance(problem, errors.RpcError)
        assert "RPC worker name twin is not unique" in str(problem)


def test_rank_must_be_unique(stores: Stores) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, stores(), member(1), 2)
        wait_for_entry(stores, 1)
        with pytest.raises(errors.RefusedError, match="Rank 1 is not unique: worker worker1"):
            meet(stores(), member(1, host="third"), 2)
        meet(stores(), member(0), 2)
        assert "worker1" in first.result().members


def test_second_process_of_a_rank_after_the_first_was_taken(stores: Stores) -> None:
    with ThreadPoolExecutor() as pool:
        first = Rendezvous(stores(), "worker1", 1, 3, 10)
        waiting = [
            pool.submit(meet, stores(), member(0), 3),
            pool.submit(first.join, member(1, world_size=3)),
        ]
        wait_until(lambda: first._id != "", "rank 1 is not taken")
        waiting.append(pool.submit(meet, stores(), member(1, "twin", host="third"), 3))
        for future in waiting:
            with pytest.raises(errors.RpcError, match=r"Rank 1 is not unique.*worker1.*twin"):
                future.result()


def test_entry_of_a_dead_process_is_replaced(stores: Stores) -> None:
    dead = member(1, host=host_identity(), pid=2**22 + 1)
    with pytest.raises(errors.RpcError, match="have not joined"):
        Rendezvous(stores(), "worker1", 1, 2, 0.1).join(dead)
    alive = member(1, host=host_identity(), pid=os.getpid())
    zero = member(0, host=host_identity(), pid=os.getpid())
    assert isinstance(at_once(stores, [zero, alive], 2)[1], Group)


@pytest.mark.parametrize(
    ("change", "text"),
    [({"wire": 9, "package": "9.9"}, "wire version 9"), ({"world_size": 7}, "world_size=7")],
)
def test_members_must_agree(change: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.RpcError, match=text):
        validate([member(0), member(1, **change)], is_static=True)


def test_device_maps_are_upstreams(stores: Stores) -> None:
    cuda = [torch.device("cuda", index) for index in range(2)]
    good = member(0, device_count=2, device_maps={"worker1": {cuda[0]: cuda[1]}})
    groups = at_once(stores, [good, member(1, device_count=2)], 2)
    assert groups[1].members["worker0"].device_maps == {"worker1": {cuda[0]: cuda[1]}}
    bad = member(0, device_count=2, device_maps={"nobody": {cuda[0]: cuda[1]}})
    for problem in at_once(stores, [bad, member(1, device_count=2)], 2):
        assert isinstance(problem, ValueError)
        assert "invalid target node names in its device maps" in str(problem)


def test_static_and_dynamic_do_not_mix(stores: Stores) -> None:
    claim_kind(stores(), is_static=True)
    claim_kind(stores(), is_static=True)
    with pytest.raises(RuntimeError, match="RPC group mixes statically and dynamically"):
        claim_kind(stores(), is_static=False)


def test_foreign_entry_is_refused() -> None:
    for text in ("", "x", "{}", "[]", '{"name": 1}'):
        with pytest.raises(errors.RpcError, match="torch_rpc_ext did not write"):
            Member.from_json(text)


def test_ctrl_c_gets_through(stores: Stores) -> None:
    sent = []

    def interrupt() -> None:
        wait_for_entry(stores, 0)  # not before it waits: it would end the whole run
        time.sleep(0.3)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        meet(stores(), member(0), 2)
    assert time.monotonic() - sent[0] < 8
    thread.join()


def test_directory(stores: Stores) -> None:
    first = Directory(stores()).join(member(0), b"first")
    second = Directory(stores()).join(member(1), b"second")
    assert first.id == second.id == b"first"
    assert list(second.members) == ["worker0", "worker1"]
    Directory(stores()).leave(second.members["worker1"])
    assert list(Directory(stores()).read().members) == ["worker0"]
    Directory(stores()).leave(first.members["worker0"])
    assert Directory(stores()).join(member(5), b"third").id == b"third"


def test_directory_all_at_once(stores: Stores) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rank: Directory(stores()).join(member(rank), b"id"), range(8)))
    assert len(Directory(stores()).read().members) == 8


def test_a_worker_comes_back_under_its_name(stores: Stores) -> None:
    directory = Directory(stores())
    directory.join(member(0), b"id")
    directory.join(member(1), b"id")
    back = member(1, address=b"new")
    joined = directory.join(back, b"id").members["worker1"]
    assert joined == back._replace(life=3)  # the third that came
    directory.leave(member(1))  # an earlier incarnation, late
    assert "worker1" in directory.read().members


def test_a_living_worker_keeps_its_name_and_rank(stores: Stores) -> None:
    directory = Directory(stores())
    living = {"host": host_identity(), "pid": os.getppid()}
    directory.join(member(1, **living), b"id")
    newcomer = {"host": host_identity(), "pid": os.getpid()}
    with pytest.raises(errors.RefusedError, match="name worker1 is not unique"):
        directory.join(member(2, "worker1", **newcomer), b"id")
    with pytest.raises(errors.RefusedError, match="Rank 1 is not unique"):
        directory.join(member(1, "other", **newcomer), b"id")
    with pytest.raises(errors.RpcError, match="Rank 1 is not unique"):
        directory.join(member(1, "other"), b"id")


def test_open_tcp_is_bounded_and_says_where() -> None:
    with pytest.raises(errors.RpcError, match=r"no store answers at 127\.0\.0\.1:1 .*Rank 0"):
        open_tcp("127.0.0.1", 1, 1, 2, 0.3)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "x" * 64])
@pytest.mark.parametrize("rank", [0, 1])
def test_open_tcp_at_a_host_that_is_none(host: str, rank: int) -> None:
    with pytest.raises(errors.RpcError, match=f"{host}.*MASTER_ADDR"):
        open_tcp(host, 0 if rank == 0 else 1, rank, 2, 1.0)


def test_open_tcp_used_port() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), False)
    with pytest.raises(errors.RpcError, match="Address already in use"):
        open_tcp("127.0.0.1", server.port, 0, 2, 0.3)


def test_open_tcp_does_not_wait_for_workers() -> None:
    begin = time.monotonic()
    server = open_tcp("127.0.0.1", 0, 0, 4, 20)
    client = open_tcp("127.0.0.1", server.port, 1, 4, 20)
    client.set("a", "b")
    assert server.get("a") == b"b" and time.monotonic() - begin < 15
