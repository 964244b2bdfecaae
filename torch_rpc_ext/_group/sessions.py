"""The one RPC session of this process: what Python must remember beside the C++ agent.

These are not attributes of the agent object, because pybind11 may make a new Python object for the
same agent at any time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch_rpc_ext._group.interfaces import InterfaceChoice
from torch_rpc_ext._group.members import Member
from torch_rpc_ext.options import UcxRpcBackendOptions

# How long the end of a session waits for its threads, s: for a store that does not answer, or a
# callback of the user that never returns.
_END_PATIENCE = 5.0


# No __eq__ and __repr__: dataclass would compile them at import, in every process of a group.
@dataclass(eq=False, repr=False)
class Session:
    """A running agent and what it was started with.

    Attributes:
        agent: the C++ agent.
        me: this worker.
        options: the options in force.
        given_options: the options as passed to init_rpc; another object under takeover.
        store: the store that init_rpc passed.
        interface: the interfaces that were chosen, and why.
        allowed: what peers may call (_security.allow_list.AllowList), None for everything.
        place: this worker's place in the store (returning.Place), None in a dynamic group.
        directory: the dynamic group's directory (dynamic.Directory), None in a static group.
        members: the group as known here, by name; guarded by lock.
        left: this worker is out of the directory, or its store has been asked in vain.
        lives: the greatest count of lives that this worker has read in the dynamic group's
            directory; guarded by lock.
        events: tells the subscribers (events._Hub); None before the first subscription.
        threads: the threads of Python that belong to the session; guarded by lock.
        ended: no thread is started any more; guarded by lock.
        all_done: every worker of the static group has reached rpc.shutdown().
        pid: the process that made the session: a forked child inherits the object, but no threads.
    """

    agent: Any
    me: Member
    options: UcxRpcBackendOptions
    given_options: Any
    store: Any
    interface: InterfaceChoice
    allowed: Any = None
    place: Any = None
    directory: Any = None
    members: dict[str, Member] = field(default_factory=dict)
    left: bool = False
    lives: int = 0
    events: Any = None
    threads: list[threading.Thread] = field(default_factory=list)
    ended: bool = False
    all_done: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    pid: int = field(default_factory=os.getpid)

    def start_thread(self, name: str, target: Callable[[], object]) -> bool:
        """Run a function on a thread that the end of the session waits for.

        A daemon thread, so that what never returns does not keep the process alive.

        Returns:
            Whether the thread has been started: not once the session has ended.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self.lock:
            if self.ended:
                return False
            self.threads = [one for one in self.threads if one.is_alive()]
            thread.start()
            self.threads.append(thread)
        return True

    def end_threads(self) -> None:
        """Wait for the threads, once the agent has ended, so that none works for it any more."""
        until = time.monotonic() + _END_PATIENCE
        with self.lock:
            self.ended = True
            threads = list(self.threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


_current: Session | None = None


def current() -> Session | None:
    """Return this process's session, None when RPC does not run on UCX here."""
    if _current is not None and _current.pid == os.getpid():
        return _current
    return None


def require() -> Session:
    """Return this process's session.

    Raises:
        RuntimeError: there is none.
    """
    session = current()
    if session is None:
        raise RuntimeError(
            "RPC has not been initialized on UCX. Call torch.distributed.rpc.init_rpc with "
            "backend=BackendType.UCX first."
        )
    return session


def set_current(session: Session | None) -> None:
    """Set this process's session; None for none."""
    global _current
    _current = session
