"""How the workers of a static group find each other through the store.

Each rank writes one key; rank 0 reads them all and writes one blob; everybody reads the blob. So
the store answers O(N) requests, never N^2. A second round of the same kind says that all have
started, so that nobody calls, or leaves, before the others are there.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_rpc_ext import errors
from torch_rpc_ext._members import Member, validate
from torch_rpc_ext._store import Deadline, describe, poll

PREFIX = "torch_rpc_ext"
_GROUP = f"{PREFIX}/group"
_GO = f"{PREFIX}/go"
_KIND = f"{PREFIX}/kind"
_OK = "ok"
# The others give rank 0 this much longer, s: it fails with words that say more than theirs.
_GRACE = 2.0


@dataclass(frozen=True)
class Group:
    """A group that has been agreed on.

    Attributes:
        id: random bytes; tells this group from any other.
        members: by name.
    """

    id: bytes
    members: dict[str, Member]


def claim_kind(store: Any, *, is_static: bool) -> None:
    """Note in the store whether its group is static; refuse to mix.

    Raises:
        RpcError: the store's group is of the other kind (upstream's text).
    """
    mine = "static" if is_static else "dynamic"
    there = store.compare_set(_KIND, "", mine).decode()
    if there != mine:
        raise errors.RpcError(
            "RPC group mixes statically and dynamically initialized members which is not "
            f"supported. The group at {describe(store)} is {there}, this worker asked for a "
            f"{mine} one: pass world_size everywhere, or nowhere."
        )


def join_static(
    store: Any, me: Member, world_size: int, deadline: Deadline, new_id: Callable[[], bytes]
) -> Group:
    """Meet the others.

    Args:
        store: the group's store.
        me: this worker.
        world_size: number of workers.
        deadline: how long to wait for them.
        new_id: draws the group's id; rank 0 calls it.

    Raises:
        RefusedError: another process has this rank.
        RpcError: ranks missing at the deadline (named), names not unique, unequal versions, or
            the failure of another worker.
        ValueError: device maps that do not fit together.
    """
    _publish(store, me)
    if me.rank == 0:
        _gather(store, world_size, deadline, new_id)
    elif not poll(lambda: bool(store.check([_GROUP])), Deadline(deadline.remaining() + _GRACE)):
        late = [r for r in range(world_size) if not store.check([_member_key(r)])]
        raise errors.RpcError(_late(late or [0], world_size, store, deadline, "joined"))
    blob = json.loads(store.get(_GROUP))
    if "error" in blob:
        raise errors.RpcError(str(blob["error"]))
    members = [Member.from_json(text) for text in blob["members"]]
    validate(members, is_static=True)
    return Group(base64.b64decode(blob["group"]), {member.name: member for member in members})


def confirm_start(store: Any, rank: int, world_size: int, deadline: Deadline) -> None:
    """Wait until every worker's agent runs.

    Raises:
        RpcError: some did not start in time (named), or failed.
    """
    if rank != 0:
        store.set(_ready_key(rank), _OK)
        if not poll(lambda: bool(store.check([_GO])), Deadline(deadline.remaining() + _GRACE)):
            late = [r for r in range(1, world_size) if not store.check([_ready_key(r)])]
            raise errors.RpcError(_late(late or [0], world_size, store, deadline, "started"))
        verdict = store.get(_GO).decode()
    else:
        verdict = _OK

        def arrived(_: int, value: bytes) -> None:
            nonlocal verdict
            verdict = value.decode()

        late = _collect(
            store, _ready_key, range(1, world_size), deadline, arrived, lambda: verdict != _OK
        )
        if verdict == _OK and late:
            verdict = _late(late, world_size, store, deadline, "started")
        store.set(_GO, verdict)
    if verdict != _OK:
        raise errors.RpcError(verdict)


def report_failure(store: Any, rank: int, name: str, problem: BaseException) -> None:
    """Tell the others that this worker cannot join, so that they need not wait. Best effort."""
    text = f"Worker {name} (rank {rank}) failed to start: {problem or type(problem).__name__}"
    error = json.dumps({"error": text})
    with contextlib.suppress(RuntimeError):
        store.compare_set(_member_key(rank), "", error)
        if rank == 0:
            store.compare_set(_GROUP, "", error)
            store.compare_set(_GO, "", text)
        else:
            store.compare_set(_ready_key(rank), "", text)


def _member_key(rank: int) -> str:
    return f"{PREFIX}/member/{rank}"


def _ready_key(rank: int) -> str:
    return f"{PREFIX}/ready/{rank}"


def _publish(store: Any, me: Member) -> None:
    text = me.to_json()
    there = store.compare_set(_member_key(me.rank), "", text).decode()
    if there == text:
        return
    other = Member.from_json(there)
    if (other.host, other.pid) == (me.host, me.pid):
        store.set(_member_key(me.rank), text)  # an earlier try of this very process
        return
    raise errors.RefusedError(
        f"Rank {me.rank} is not unique: worker {other.name} (pid {other.pid} on "
        f"{other.host.split('/')[0]}) has it in the group at {describe(store)}, so worker "
        f"{me.name} cannot. Give every process a rank of its own.",
        worker=other.name,
    )


def _gather(store: Any, world_size: int, deadline: Deadline, new_id: Callable[[], bytes]) -> None:
    """Rank 0: read all members, write the blob, which holds them or says why not."""
    found: dict[int, str] = {}
    problem = ""

    def arrived(rank: int, value: bytes) -> None:
        nonlocal problem
        text = value.decode()
        found[rank] = text
        # A worker that failed to start leaves its reason instead of an address.
        problem = problem or str(json.loads(text).get("error", ""))

    late = _collect(store, _member_key, range(world_size), deadline, arrived, lambda: bool(problem))
    if late and not problem:
        problem = _late(late, world_size, store, deadline, "joined")
    blob: dict[str, Any] = {"error": problem}
    if not problem:
        blob = {
            "group": base64.b64encode(new_id()).decode(),
            "members": [found[rank] for rank in range(world_size)],
        }
    store.set(_GROUP, json.dumps(blob))


def _collect(
    store: Any,
    key: Callable[[int], str],
    ranks: range,
    deadline: Deadline,
    arrived: Callable[[int, bytes], None],
    enough: Callable[[], bool],
) -> list[int]:
    """Pass each rank's value on as it comes; return the ranks that have none at the end."""
    pending = list(ranks)

    def look() -> bool:
        for rank in list(pending):
            if store.check([key(rank)]):
                pending.remove(rank)
                arrived(rank, store.get(key(rank)))
        return not pending or enough()

    poll(look, deadline)
    return pending


def _late(ranks: list[int], world_size: int, store: Any, deadline: Deadline, what: str) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:20]) + (", ..." if len(ranks) > 20 else "")
    return (
        f"init_rpc timed out after {deadline.seconds:g} s: rank(s) {shown} of {world_size} have "
        f"not {what} (store {describe(store)}). Start them with the same store address and world "
        "size, after as many earlier init_rpc calls as here, or raise init_timeout."
    )
