"""How a worker of a static group that died comes back to it: docs/decisions/0009-return.md.

A worker's place is a key of the store for its rank, which holds the id of the worker's group. Only
a graceful shutdown empties the place. So a worker that finds its place filled at its start was
killed or crashed before; the members of the group say whether the group still exists.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.distributed.rpc import api as _untyped_api

from torch_rpc_ext import errors
from torch_rpc_ext._calls import failures
from torch_rpc_ext._group import dynamic, sessions
from torch_rpc_ext._group.members import Member, host_identity, is_alive, validate
from torch_rpc_ext._group.rendezvous import PREFIX, Group, read_group
from torch_rpc_ext._group.stores import Deadline, poll

logger = logging.getLogger(__name__)
api: Any = _untyped_api  # upstream's functions have no types

_TRIES = 1000
# How long to wait for a member's answer, s, in addition to the time that the member may need to
# see whether the former process is dead.
_PATIENCE = 10.0
_WELCOME, _ENDED = "welcome", "ended"

# (pid, incarnation) of this process's earlier sessions: it does not return to a group that it left.
_former_selves: set[tuple[int, str]] = set()


class Place:
    """The place of one rank in the store.

    Args:
        store: the group's store.
        rank: of the worker.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self._rank = rank

    def take(self, group: bytes, me: Member) -> None:
        """Note the group that this worker is in."""
        _former_selves.add((os.getpid(), me.incarnation))
        self.store.set(self._key(), group.hex())

    def empty(self) -> None:
        """Note that the group has ended. Never fails."""
        with contextlib.suppress(RuntimeError):
            self.store.set(self._key(), "")

    def group(self) -> str:
        """Return the id of the group, '' for none."""
        if not self.store.check([self._key()]):
            return ""
        return str(self.store.get(self._key()).decode())

    def _key(self) -> str:
        return f"{PREFIX}/place/{self._rank}"


class Standing(NamedTuple):
    """A group that a worker may come back to.

    Attributes:
        group: the group before this worker comes back.
        former: this worker's former self in the group.
    """

    group: Group
    former: Member

    def others(self) -> list[str]:
        """Return the names of the members that may be alive."""
        here = host_identity()
        return [
            member.name
            for member in self.group.members.values()
            if member.name != self.former.name and (member.host != here or is_alive(member.pid))
        ]


def find(place: Place, name: str, rank: int, world_size: int) -> Standing | None:
    """Look for a group that this worker was in and of which a member may be alive.

    Args:
        place: of the worker's rank.
        name, rank, world_size: as given to init_rpc.

    Returns:
        The group, or None where a new one is to be formed.
    """
    group_id = place.group()
    if not group_id:
        return None
    group = read_group(place.store, group_id)
    members = {**group.members, **_returned(place.store, group_id)}
    former = members.get(name)
    if former is None or (former.rank, former.world_size) != (rank, world_size):
        return None
    if (os.getpid(), former.incarnation) in _former_selves:
        return None
    standing = Standing(group._replace(members=members), former)
    return standing if standing.others() else None


def with_new_life(place: Place, standing: Standing, me: Member) -> Group | None:
    """Return the group with this worker in the place of its former life.

    Args:
        place: of the worker's rank.
        standing: what find() returned.
        me: the worker.

    Returns:
        The group, or None where the worker does not fit into it; the log says why.
    """
    group = standing.group
    life = int(place.store.add(f"{PREFIX}/life/{group.id.hex()}", 1))
    members = {**group.members, me.name: me._replace(life=life)}
    try:
        validate(list(members.values()), is_static=True)
    except (RuntimeError, ValueError) as problem:
        logger.warning(
            "worker %s cannot come back to its group, and waits for a new one: %s", me.name, problem
        )
        return None
    return group._replace(members=members)


def come_back(session: sessions.Session, standing: Standing) -> bool:
    """Enter the group again.

    Args:
        session: the session whose agent runs in that group.
        standing: what find() returned.

    Returns:
        False where no member of the group answers.

    Raises:
        RefusedError: the former process is alive, or another process has taken its place already.
    """
    me, former = session.me, standing.former
    said = _ask(standing.others(), may_return, me, _PATIENCE + _time_to_notice(session))
    for text in said.values():
        if text not in (_WELCOME, _ENDED):
            raise errors.RefusedError(text, worker=me.name)
    if _WELCOME not in said.values():
        return False
    if former.host == me.host and former.pid != me.pid and is_alive(former.pid):
        raise errors.RefusedError(_taken(former), worker=me.name)
    for member in _enter(session, standing.former).values():
        dynamic.add_member(session, member)
    with session.lock:
        others = [name for name in session.members if name != me.name]
    _adopt_counts(_ask(others, member_returned, me, _PATIENCE))
    logger.info("worker %s (rank %d) has come back to its group", me.name, me.rank)
    return True


def may_return(text: str) -> str:
    """Say whether a worker may come back. Called by that worker over RPC.

    Args:
        text: the worker, as Member.to_json() writes it.

    Returns:
        'welcome'; 'ended' where this group is at its end; or the reason why it may not.

    Raises:
        RefusedError: the caller is another worker.
    """
    session = sessions.require()
    member = Member.from_json(text)
    dynamic.check_speaks_for(member.name)
    former = session.members.get(member.name)
    if session.all_done or former is None:
        return _ENDED
    return _WELCOME if _is_dead(session, former, member) else _taken(former)


def member_returned(text: str) -> dict[str, int]:
    """Note that a worker has come back. Called by that worker over RPC.

    Args:
        text: the worker, as Member.to_json() writes it.

    Returns:
        For each set of workers that has called upstream's _all_gather: how many times. A call that
        waits for other workers now is not counted, because the returned worker has to be in it.

    Raises:
        RefusedError: the caller is another worker, or no such worker was in this group.
    """
    session, member = sessions.require(), Member.from_json(text)
    dynamic.check_speaks_for(member.name)
    former = session.members.get(member.name)
    if session.directory is not None or former is None or former.rank != member.rank:
        raise errors.RefusedError(
            f"Worker {member.name} (rank {member.rank}) was not in {session.me.name}'s group, so "
            "it cannot come back to it.",
            worker=member.name,
        )
    dynamic.add_member(session, member)
    with api._all_gather_dict_lock:
        counts = dict(api._all_gather_sequence_id)
        for states in api._all_gather_sequence_id_to_states.values():
            if not states.proceed_signal.is_set():
                # The former life waits no more, and upstream refuses to note a worker twice.
                states.gathered_objects.pop(member.name, None)
        for names, count in counts.items():
            states = api._all_gather_sequence_id_to_states.get(f"{names}{count - 1}")
            if states is not None and member.name not in states.gathered_objects:
                counts[names] = count - 1
    return counts


def _is_dead(session: sessions.Session, former: Member, member: Member) -> bool:
    if former.host == member.host:
        return True  # the returned worker is on that host and has checked this itself
    if former.host == session.me.host:
        return not is_alive(former.pid)
    agent = session.agent

    def is_lost() -> bool:
        with contextlib.suppress(RuntimeError):
            agent.watch(former.rank)
        return former.name in agent.lost_workers()

    return poll(is_lost, Deadline(_time_to_notice(session)))


def _time_to_notice(session: sessions.Session) -> float:
    """Return how long it may take until a worker notices that a host is gone, s."""
    return 2 * session.options.keepalive + 1


def _taken(former: Member) -> str:
    return (
        f"Worker {former.name} (rank {former.rank}, pid {former.pid} on "
        f"{former.host.split('/')[0]}) of the running group is alive, so another process cannot "
        "take its place. End it first, or give this one a rank and a group of its own."
    )


def _returned(store: Any, group_id: str) -> dict[str, Member]:
    """Return the members that have come back, by name."""
    key = _returned_key(group_id)
    if not store.check([key]):
        return {}
    return _parse(store.get(key).decode())


def _returned_key(group_id: str) -> str:
    return f"{PREFIX}/returned/{group_id}"


def _parse(text: str) -> dict[str, Member]:
    entries = [Member.from_json(entry) for entry in json.loads(text or "[]")]
    return {member.name: member for member in entries}


def _enter(session: sessions.Session, former: Member) -> dict[str, Member]:
    """Add this worker to the members that have come back; return the others of these."""
    me, store = session.me, session.place.store
    key = _returned_key(session.agent.group_id.hex())
    before = ""
    for _ in range(_TRIES):
        members = _parse(before)
        there = members.get(me.name)
        if there is not None and there.incarnation != former.incarnation:
            raise errors.RefusedError(_taken(there), worker=me.name)
        members[me.name] = me
        after = json.dumps([member.to_json() for member in members.values()])
        before_now = store.compare_set(key, before, after).decode()
        if before_now == after:
            del members[me.name]
            return members
        before = before_now
    raise errors.RpcError(f"Too many workers come back to the group of {me.name} at once.")


def _ask(names: Iterable[str], function: Any, me: Member, timeout: float) -> dict[str, Any]:
    """Call several workers; return name -> answer of the workers that answer."""
    futures: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for name in names:
        with contextlib.suppress(RuntimeError):
            futures[name] = api.rpc_async(name, function, args=(me.to_json(),), timeout=timeout)
    for name, future in futures.items():
        try:
            answers[name] = future.wait()
        except Exception as error:  # noqa: BLE001  a worker may answer with any error
            if function is member_returned:
                dynamic.tell_again(error, name, function, (me.to_json(),))
            brief = failures.brief(error)
            logger.debug("worker %s did not reach %s: %s", me.name, name, brief)
    return answers


def _adopt_counts(answers: dict[str, dict[str, int]]) -> None:
    """Take over the other workers' counts of _all_gather, so that the next call meets theirs."""
    merged: dict[str, int] = {}
    # The worker whose name sorts first leads upstream's gathering, so its count wins.
    for name in sorted(answers):
        merged = {**answers[name], **merged}
    with api._all_gather_dict_lock:
        api._all_gather_sequence_id.update(merged)
