"""How the workers of a static group find each other through the store.

Each rank has a key of the store, its mailbox, and puts its entry there. Rank 0 takes the entries of
all ranks, leaves the group's id in place of each, and writes the group as one blob under that id.
Each rank sees that its entry was taken, and reads the blob. So the store answers O(N) requests, not
O(N^2). In a second round of the same kind all ranks say that their agents run, so that no worker
calls or leaves before the others are there.

An entry is for one group. So the same store serves one group after the other, also when ranks and
world size change (pytorch issue 46491).
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_rpc_ext import errors
from torch_rpc_ext._group.members import Member, is_alive, validate
from torch_rpc_ext._group.stores import Deadline, describe, poll, serves_by_rank_0
from torch_rpc_ext._security import group_secret

PREFIX = "torch_rpc_ext"
_KIND = f"{PREFIX}/kind"
_TAKEN = "taken:"
_OK = "ok"
# The other ranks wait this much longer than rank 0, s: rank 0's error says more than theirs.
_GRACE = 1.0
# How often the other ranks look whether rank 0 has failed, s. A look is two requests to the store.
_LOOK_EVERY = 0.5
_TRIES = 100


class Group(NamedTuple):
    """A group that has been agreed on.

    Attributes:
        id: random bytes; tells this group from any other.
        members: by name.
        secret: the secret that the store gives out.
        lives: how many lives (Member.life) a dynamic group has given out.
    """

    id: bytes
    members: dict[str, Member]
    secret: bytes
    lives: int = 0


def claim_kind(store: Any, *, is_static: bool) -> None:
    """Note in the store whether its group is static or dynamic.

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


def check_rank_0(store: Any) -> None:
    """Look into the store of the process that has the port which this rank 0 wanted to serve.

    Raises:
        RefusedError: that process was started as rank 0 too, and waits for its group.
    """
    key = f"{PREFIX}/rank/0"
    there = store.get(key).decode() if store.check([key]) else _TAKEN
    if not there.startswith(_TAKEN) and "error" not in json.loads(there):
        raise _not_unique(Member.from_json(there), store, "and this process was started as it too")


def _not_unique(other: Member, store: Any, problem: str) -> errors.RefusedError:
    return errors.RefusedError(
        f"Rank {other.rank} is not unique: worker {other.name} (pid {other.pid} on "
        f"{other.host.split('/')[0]}) waits with it at {describe(store)}, {problem}. Give every "
        "process a rank of its own.",
        worker=other.name,
    )


def is_static(store: Any) -> bool:
    """Return whether the store's group is noted as static; does not change the store."""
    return bool(store.check([_KIND])) and store.get(_KIND).decode() == "static"


def read_group(store: Any, group_id: str) -> Group:
    """Return a static group as it was formed.

    Raises:
        RpcError, ValueError: no group was formed, or its members do not fit; the text says why.
    """
    blob = json.loads(store.get(f"{PREFIX}/group/{group_id}"))
    if "error" in blob:
        raise errors.RpcError(str(blob["error"]))
    members = [Member.from_json(text) for text in blob["members"]]
    validate(members, is_static=True)
    return Group(
        bytes.fromhex(group_id),
        {member.name: member for member in members},
        bytes.fromhex(blob["secret"]),
    )


class Rendezvous:
    """One worker's part in forming one static group.

    Args:
        store: the group's store.
        name, rank: this worker's.
        world_size: number of workers.
        seconds: how long join() and confirm_start() together wait for the other workers.
        numbered: the store as init_rpc gives it to other back ends, with its prefix.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        world_size: int,
        seconds: float,
        numbered: Any = None,
    ) -> None:
        self._store = store
        self._numbered = numbered
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._deadline = Deadline(seconds)
        self._entry = ""
        self._id = ""

    def join(self, me: Member) -> Group:
        """Meet the others.

        Raises:
            RefusedError: another process has this rank.
            RpcError: ranks missing at the deadline (named), names not unique, unequal versions,
                or the failure of another worker.
            ValueError: device maps that do not fit together.
        """
        self._put(me)
        if self._rank == 0:
            self._form(me)
        else:
            self._wait_for_group()
        return read_group(self._store, self._id)

    def confirm_start(self) -> None:
        """Wait until every worker's agent runs.

        Raises:
            RpcError: some did not start in time (named), or failed.
        """
        go = self._key("go", self._id)
        if self._rank != 0:
            self._store.set(self._ready(self._rank), _OK)
            if not self._poll_with_grace(lambda: bool(self._store.check([go]))):
                late = [
                    r for r in range(1, self._world_size) if not self._store.check([self._ready(r)])
                ]
                raise errors.RpcError(self._late(late or [0], "started"))
            verdict = self._store.get(go).decode()
        else:
            verdict = self._collect_verdict()
            self._store.set(go, verdict)
        if verdict != _OK:
            raise errors.RpcError(verdict)

    def fail(self, problem: BaseException) -> None:
        """Tell the others that this worker cannot join, so that they need not wait. Best effort."""
        text = f"Worker {self._name} (rank {self._rank}) failed to start: "
        text += str(problem) or type(problem).__name__
        with contextlib.suppress(RuntimeError):
            if not self._entry:
                # This worker has no entry yet. The reason takes the entry's place, where rank 0
                # reads it, or, if this is rank 0, the others do. An entry of another process stays.
                # The number tells this failure from one of an earlier start.
                said = json.dumps({"error": text, "number": secrets.token_hex(8)})
                self._replace(said, lambda there: not there or bool(_error_in(there)))
            elif not self._id:
                self._withdraw()
            elif self._rank == 0:
                self._withdraw()
                self._store.compare_set(self._key("go", self._id), "", text)
            else:
                self._store.compare_set(self._ready(self._rank), "", text)

    def _key(self, kind: str, what: object) -> str:
        return f"{PREFIX}/{kind}/{what}"

    def _mailbox(self, rank: int) -> str:
        return self._key("rank", rank)

    def _ready(self, rank: int) -> str:
        return self._key("ready", f"{self._id}/{rank}")

    def _read(self, rank: int) -> str:
        """Return a rank's entry; '' where the mailbox holds none that a group may still take."""
        key = self._mailbox(rank)
        if not self._store.check([key]):
            return ""
        text = str(self._store.get(key).decode())
        return "" if text.startswith(_TAKEN) else text

    def _is_missing(self, rank: int) -> bool:
        said = self._read(rank)
        return not said or bool(_error_in(said))

    def _withdraw(self) -> None:
        """Remove this worker's entry, if it is still in the mailbox."""
        self._store.compare_set(self._mailbox(self._rank), self._entry, f"{_TAKEN}-")

    def _replace(self, text: str, allowed: Callable[[str], bool]) -> bool:
        """Put text into this rank's mailbox where allowed(entry there) says so."""
        key = self._mailbox(self._rank)
        there = self._store.compare_set(key, "", text).decode()
        for _ in range(_TRIES):
            if there == text:
                return True
            if not allowed("" if there.startswith(_TAKEN) else there):
                return False
            there = self._store.compare_set(key, there, text).decode()
        return False

    def _put(self, me: Member) -> None:
        text = me.to_json()

        def left_over(there: str) -> bool:
            if not there or "error" in json.loads(there):
                return True
            other = Member.from_json(there)
            if other.host == me.host and (other.pid == me.pid or not is_alive(other.pid)):
                return True
            raise _not_unique(other, self._store, f"so worker {me.name} cannot have it")

        if not self._replace(text, left_over):
            raise errors.RefusedError(f"Rank {me.rank} is not unique: others keep claiming it.")
        self._entry = text

    def _wait_for_group(self) -> None:
        mailbox = self._mailbox(self._rank)
        before = self._read(0)
        pause = Deadline(_LOOK_EVERY)

        def hear_rank_0() -> None:
            nonlocal pause
            if pause.remaining() > 0:
                return
            pause = Deadline(_LOOK_EVERY)
            said = self._read(0)
            # What was there before may be of an earlier start: rank 0 may be about to come.
            if said != before and (problem := _error_in(said)):
                raise errors.RpcError(problem)

        def formed() -> bool:
            if not self._id:
                there = self._store.get(mailbox).decode()
                if there == self._entry:
                    hear_rank_0()
                    return False
                if not there.startswith(_TAKEN):
                    raise errors.RefusedError(
                        f"Rank {self._rank} is not unique: another process has put worker "
                        f"{self._name} out of its place at {describe(self._store)}."
                    )
                self._id = there.removeprefix(_TAKEN)
            return bool(self._store.check([self._key("group", self._id)]))

        if not self._poll_with_grace(formed):
            late = [r for r in range(self._world_size) if self._is_missing(r)]
            text = self._late([0] if self._id else late or [0], "joined")
            problem = _error_in(self._read(0))
            raise errors.RpcError(f"{text} {problem}" if problem else text)

    def _form(self, me: Member) -> None:
        """Rank 0: take all entries; write the blob, which holds them or says what went wrong."""
        self._id = secrets.token_hex(16)
        found: dict[int, str] = {}
        problem = ""

        def look() -> bool:
            nonlocal problem
            for rank in range(1, self._world_size):
                text = self._read(rank)
                if text and not problem:
                    problem = self._take(me, rank, text, found)
            if not problem and len(found) == self._world_size - 1:
                # The own entry comes last: until then it tells another process that was started as
                # rank 0 by mistake which process has the rank.
                problem = self._take(me, 0, self._entry, found)
            return bool(problem) or len(found) == self._world_size

        if not poll(look, self._deadline):
            missing = [r for r in range(1, self._world_size) if r not in found]
            problem = self._late(missing or [0], "joined")
        if problem:
            self._withdraw()
        blob: dict[str, Any] = {"error": problem}
        if not problem:
            blob = {
                "members": [found[rank] for rank in range(self._world_size)],
                "secret": group_secret.draw().hex(),
            }
        self._store.set(self._key("group", self._id), json.dumps(blob))

    def _take(self, me: Member, rank: int, text: str, found: dict[int, str]) -> str:
        """Take a rank's entry; return why the group cannot be formed, '' if nothing is wrong."""
        # A worker that failed to start leaves its reason instead of an address.
        problem = _error_in(text)
        if not problem:
            member = Member.from_json(text)
            if member.host == me.host and not is_alive(member.pid):
                return ""  # left over from a dead process; the living one will replace it
        mailbox = self._mailbox(rank)
        taken = _TAKEN + self._id
        if self._store.compare_set(mailbox, text, taken).decode() != taken:
            return ""  # replaced meanwhile; the next look finds the new one
        if not problem and rank in found:
            other = Member.from_json(found[rank])
            if (other.host, other.pid) != (member.host, member.pid):
                return (
                    f"Rank {rank} is not unique: worker {other.name} (pid {other.pid} on "
                    f"{other.host.split('/')[0]}) and worker {member.name} (pid {member.pid} on "
                    f"{member.host.split('/')[0]}) both have it."
                )
        found[rank] = text
        return problem

    def _collect_verdict(self) -> str:
        pending = list(range(1, self._world_size))
        verdict = _OK

        def look() -> bool:
            nonlocal verdict
            for rank in list(pending):
                if self._store.check([self._ready(rank)]):
                    pending.remove(rank)
                    said = self._store.get(self._ready(rank)).decode()
                    verdict = said if verdict == _OK else verdict
            return verdict != _OK or not pending

        if not poll(look, self._deadline):
            return self._late(pending, "started")
        return verdict

    def _poll_with_grace(self, ready: Callable[[], bool]) -> bool:
        return poll(ready, Deadline(self._deadline.remaining() + _GRACE))

    def _late(self, ranks: list[int], what: str) -> str:
        shown = ", ".join(str(rank) for rank in ranks[:20]) + (", ..." if len(ranks) > 20 else "")
        return (
            f"init_rpc timed out after {self._deadline.seconds:g} s: rank(s) {shown} of "
            f"{self._world_size} have not {what} (store {describe(self._store)}). Start them with "
            "the same store address and world size, or raise init_timeout."
            f"{self._elsewhere(ranks)}"
        )

    def _elsewhere(self, ranks: list[int]) -> str:
        """Return a sentence if missing ranks wait on another back end, else ''."""
        remedy = "give all ranks backend=BackendType.UCX, or TORCH_RPC_BACKEND=ucx"
        for rank in ranks if self._numbered is not None else ():
            # TENSORPIPE first opens a Gloo group, and each rank writes its address to this key.
            if self._numbered.check([f"0/{rank}"]):
                return f" Rank {rank} is there with the back end TENSORPIPE: {remedy}."
        if self._rank != 0 and 0 in ranks and serves_by_rank_0(self._store):
            return (
                " Rank 0 serves this store but does not look for the others here: if it has the "
                f"back end TENSORPIPE, {remedy}."
            )
        return ""


def _error_in(entry: str) -> str:
    """Return why a worker failed to start, from what it left in its mailbox; '' if it did not."""
    return str(json.loads(entry).get("error", "")) if entry else ""
