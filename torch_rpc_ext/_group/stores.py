"""The rendezvous store: bounded, interruptible waiting, and what a store says of itself.

Keys are polled, not waited for: Store.wait cannot be interrupted by Ctrl-C, and a TCPStore logs
two warnings at each of its time-outs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as _untyped_c10d

dist: Any = _untyped_c10d  # its stub lacks some members

# The first look comes soon (a peer is usually milliseconds away), later ones spare the store.
_FIRST_PAUSE = 0.001
_GROWTH = 1.25
_LONGEST_PAUSE = 0.1


class Deadline:
    """A moment after which waiting ends.

    Args:
        seconds: how long from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left, 0 when over."""
        return max(0.0, self._end - time.monotonic())


def poll(ready: Callable[[], bool], deadline: Deadline) -> bool:
    """Ask until ready() or the deadline; return what it said last. Ctrl-C gets through."""
    pause = _FIRST_PAUSE
    while not ready():
        left = deadline.remaining()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * _GROWTH, _LONGEST_PAUSE)
    return True


@contextlib.contextmanager
def patient(store: Any, seconds: float) -> Iterator[None]:
    """Give the store's own operations this time; init_rpc sets it to rpc_timeout, maybe tiny."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=max(1.0, seconds)))
    try:
        yield
    finally:
        # The store may be gone by now; what went wrong first is what counts.
        with contextlib.suppress(RuntimeError):
            store.set_timeout(before)


def describe(store: Any) -> str:
    """Return where the store is, for messages."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return f"tcp://{store.host}:{store.port}"
    if isinstance(store, dist.FileStore):
        return f"file://{store.path}"
    return type(store).__name__


def unnumbered(store: Any) -> Any:
    """Take off the prefix with the number of init_rpc calls that init_rpc puts on.

    A worker that comes back, or was not part of every group before, has made more such calls than
    the others, or fewer: under that prefix they would never meet.
    """
    return store.underlying_store if isinstance(store, dist.PrefixStore) else store


def launcher_serves() -> bool:
    """Return whether torchrun serves the store, and no worker."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def serves_by_rank_0(store: Any) -> bool:
    """Return whether it is rank 0 of the group that keeps what is in the store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and not launcher_serves()
