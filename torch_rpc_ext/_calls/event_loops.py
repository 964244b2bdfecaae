"""Handing callables and results from other threads to an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch.futures import Future

T = TypeVar("T")


class Mailbox:
    """Hands callables to an event loop and wakes the loop once for many of them.

    Thread Safety: post() from any thread. The callables run in the loop, in the order of post().

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # A weak reference: _mailboxes keeps this object for as long as its key, the loop, lives.
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._posted: list[Callable[[], object]] = []

    def post(self, callback: Callable[[], object]) -> None:
        """Run the callback in the loop; drop the callback if the loop is closed."""
        with self._lock:
            self._posted.append(callback)
            if len(self._posted) > 1:
                return  # the first of them has woken the loop
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # closed
            # The callbacks hold the loop, which is the key of _mailboxes.
            self._take()

    def _take(self) -> list[Callable[[], object]]:
        with self._lock:
            posted, self._posted = self._posted, []
        return posted

    def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        for callback in self._take():
            # Not called from here, because an error of one callback would lose the later ones.
            loop.call_soon(callback)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
    weakref.WeakKeyDictionary()
)
_mailboxes_lock = threading.Lock()


def as_asyncio(future: Future[T]) -> asyncio.Future[T]:
    """Return an asyncio future that follows a future of torch, to be awaited in the running loop.

    ::

        total = await aio.as_asyncio(rpc.rpc_async("worker1", torch.add, args=(x, 1)))

    Args:
        future: a future of torch, such as rpc.rpc_async() returns. The value must be usable when
            the future is done, as CPU tensors are.

    Returns:
        A future of asyncio with the same result or error. Cancelling the returned future does not
        cancel `future`.

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
        # asyncio's futures refuse StopIteration. A coroutine that raises it gets a RuntimeError
        # too.
        stopped = RuntimeError("the remote function raised StopIteration")
        stopped.__cause__ = error
        waiter.set_exception(stopped)
    except Exception as error:  # noqa: BLE001  a remote function may raise anything
        waiter.set_exception(error)
