"""Attempts of a call one after the other, without a thread that waits for them.

tenacity decides what comes next: an attempt, a pause or the end. This module begins that step and
returns; the thread that completes the attempt's future, or ends the pause, asks tenacity for the
next step.
"""

from __future__ import annotations

import contextlib
import contextvars
import heapq
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tenacity
from torch.futures import Future

from torch_rpc_ext._base.failed_result import as_exception
from torch_rpc_ext._calls.device_futures import new_future
from torch_rpc_ext._calls.failed_futures import fail
from torch_rpc_ext._upstream import thread_state


def begin(arguments: dict[str, Any], call: Callable[[], Future[Any]]) -> Future[Any]:
    """Begin the first attempt.

    Args:
        arguments: for tenacity.Retrying.
        call: makes an attempt; an exception that it raises counts as the attempt's error.

    Returns:
        A future of the last attempt's result or error.
    """
    attempts = _Attempts(arguments, call)
    attempts.go_on()
    return attempts.future


class _Attempts:
    """The attempts of one call.

    Thread Safety: go_on() runs in one thread at a time: first the caller's, then whichever thread
    completes the attempt's future or ends the pause.
    """

    def __init__(self, arguments: dict[str, Any], call: Callable[[], Future[Any]]) -> None:
        self.future = new_future()
        self._call = call
        self._retrying = tenacity.Retrying(**arguments)
        self._state = tenacity.RetryCallState(self._retrying, fn=None, args=(), kwargs={})

    def go_on(self) -> None:
        while True:
            # tenacity keeps statistics for each thread, and begin() creates those of this thread.
            # Nobody reads them, but iter() fails without them.
            self._retrying.begin()
            try:
                step = self._retrying.iter(self._state)
            except Exception as error:  # noqa: BLE001  the last attempt's error
                fail(self.future, error)
                return
            if isinstance(step, tenacity.DoSleep):
                self._state.prepare_for_next_attempt()
                _pauses.end_after(float(step), self._go_on_elsewhere)
                return
            if not isinstance(step, tenacity.DoAttempt):
                self.future.set_result(step)
                return
            try:
                attempt = self._call()
            except Exception:  # noqa: BLE001  tenacity decides by the error's class
                self._state.set_exception(sys.exc_info())  # type: ignore[arg-type]
                continue
            attempt.add_done_callback(self._go_on_elsewhere)
            return

    def _go_on_elsewhere(self, attempt: Future[Any] | None = None) -> None:
        """Go on in a thread that is not the caller's: raise nothing, and let the future raise.

        An error that is no Exception, such as SystemExit, arrives as RuntimeError.

        Args:
            attempt: the future of an attempt that has just ended.
        """
        try:
            if attempt is not None:
                self._note(attempt)
            self.go_on()
        except BaseException as error:  # noqa: BLE001  the end of these attempts, not of the thread
            fail(self.future, as_exception(error))

    def _note(self, attempt: Future[Any]) -> None:
        try:
            result = attempt.value()
        except Exception:  # noqa: BLE001  tenacity decides by the error's class
            self._state.set_exception(sys.exc_info())  # type: ignore[arg-type]
        else:
            self._state.set_result(result)


class _Pauses:
    """Runs callables when their pauses are over.

    A callable may take long: an attempt may wait for room, and the last attempt's error runs the
    callbacks of the user, which may wait for another pause. So one thread always waits for the next
    end of a pause: before a thread runs a callable, it starts another thread if none waits.

    Owns: threads, from the first pause on: up to two that wait, and those that run callables.
    Thread Safety: any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._order = itertools.count()
        # (end of the pause on time.monotonic(), serial number, callable). By the serial numbers
        # heapq never compares two callables.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting = 0  # threads

    def end_after(self, seconds: float, callback: Callable[[], None]) -> None:
        with self._changed:
            if self._waiting == 0:
                self._start()
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), callback))
            self._changed.notify()

    def _start(self) -> None:
        threading.Thread(target=self._run, name="rpc-retry", daemon=True).start()
        self._waiting += 1  # the thread does, as soon as this one has released the lock

    def _run(self) -> None:
        waits = True
        while waits:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    left = self._due[0][0] - time.monotonic() if self._due else math.inf
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                _, _, callback = heapq.heappop(self._due)
                self._waiting -= 1
                if self._waiting == 0:
                    with contextlib.suppress(RuntimeError):  # no thread can be started
                        self._start()
            # What the user's code sets in a context variable, or in the state that torch keeps for
            # each thread, does not reach the next call.
            contextvars.Context().run(callback)
            thread_state.take()
            del callback
            with self._changed:
                waits = self._waiting < 2
                self._waiting += waits


_pauses = _Pauses()


def _forget_pauses() -> None:
    global _pauses
    _pauses = _Pauses()


# After a fork the child has neither the parent's thread nor its calls.
os.register_at_fork(after_in_child=_forget_pauses)
