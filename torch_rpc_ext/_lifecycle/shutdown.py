"""The first step of a graceful rpc.shutdown(): wait for the others, or leave a dynamic group.

Source: torch/distributed/rpc/api.py, shutdown, _wait_all_workers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch._C import _distributed_rpc as _untyped_native_rpc
from torch.distributed.rpc import api as _untyped_api

from torch_rpc_ext._group import dynamic, sessions

# Upstream's functions have no types.
api: Any = _untyped_api
native_rpc: Any = _untyped_native_rpc

# How long a leaving worker waits until its RRefs are deleted; an owner that is gone never answers.
_RREF_PATIENCE = timedelta(seconds=10)
_RREF_INTERVAL = 0.005  # s

# After how long a waiting shutdown begins to check that the others live, and how often then, s.
_WATCH_AFTER = 1.0
_WATCH_INTERVAL = 0.5


def wait_all_workers(original: Callable[..., Any], timeout: float) -> None:
    """Wait until all workers have called shutdown, or leave the group if it is dynamic.

    Args:
        original: upstream's api._wait_all_workers.
        timeout: how long to wait for the others, s; 0 for no limit.
    """
    session = sessions.current()
    if session is None or session.directory is None:
        with _ending_when_one_is_lost(session):
            original(timeout)
        if session is not None:
            session.all_done = True
            # Now, while rank 0 still waits for this worker: rank 0's end may end the store.
            session.place.empty()
        return
    with contextlib.suppress(RuntimeError):
        # Before leaving, because afterwards the owners do not know this worker any more.
        native_rpc._delete_all_user_and_unforked_owner_rrefs(_RREF_PATIENCE)
    _wait_for_rref_messages()
    dynamic.leave_group(session)


def _wait_for_rref_messages() -> None:
    """Wait until the others have this worker's messages about RRefs, for _RREF_PATIENCE at most.

    torch may confirm an RRef only when the function that got the RRef has returned.
    """
    end = time.monotonic() + _RREF_PATIENCE.total_seconds()
    while (
        int(native_rpc._rref_context_get_debug_info()["num_pending_futures"]) != 0
        and time.monotonic() < end
    ):
        time.sleep(_RREF_INTERVAL)


@contextlib.contextmanager
def _ending_when_one_is_lost(session: sessions.Session | None) -> Iterator[None]:
    """Let upstream's gathering of all workers end with its error when a worker has died.

    Upstream's leader waits, by default for ever, for a signal that only the last worker's arrival
    sets. Here the leader connects to the workers that have not come, to learn whether they live.
    """
    if session is None:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch_members, args=(session, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch_members(session: sessions.Session, done: threading.Event) -> None:
    leader = min(session.members) == session.me.name
    patience = _WATCH_AFTER
    while not done.wait(patience):
        patience = _WATCH_INTERVAL
        with contextlib.suppress(RuntimeError):  # a worker has left meanwhile, or RPC has ended
            if leader:
                for member in list(session.members.values()):
                    session.agent.watch(member.rank)
            if set(session.agent.lost_workers()) & set(session.members):
                with api._all_gather_dict_lock:
                    for states in api._all_gather_sequence_id_to_states.values():
                        states.proceed_signal.set()
