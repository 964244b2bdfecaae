"""Ending a session: shutdown, a failed start, a process that just leaves, a fork."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from torch._C import _distributed_rpc as _untyped_native_rpc
from torch.distributed import rpc as _untyped_rpc
from torch.distributed.rpc import api as _untyped_api

from torch_rpc_ext._calls import fan_out
from torch_rpc_ext._group import sessions
from torch_rpc_ext._lifecycle.shutdown import wait_all_workers
from torch_rpc_ext._upstream import hooks

# Upstream's functions have no types.
api: Any = _untyped_api
rpc: Any = _untyped_rpc
native_rpc: Any = _untyped_native_rpc


@functools.cache
def _watch_forks() -> None:
    """Install the hook for forks, once, when the first agent starts."""
    os.register_at_fork(after_in_child=_after_fork_in_child)


def open_session(session: sessions.Session) -> None:
    """Set this process's session, and install the hooks in upstream's Python."""
    _watch_forks()
    # Upstream numbers the meetings of workers with the same names, in each process. A worker that
    # was in an earlier group, and one that was not, would wait for each other for ever.
    with api._all_gather_dict_lock:
        api._all_gather_sequence_id.clear()
        api._all_gather_sequence_id_to_states.clear()
    sessions.set_current(session)
    fan_out.know_workers(_host_of, _dtype_of, _uses_maps)
    hooks.install(session.agent, wait_all_workers, session.allowed)


def _host_of(name: str) -> str:
    session = sessions.current()
    member = session.members.get(name) if session else None
    return member.host if member else ""


def _dtype_of(name: str) -> Any:
    session = sessions.current()
    given = session.options.wire_dtype if session else None
    return given.get(name) if isinstance(given, dict) else given


def _uses_maps(name: str) -> bool:
    session = sessions.current()
    if session is None or name not in session.members:
        return False
    return bool(session.members[name].device_maps or session.me.device_maps.get(name))


def close_session() -> None:
    """Forget the session, remove the hooks from upstream's Python, release the store. Idempotent.

    agent.shutdown() calls this at its end.
    """
    session = sessions.current()
    if session is None:
        return
    hooks.uninstall()
    sessions.set_current(None)
    session.end_threads()
    # The events refer to the session. With that cycle the agent would live until Python collects
    # garbage.
    session.events = None
    if session.all_done:
        # A global of upstream keeps the store alive, and on rank 0 the store's port. No worker
        # needs the store any more, and the next init_rpc, perhaps with another rank 0, needs the
        # port.
        rpc.__dict__.pop("rendezvous_iterator", None)


def abandon(session: sessions.Session) -> None:
    """Undo a start that failed half-way, so that no agent, thread or hook stays."""
    with contextlib.suppress(Exception):
        session.agent.shutdown()
    close_session()
    if native_rpc._is_current_rpc_agent_set():
        with contextlib.suppress(Exception):
            native_rpc._cleanup_python_rpc_handler()
        with contextlib.suppress(Exception):
            native_rpc._reset_current_rpc_agent()


def leave() -> None:
    """Stop the threads of a process that ends without rpc.shutdown(). Idempotent.

    Does what rpc.shutdown(graceful=False) does, but is silent about RRefs that still live. Without
    this the threads would use an interpreter that is being taken down, and the process would abort
    or hang.
    """
    session = sessions.current()
    if session is None:
        return
    with contextlib.suppress(Exception):
        api._destroy_rref_context(True)  # the hook, which stops the agent first
    abandon(session)


def _after_fork_in_child() -> None:
    """Make RPC look uninitialised in a forked child.

    The child has the agent's memory and file descriptors, but not its threads. Using the agent in
    the child would hang, or send on the parent's connections.
    """
    session = sessions._current
    if session is None:
        return
    with contextlib.suppress(Exception):
        session.agent.leak()
    hooks.uninstall()
    sessions.set_current(None)
    with contextlib.suppress(Exception):
        if native_rpc._is_current_rpc_agent_set():
            native_rpc._reset_current_rpc_agent()
