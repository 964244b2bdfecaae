"""The mailbox of a stage: its neighbours put the values of a batch there."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch_rpc_ext._calls.device_futures import HandedOver

__all__ = ["Mailbox", "StoppedError"]


class StoppedError(Exception):
    """Nothing more will come: the caller has given the batch up, or is gone."""


class Mailbox:
    """Values of numbered batches, each under a key, in any order of arrival.

    Thread Safety: any thread. One batch is open at a time; values of later batches are kept, values
    of earlier ones are dropped. The current streams of the thread that calls take() wait for those
    of the thread that called put().
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[tuple[int, Any], HandedOver[Any]] = {}
        self._batch = 0
        self._stopped: dict[int, str] = {}

    def open(self, batch: int) -> None:
        """Begin a batch and drop what is left of earlier ones."""
        with self._changed:
            self._batch = batch
            self._values = {k: v for k, v in self._values.items() if k[0] >= batch}
            self._stopped = {k: v for k, v in self._stopped.items() if k >= batch}

    def put(self, batch: int, key: Any, value: Any) -> None:
        """Leave a value, whose tensors the current streams of this thread make."""
        left = HandedOver(value)
        with self._changed:
            if batch >= self._batch:
                self._values[batch, key] = left
                self._changed.notify_all()

    def take(self, batch: int, key: Any, seconds: float) -> Any:
        """Wait for a value and remove it. The current streams of this thread can use its tensors.

        Args:
            batch: the open one.
            key: of the value.
            seconds: how long to wait; 0 for ever.

        Raises:
            StoppedError: stop() was called for the batch, or nothing came in time.
        """
        end = time.monotonic() + seconds if seconds > 0 else None
        with self._changed:
            while (batch, key) not in self._values:
                if batch in self._stopped:
                    raise StoppedError(self._stopped[batch])
                patience = None if end is None else end - time.monotonic()
                if patience is not None and patience <= 0:
                    raise StoppedError(f"nothing came within {seconds:g} s")
                self._changed.wait(patience)
            left = self._values.pop((batch, key))
        return left.take()

    def stopped(self, batch: int) -> str | None:
        """Return why stop() was called for the batch, None where it was not."""
        with self._changed:
            return self._stopped.get(batch)

    def stop(self, batch: int, reason: str) -> None:
        """End all waits for values of the batch."""
        with self._changed:
            if batch >= self._batch:
                self._stopped[batch] = reason
                self._changed.notify_all()
