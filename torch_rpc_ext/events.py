"""Events of the other workers of the group: lost, left, joined, returned.

::

    def replan(event: WorkerEvent) -> None:
        print(event.worker, event.kind, event.reason)  # worker3 lost the process died

    subscription = torch_rpc_ext.on_worker_event(replan)

    async for event in torch_rpc_ext.worker_events():
        ...

A subscription connects this worker to all others, because a worker's death is noticed by the end of
its connection. A new subscriber is first told which workers are lost at that moment. The events of
a worker come in the order in which they happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple

from torch_rpc_ext._group import dynamic, sessions
from torch_rpc_ext._native import loader

logger = logging.getLogger(__name__)

__all__ = ["Subscription", "WorkerEvent", "WorkerEvents", "on_worker_event", "worker_events"]

# How often this worker tries again to reach a worker that is lost, s.
_TRY_EVERY = 2.0
# How long the thread waits for an event while no worker is lost, s; an event ends the wait.
_LONG = 3600.0


class WorkerEvent(NamedTuple):
    """Something that happened to a worker.

    Attributes:
        kind: ``lost``: the worker's process died, or the worker cannot be reached any more.
            ``left``: the worker called rpc.shutdown(). ``joined``: the worker is new in a dynamic
            group. ``returned``: the worker was lost, and has been started again or can be reached
            again.
        worker: the name of the worker.
        reason: what was noticed, as text for people.

    An event is a tuple::

        kind, worker, reason = event
    """

    kind: Literal["joined", "left", "lost", "returned"]
    worker: str
    reason: str


Callback = Callable[[WorkerEvent], object]


class Subscription:
    """A callback is told of events until remove(), or until the end of a ``with`` block.

    ::

        with torch_rpc_ext.on_worker_event(print):  # makes a Subscription
            train()

    Thread Safety: any thread.
    """

    def __init__(self, hub: _Hub, number: int) -> None:
        self._hub, self._number = hub, number

    def remove(self) -> None:
        """End the subscription. A callback that is running goes on to its end. Idempotent."""
        self._hub.remove(self._number)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.remove()


class WorkerEvents:
    """An asynchronous iterator over events; it ends when RPC ends on this worker.

    ::

        events = torch_rpc_ext.worker_events()  # makes WorkerEvents
        async for event in events:
            if event.kind == "lost":
                break
        events.close()

    Events are kept until they are taken. Thread Safety: the event loop in which it was made.
    """

    def __init__(self) -> None:
        # The hub refers to the queue, not to this object: so this object can be collected, which
        # ends the subscription.
        self._queue: asyncio.Queue[WorkerEvent | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        put = partial(_put, loop, self._queue)
        subscription = _hub().subscribe(put, at_end=partial(put, None))
        self._finalizer = weakref.finalize(self, subscription.remove)

    def __aiter__(self) -> WorkerEvents:
        return self

    async def __anext__(self) -> WorkerEvent:
        event = await self._queue.get()
        if event is None:
            self._queue.put_nowait(None)  # a further __anext__() ends too
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        """End the subscription; the iteration ends after the events that are kept. Idempotent."""
        self._finalizer()
        self._queue.put_nowait(None)


def _put(
    loop: asyncio.AbstractEventLoop,
    queue: asyncio.Queue[WorkerEvent | None],
    event: WorkerEvent | None,
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(queue.put_nowait, event)


def on_worker_event(callback: Callback) -> Subscription:
    """Have a callback run at each event.

    Callbacks run one after the other on a thread of their own. An exception of a callback is
    logged and has no other effect; a callback that takes long delays the next events.

    Args:
        callback: takes a WorkerEvent.

    Returns:
        The subscription; its remove() ends it, and rpc.shutdown() does.

    Raises:
        TypeError: the callback cannot be called.
        RuntimeError: RPC has not been initialized on UCX.
    """
    if not callable(callback):
        raise TypeError(f"callback must be a function of a WorkerEvent, got {callback!r}")
    return _hub().subscribe(callback)


def worker_events() -> WorkerEvents:
    """Return an iterator over events, for ``async for``.

    Events are kept from this call on. The iterator ends when RPC ends on this worker.

    Raises:
        RuntimeError: no event loop is running, or RPC has not been initialized on UCX.
    """
    return WorkerEvents()


def follow_members(session: sessions.Session) -> None:
    """Let this worker of a dynamic group drop members that have left without calling this worker.

    A worker that leaves calls the others, but a busy one may never run the call. The goodbye that
    ends the connection arrives all the same, as the event "left".
    """

    # How many goodbyes no reading of the directory has answered yet; guarded by the lock.
    goodbyes = 0

    def follow(event: WorkerEvent) -> None:
        nonlocal goodbyes
        if event.kind == "left" and event.worker in session.members:
            with session.lock:
                goodbyes += 1
                if goodbyes > 1:
                    return  # the thread will read once more
                try:
                    # On a thread of its own: no event waits for the store, which may not answer.
                    session.start_thread("rpc-members", read)
                except RuntimeError:
                    goodbyes = 0  # the next goodbye tries again
                    raise

    def read() -> None:
        nonlocal goodbyes
        answered = 0
        while True:
            with session.lock:
                goodbyes -= answered
                answered = goodbyes
            if not answered:
                return
            dynamic.drop_departed(session)

    _hub().subscribe(follow, connect=False)


class _Subscriber(NamedTuple):
    callback: Callback
    at_end: Callable[[], object]
    connect: bool


class _Hub:
    """Takes the agent's events and tells the subscribers of one session.

    Owns: a thread, from the first subscription to the end of the agent.
    Thread Safety: subscribe() and remove() from any thread; the hub's thread runs the rest.
    """

    def __init__(self, session: sessions.Session) -> None:
        self._native, self._agent, self._session = loader.load(), session.agent, session
        # May be locked twice: garbage that is collected meanwhile may hold a subscription.
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._subscribers: dict[int, _Subscriber] = {}
        self._new: list[int] = []  # subscribers that have not been told yet who is lost
        self._lost: dict[str, WorkerEvent] = {}
        self._connects = False  # whether a subscriber wants connections to all other workers
        self._started, self._ended = False, False

    def subscribe(
        self,
        callback: Callback,
        at_end: Callable[[], object] = lambda: None,
        *,
        connect: bool = True,
    ) -> Subscription:
        with self._lock:
            number = next(self._numbers)
            self._subscribers[number] = _Subscriber(callback, at_end, connect)
            self._new.append(number)
            ended = self._ended
            if not self._started:
                self._started = self._session.start_thread("rpc-events", self._run)
                ended = not self._started
        if ended:
            at_end()
        # The agent answers with the event "began", at which the thread tells this subscriber who is
        # lost; all later events are told to this subscriber too.
        self._native.begin_worker_events(self._agent)
        return Subscription(self, number)

    def remove(self, number: int) -> None:
        with self._lock:
            self._subscribers.pop(number, None)

    def _run(self) -> None:
        while True:
            patience = _TRY_EVERY if self._lost and self._connects else _LONG
            found = self._native.next_worker_event(self._agent, patience)
            if found is None:
                self._watch_the_lost()
                continue
            kind, worker, reason = found
            if kind == "ended":
                break
            if kind == "began":
                self._welcome()
            else:
                self._handle(WorkerEvent(kind, worker, reason))
        with self._lock:
            self._ended = True
            subscribers = list(self._subscribers.values())
        for subscriber in subscribers:
            subscriber.at_end()

    def _welcome(self) -> None:
        """Tell new subscribers who is lost."""
        with self._lock:
            numbers, self._new = self._new, []
            connect = any(one.connect for one in self._subscribers.values())
        if connect and not self._connects:
            self._connects = True
            self._watch(info.id for info in self._agent.get_worker_infos())
        for number in numbers:
            for event in self._lost.values():
                self._tell(number, event)

    def _handle(self, event: WorkerEvent) -> None:
        if event.kind == "lost":
            self._lost[event.worker] = event
        else:
            self._lost.pop(event.worker, None)
        if event.kind in ("joined", "returned") and self._connects:
            with contextlib.suppress(RuntimeError):  # the worker has left meanwhile
                self._watch([self._agent.get_worker_info(event.worker).id])
        with self._lock:
            numbers = [number for number in list(self._subscribers) if number not in self._new]
        for number in numbers:
            self._tell(number, event)

    def _tell(self, number: int, event: WorkerEvent) -> None:
        with self._lock:
            subscriber = self._subscribers.get(number)
        if subscriber is None:
            return
        try:
            subscriber.callback(event)
        except BaseException:  # SystemExit too must not end the thread
            logger.exception("a callback for %s %s raised", event.worker, event.kind)

    def _watch_the_lost(self) -> None:
        for name in list(self._lost) if self._connects else ():
            with contextlib.suppress(RuntimeError):
                self._watch([self._agent.get_worker_info(name).id])

    def _watch(self, ids: Any) -> None:
        me = self._agent.get_worker_info().id
        for rank in ids:
            if rank != me:
                with contextlib.suppress(RuntimeError):  # the worker has left, or RPC ends
                    self._agent.watch(rank)


def _hub() -> _Hub:
    session = sessions.require()
    if not session.agent.started:
        raise RuntimeError("RPC does not run yet: subscribe after init_rpc() has returned.")
    with session.lock:
        if session.events is None:
            session.events = _Hub(session)
        hub: _Hub = session.events
        return hub
