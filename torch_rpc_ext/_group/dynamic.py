"""Dynamic groups (world_size=None): workers that join and leave while others work.

The directory of members is one key of the store, changed by compare-and-set. So a worker that dies
while it joins holds no lock; in upstream the others would wait for its token. A worker first writes
itself into the directory and then tells all workers that it saw there: of two workers that join at
the same time, the later one sees the earlier one. Last the newcomer reads the directory once more
and drops who has left: such a worker may never have heard of the newcomer. A worker that leaves
later has heard of the newcomer, and tells it.

A busy worker hears of a newcomer when it has a free thread. By then the newcomer may have left, so
the busy worker reads the directory. Of one that leaves, a busy worker may never be told, because no
worker serves a request of a caller that is gone. The goodbye that ends the connection makes the
busy worker read the directory (events.follow_members()).
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Iterable
from typing import Any

from torch.distributed.rpc import api as _untyped_api

from torch_rpc_ext import errors
from torch_rpc_ext._calls import current_call, failures
from torch_rpc_ext._group import sessions, stores
from torch_rpc_ext._group.members import Member, device_tables, is_alive, prepare_devices, validate
from torch_rpc_ext._group.rendezvous import PREFIX, Group
from torch_rpc_ext._group.stores import describe
from torch_rpc_ext._security import group_secret

logger = logging.getLogger(__name__)
api: Any = _untyped_api  # upstream's functions have no types

_KEY = f"{PREFIX}/directory"
_TRIES = 1000
# How long a worker waits until another one has noted a join or leave, s. A stopped, dead or busy
# worker must not hold up the others.
_NOTICE_TIMEOUT = 10.0
# How long a worker that leaves without a word waits for the store, s.
_QUIET_LEAVE_TIMEOUT = 2.0


class Directory:
    """The group's members, as the store has them.

    Args:
        store: the group's store.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def join(self, me: Member, new_id: bytes) -> Group:
        """Enter a worker; replace a dead worker of the same name.

        Args:
            me: the worker.
            new_id: the group's id, used if this worker is the first of the group.

        Raises:
            RpcError: the name or rank belongs to a living worker, or the wire versions differ.
            ValueError: the device maps do not fit those of the other workers.
        """
        for _ in range(_TRIES):
            before = self._read_text()
            group = _parse(before)
            members = group.members
            if not members:
                group = group._replace(id=new_id, secret=group_secret.draw())
            _evict_dead_twins(me, members)
            # The group's count of lives stays in the store when all have left, so that no life
            # comes twice.
            group = group._replace(lives=group.lives + 1)
            members[me.name] = me._replace(life=group.lives)
            # The members are in the order of joining, so an error names the newcomer, the last.
            validate(list(members.values()), is_static=False)
            if self._swap(before, group):
                return group
        raise errors.RpcError(f"Too many workers change the group at {describe(self._store)}.")

    def leave(self, me: Member) -> None:
        """Take a worker out, unless it has been started again and has joined already."""
        for _ in range(_TRIES):
            before = self._read_text()
            group = _parse(before)
            there = group.members.get(me.name)
            if there is None or there.incarnation != me.incarnation:
                return
            del group.members[me.name]
            if self._swap(before, group):
                return

    def leave_within(self, seconds: float, me: Member) -> None:
        """As leave(). Raises TimeoutError where the store takes longer than this."""
        store = self._store
        if isinstance(store, stores.Answering):
            # Its own limit is longer, and is for each operation.
            store = store.store
        stores.within(seconds, lambda: Directory(store).leave(me))

    def read(self) -> Group:
        """Return the group as it is now."""
        return _parse(self._read_text())

    def _read_text(self) -> str:
        if not self._store.check([_KEY]):
            return ""
        return str(self._store.get(_KEY).decode())

    def _swap(self, before: str, group: Group) -> bool:
        after = json.dumps(
            {
                "group": base64.b64encode(group.id).decode(),
                "secret": base64.b64encode(group.secret).decode(),
                "lives": group.lives,
                "members": [member.to_json() for member in group.members.values()],
            }
        )
        return bool(self._store.compare_set(_KEY, before, after).decode() == after)


def _parse(text: str) -> Group:
    if not text:
        return Group(b"", {}, b"")
    fields = json.loads(text)
    members = [Member.from_json(entry) for entry in fields["members"]]
    return Group(
        base64.b64decode(fields["group"]),
        {member.name: member for member in members},
        base64.b64decode(fields["secret"]),
        int(fields["lives"]),
    )


def _evict_dead_twins(me: Member, members: dict[str, Member]) -> None:
    """Drop the members that `me` replaces; raise where such a member is alive."""
    for other in list(members.values()):
        if other.name != me.name and other.rank != me.rank:
            continue
        same_name = other.name == me.name
        if other.host == me.host and other.pid != me.pid:
            if not is_alive(other.pid):
                del members[other.name]
                continue
            what = f"RPC worker name {me.name}" if same_name else f"Rank {me.rank}"
            raise errors.RefusedError(
                f"{what} is not unique: worker {other.name} (rank {other.rank}, pid {other.pid}) "
                "of this group has it and is alive. Choose another.",
                worker=other.name,
            )
        # Here the other is this very process, which joins once more, or a worker on another host,
        # of which this host cannot see whether it lives. A worker that comes back under its name is
        # welcome; another name with the same rank is a mistake, which validate() refuses.
        if same_name or other.host == me.host:
            del members[other.name]


def announce_join(session: sessions.Session) -> None:
    """Tell the other workers that this worker has joined; its agent must run."""
    text = session.me.to_json()
    _notify(session, _others(session), member_joined, (text,), quiet=False)
    # A worker that left meanwhile may not have known this worker, and then told it nothing.
    drop_departed(session)


def drop_departed(session: sessions.Session) -> None:
    """Drop the members that are not in the directory any more, or have another rank or life there.

    A member tells the others its rank, and could name one that is not its own, to get what is sent
    to the rank's owner.

    The members are read first and the directory afterwards: a worker is in the directory before
    any other worker knows it, so a member that is missing there has left.
    """
    with session.lock:
        known = list(session.members.values())
    try:
        group = session.directory.read()
    except Exception as error:  # noqa: BLE001
        # The store may have ended with the worker that kept it, and any worker writes to it.
        logger.warning("worker %s cannot see who left: %s", session.me.name, error)
        return
    with session.lock:
        session.lives = max(session.lives, group.lives)
    for member in known:
        entry = group.members.get(member.name)
        if entry is None or _identity(entry) != _identity(member):
            remove_member(session, member.name, member.incarnation)


def _identity(member: Member) -> tuple[str, int, int]:
    return member.incarnation, member.rank, member.life


def leave_group(session: sessions.Session) -> None:
    """Take this worker out of the directory and tell the others. Never fails."""
    try:
        session.directory.leave(session.me)
    except RuntimeError as error:
        # Rank 0 keeps the store and may have left before this worker.
        logger.debug("could not leave the directory: %s", error)
    session.left = True
    me = session.me
    _notify(session, _others(session), member_left, (me.name, me.incarnation), quiet=True)


def leave_quietly(session: sessions.Session) -> None:
    """Take this worker out of the directory, if that has not been done; tell nobody. Never fails.

    For the end of a session without leave_group(). The agent must still run: its goodbye makes the
    others read the directory, in which this worker is gone by then.

    No lock of the session is held here, because the store may take its time.
    """
    if session.directory is None or session.left:
        return
    session.left = True
    try:
        session.directory.leave_within(_QUIET_LEAVE_TIMEOUT, session.me)
    except Exception as error:  # noqa: BLE001  the store may have ended, or be stopped
        logger.debug("could not leave the directory: %s", error)


def announce_departure(member: Member) -> None:
    """Tell all workers, this one included, that a member has died.

    Args:
        member: must be out of the directory already, because the other workers look there.
    """
    session = sessions.require()
    remove_member(session, member.name, member.incarnation)
    departed = (member.name, member.incarnation)
    _notify(session, _others(session), member_left, departed, quiet=True)


def _others(session: sessions.Session) -> list[str]:
    with session.lock:
        return [name for name in session.members if name != session.me.name]


def _notify(
    session: sessions.Session,
    names: Iterable[str],
    function: Any,
    arguments: tuple[Any, ...],
    *,
    quiet: bool,
) -> None:
    """Call a function of other workers, and wait until it has run, for _NOTICE_TIMEOUT at most."""
    futures: list[tuple[str, Any]] = []
    failed: list[str] = []
    for name in names:
        try:
            futures.append(
                (name, api.rpc_async(name, function, args=arguments, timeout=_NOTICE_TIMEOUT))
            )
        except RuntimeError as error:
            failed.append(f"{name} ({failures.brief(error)})")
    for name, future in futures:
        try:
            future.wait()
        except Exception as error:  # noqa: BLE001  a worker may answer with any error
            failed.append(f"{name} ({failures.brief(error)})")
            tell_again(error, name, function, arguments)
    if failed:
        level = logging.DEBUG if quiet else logging.WARNING
        logger.log(
            level,
            "worker %s could not tell all others who joined or left: %s",
            session.me.name,
            "; ".join(failed),
        )


def tell_again(error: Exception, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
    """Call a busy worker again, without a deadline, where the first call has timed out.

    A worker does not begin a call whose deadline is over. It begins a call without a deadline as
    soon as one of its threads is free, as long as this worker lives. The first call has a deadline
    because a call without one waits here, perhaps for ever, where too many calls are under way to
    that worker (max_calls_in_flight). The first call then fails with an OverloadedError, and there
    is no second.
    """
    if isinstance(error, errors.CallTimeoutError):
        with contextlib.suppress(RuntimeError):
            api.rpc_async(name, function, args=arguments, timeout=0)


def member_joined(text: str) -> None:
    """Note that a worker has joined. Called by that worker over RPC.

    Raises:
        RefusedError: the caller is another worker, or the group is static.
        RpcError, ValueError: as add_member().
    """
    session, member = sessions.require(), Member.from_json(text)
    if session.directory is None:
        raise errors.RefusedError(f"{member.name} cannot join {session.me.name}'s static group.")
    check_speaks_for(member.name)
    with session.lock:
        next_life = 1 + max(session.lives, *(known.life for known in session.members.values()))
    _enter(session, member)
    call = current_call.find()
    # Where tell_again() has called, the newcomer may have left meanwhile. A life that is not the
    # next one may be false, and then keeps the owner of the newcomer's rank from connecting.
    if call is None or call.deadline is None or member.life > next_life:
        drop_departed(session)


def member_left(name: str, incarnation: str) -> None:
    """Note that a worker has left. Called over RPC by that worker, or by one that found it dead.

    Args:
        name: the worker.
        incarnation: the incarnation that has left; the name may have come back since.

    Raises:
        RefusedError: the caller is another worker and the directory still holds the one that is
            said to have left, or the group is static, or no incarnation is named.
    """
    session = sessions.require()
    if session.directory is None:
        raise errors.RefusedError(f"{name} cannot leave {session.me.name}'s static group.")
    if not isinstance(incarnation, str) or not incarnation:
        raise errors.RefusedError(f"{incarnation!r:.40} is no incarnation of worker {name}.")
    try:
        check_speaks_for(name)
    except errors.RefusedError:
        there = session.directory.read().members.get(name)
        if there is not None and there.incarnation == incarnation:
            raise
    remove_member(session, name, incarnation)


def check_speaks_for(name: str) -> None:
    """Raise unless the calling worker speaks about its own membership.

    Args:
        name: the worker that the call is about.

    Raises:
        RefusedError: the caller is another worker.
    """
    call = current_call.find()
    if call is not None and call.caller != name:
        raise errors.RefusedError(
            f"Worker {call.caller} spoke of the membership of worker {name}, as only {name} may.",
            worker=call.caller,
        )


def remove_member(session: sessions.Session, name: str, incarnation: str | None) -> None:
    """Take a member out of the agent's directory.

    Args:
        session: this worker's session.
        name: the member.
        incarnation: the incarnation to take out; None for any.
    """
    with session.lock:
        member = session.members.get(name)
        if session.ended or member is None or name == session.me.name:
            return
        if incarnation is not None and member.incarnation != incarnation:
            return  # the worker has come back already
        del session.members[name]
        session.agent.remove_member(name)
        apply_members(session)


def _enter(session: sessions.Session, member: Member) -> None:
    """Add a member. If another member has the newcomer's rank, drop the workers that have left
    first: this worker may not yet have heard that the other member left."""
    try:
        add_member(session, member)
    except (errors.RpcError, ValueError):
        drop_departed(session)
        add_member(session, member)


def add_member(session: sessions.Session, member: Member) -> None:
    """Enter or replace a member in the agent's directory.

    Raises:
        RpcError, ValueError: the member does not fit to the others: see members.validate().
    """
    with session.lock:
        known = session.members.get(member.name)
        if member.name == session.me.name:
            return
        if known is not None and known.life >= member.life:
            return
        # Another worker has sent this, and could take a rank to get what is sent to its owner.
        members = {**session.members, member.name: member}
        validate(list(members.values()), is_static=session.directory is None)
        session.agent.add_member(*member.row())
        session.members[member.name] = member
        apply_members(session)


def apply_members(session: sessions.Session) -> None:
    """Update the device maps and upstream's list of names from the members."""
    reverse, devices = device_tables(session.me, session.members)
    session.agent.set_device_maps(session.me.device_maps, reverse, devices)
    api._ALL_WORKER_NAMES = set(session.members)
    try:
        prepare_devices(devices)
    except RuntimeError as error:  # in a process that was forked after CUDA had been used
        logger.warning("tensors of devices cannot be received: %s", error)


def update_group_membership(
    agent: Any, worker_info: Any, devices: Any, reverse: Any, is_join: bool
) -> None:
    """Do what upstream's TensorPipeAgent._update_group_membership does; becomes the agent's method.

    Args:
        agent: the UCX agent.
        worker_info: the worker that joined or left.
        devices: ignored, because the device lists follow from the members.
        reverse: ignored likewise.
        is_join: True for joined, False for left.
    """
    session = sessions.require()
    if session.directory is None:
        raise RuntimeError("The members of a static RPC group do not change.")
    if not is_join:
        remove_member(session, worker_info.name, None)
        return
    member = session.directory.read().members.get(worker_info.name)
    if member is None:
        raise RuntimeError(f"Worker {worker_info.name} is not in the directory of the group.")
    _enter(session, member)
