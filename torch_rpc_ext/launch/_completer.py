"""Completing futures away from the thread that reads a worker's replies."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Completer:
    """Completes the calls of one worker, in threads of its own.

    Completing a future runs the user's done-callbacks, and these may block: they may wait for
    another call on the same worker. So a task never waits for a task before it: put() starts
    another thread when all threads are busy. Tasks begin in the order of put().

    Not a ThreadPoolExecutor: that has a largest number of threads, which blocked callbacks can use
    up, and the interpreter waits for its threads when the program ends.

    Owns: its threads. Thread Safety: any thread.

    Args:
        worker: the name of the worker.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._changed = threading.Condition()  # of the three that follow
        self._tasks: deque[Callable[[], None]] = deque()
        self._idle = 0  # threads that wait for a task
        self._ended = False
        self._start_thread()

    def put(self, task: Callable[[], None]) -> None:
        """Run a task that completes a call."""
        with self._changed:
            self._tasks.append(task)
            if len(self._tasks) <= self._idle:
                self._changed.notify()
                return
            try:
                self._start_thread()
            except RuntimeError:  # no more threads: the next thread that is free takes the task
                logger.warning("no thread for a call on %s", self._worker, exc_info=True)

    def end(self) -> None:
        """End the threads when all tasks are done."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _start_thread(self) -> None:
        # A daemon, because a callback that never returns must not hold up the program's end.
        threading.Thread(target=self._serve, name=f"calls-{self._worker}", daemon=True).start()

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException:
                # SystemExit in a callback, say: it must not end a thread that others count on.
                logger.warning("a callback of a call on %s failed", self._worker, exc_info=True)
            del task  # it holds the call's result

    def _next(self) -> Callable[[], None] | None:
        """Wait for a task and take it; return None when this thread is not needed any more."""
        with self._changed:
            if self._idle and not self._tasks:
                return None  # another thread waits already
            self._idle += 1
            self._changed.wait_for(lambda: self._tasks or self._ended)
            self._idle -= 1
            return self._tasks.popleft() if self._tasks else None
