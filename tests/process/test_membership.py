"""Only a worker itself may say that it has joined, left or come back, and no other worker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("tells of its members in its own way")


#: What the refusals say. An allow-list refuses with an error of the same class, but other words.
ANOTHER = "spoke of the membership of worker"
STATIC = "static group"
NO_INCARNATION = "is no incarnation of worker"


def refused(words: str, function: Callable[..., Any], *args: Any) -> None:
    from torch_rpc_ext.errors import RefusedError

    with pytest.raises(RefusedError, match=words):
        rpc.rpc_sync("worker1", function, args=args, timeout=20)


def lie(name: str, *, is_static: bool = False) -> None:
    """Claim that another worker has joined, come back or left."""
    from torch_rpc_ext._group import dynamic, returning, sessions

    session = sessions.require()
    fields = json.loads(session.members[name].to_json())
    text = json.dumps({**fields, "life": 1000, "address": ""})
    refused(STATIC if is_static else ANOTHER, dynamic.member_joined, text)
    refused(ANOTHER, returning.member_returned, text)
    refused(ANOTHER, returning.may_return, text)
    left = fields["incarnation"]
    refused(STATIC if is_static else ANOTHER, dynamic.member_left, name, left)
    for none in ("", None, 0):
        refused(STATIC if is_static else NO_INCARNATION, dynamic.member_left, name, none)


def reach(name: str) -> None:
    assert rpc.rpc_sync(name, torch.add, args=(torch.ones(1), 1), timeout=20).item() == 2


@workers(3, options={"allow_list": ["torch.add"]})
def test_a_static_group_does_not_change() -> None:
    from torch_rpc_ext._group import dynamic, sessions

    # Claims about the attacker itself are refused too: no worker joins or leaves a static group.
    me = sessions.require().me
    again = json.dumps({**json.loads(me.to_json()), "life": 1000})
    refused(STATIC, dynamic.member_joined, again)
    refused(STATIC, dynamic.member_left, me.name, me.incarnation)
    stranger = json.dumps({**json.loads(me.to_json()), "name": "worker9", "rank": 9})
    refused(STATIC, dynamic.member_joined, stranger)
    lie("worker2", is_static=True)
    reach("worker2")


def test_a_worker_itself_says_that_it_comes_back() -> None:
    """The allow-list need not name what a worker calls in order to come back."""
    with Group(3, options={"allow_list": ["torch.add"]}) as group:
        group[1].kill()
        again = group.start_again(1)
        for rank in (0, 2):
            # An allow-list that refused may_return or member_returned would leave this worker out
            # of the group, or the other workers with the address of its former life.
            again.run(reach, f"worker{rank}")
            group[rank].run(reach, "worker1")


def lie_of_itself(victim: str) -> None:
    """Join once more, with fields of a member that nobody can be."""
    from torch_rpc_ext._group import dynamic, sessions
    from torch_rpc_ext.errors import RpcError

    session = sessions.require()
    fields = {**json.loads(session.me.to_json()), "life": 1000}
    for forged, error in (
        ({"rank": session.members[victim].rank}, RpcError),  # what is sent to it would come here
        ({"rank": 1 << 15}, RpcError),
        ({"rank": -1}, RpcError),
        ({"life": 1 << 23}, RpcError),
        ({"wire": 0}, RpcError),
        ({"world_size": 3}, RpcError),
        ({"device_maps": {"worker1": {"cuda:0": "cuda:7"}}}, ValueError),
    ):
        with pytest.raises(error):
            text = json.dumps({**fields, **forged})
            rpc.rpc_sync("worker1", dynamic.member_joined, args=(text,), timeout=20)


def ranks() -> dict[str, int]:
    from torch_rpc_ext._group import sessions

    return {name: member.rank for name, member in sessions.require().members.items()}


def test_who_joins_takes_nobodys_place() -> None:
    with Group(3, options={"allow_list": ["torch.add"]}, dynamic=True) as group:
        before = group[1].run(ranks)
        group.run(lie_of_itself, "worker2")
        assert group[1].run(ranks) == before
        group[1].run(reach, "worker2")
        group[1].run(reach, "worker0")


def take_rank(rank: int, life: int) -> None:
    """Tell worker0 that this worker has joined with another rank."""
    from torch_rpc_ext._group import dynamic, sessions

    fields = {**json.loads(sessions.require().me.to_json()), "life": life, "rank": rank}
    with contextlib.suppress(RuntimeError):  # worker0 ends the connection to the former life
        rpc.rpc_sync("worker0", dynamic.member_joined, args=(json.dumps(fields),), timeout=20)


@pytest.mark.parametrize("life", [3, 1000])
def test_a_member_that_has_taken_a_rank_gives_way_to_its_owner(life: int) -> None:
    with Group(2, options={"allow_list": ["torch.add"]}, dynamic=True) as group:
        group[1].run(take_rank, 7, life)
        # Unless worker0 has read the directory already: that names worker1 with its own rank.
        assert group.run(ranks).get("worker1", 7) in (1, 7)
        owner = group.add("owner", 7, allow_list=["torch.add"])
        after = group.run(ranks)
        assert after.pop("worker1", 1) == 1
        assert after == {"worker0": 0, "owner": 7}
        group.run(reach, "owner")
        owner.run(reach, "worker0")
        for worker in (group[1], owner, group[0]):
            worker.run(rpc.shutdown)


def test_only_who_joins_or_leaves_says_so() -> None:
    with Group(3, options={"allow_list": ["torch.add"]}, dynamic=True) as group:
        group.run(lie, "worker2")
        group[1].run(reach, "worker2")
        # worker2 itself leaves, and the others accept that.
        group[2].run(rpc.shutdown)
        for rank in (0, 1):
            assert group[rank].run(names) == ["worker0", "worker1"]
        for rank in (0, 1):
            group[rank].run(rpc.shutdown)


def fail_at_each_notice() -> None:
    """Answer each notice of a join, leave or return with a ValueError, once it is noted."""
    from torch_rpc_ext._group import dynamic, returning

    for module, name in (
        (dynamic, "member_joined"),
        (dynamic, "member_left"),
        (returning, "member_returned"),
    ):
        setattr(module, name, _and_fail(getattr(module, name)))


def _and_fail(note: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> None:
        note(*args)
        raise ValueError("\x1b[31mno room")

    return noted


def test_one_that_answers_with_another_error_keeps_nobody_from_joining_or_leaving() -> None:
    with Group(2, dynamic=True, init=False) as group:
        group[0].init(None).result()
        group.run(fail_at_each_notice)
        group[1].init(None).result()
        assert group.run(names) == ["worker0", "worker1"]
        group[1].run(rpc.shutdown)
        assert group.run(names) == ["worker0"]
        group.run(rpc.shutdown)
        said = group[1].child.output()
        assert "worker0 (ValueError: \\x1b[31mno room)" in said
        assert "\x1b" not in said


def test_one_that_answers_with_another_error_keeps_nobody_from_coming_back() -> None:
    with Group(3) as group:
        group.run(fail_at_each_notice)
        group[1].kill()
        again = group.start_again(1)
        for rank in (0, 2):
            again.run(reach, f"worker{rank}")
            group[rank].run(reach, "worker1")


def names() -> list[str]:
    from torch_rpc_ext._group import sessions

    return sorted(sessions.require().members)
