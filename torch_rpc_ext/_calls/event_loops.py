"""From other threads into an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.futures import Future

T = TypeVar("T")


class Mailbox:
    """Hands callables to an event loop, with one wake-up for all that come until it runs.

    Thread Safety: post() from any thread. What is posted runs in the loop, in order.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weakly: the loop is the key under which as_asyncio() keeps this.
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._posted: list[Callable[[], Any]] = []

    def post(self, callback: Callable[[], Any]) -> None:
        """Run it in the loop; drop it if the loop is closed."""
        with self._lock:
            self._posted.append(callback)
            if len(self._posted) > 1:
                return  # the loop is awake already
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        loop = asyncio.get_running_loop()
        for callback in posted:
            # Each for itself, so that an error in one does not lose the others.
            loop.call_soon(callback)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
    weakref.WeakKeyDictionary()
)
_mailboxes_lock = threading.Lock()


def as_asyncio(future: Future[T]) -> asyncio.Future[T]:
    """Make a future of torch one that can be awaited in the running event loop.

    Args:
        future: such as of rpc.rpc_async(). Its value must be there when it is done, as it is with
            CPU tensors.

    Returns:
        A future of asyncio with the same result or error. Cancelling it does not cancel `future`.

    Raises:
        RuntimeError: no event loop is running.
    """
    loop = asyncio.get_running_loop()
    with _mailboxes_lock:
        mailbox = _mailboxes.get(loop)
        if mailbox is None:
            mailbox = _mailboxes[loop] = Mailbox(loop)
    waiter: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(lambda done: mailbox.post(partial(_settle, waiter, done)))
    return waiter


def _settle(waiter: asyncio.Future[T], done: Future[T]) -> None:
    if waiter.done():  # cancelled
        return
    try:
        waiter.set_result(done.wait())
    except StopIteration as error:
        # Which no future of asyncio takes: as in a coroutine that raises it.
        stopped = RuntimeError("the remote function raised StopIteration")
        stopped.__cause__ = error
        waiter.set_exception(stopped)
    except Exception as error:  # noqa: BLE001  whatever the remote function raised
        waiter.set_exception(error)
