"""The value of a future that fails, also for the caller of a function that returns the future."""

from __future__ import annotations

import pickle
import traceback
from typing import Any


class FailedResult:
    """The value of a future whose wait() and value() raise.

    Our agent sends the error in the place of this value (payloads.py). Pickled by another back end,
    this value becomes upstream's RemoteException, which raises the error at the caller. torch
    pickles it too, to find the tensors in the value of a future with devices.

    Attributes:
        error: what wait() and value() raise.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, tuple[str, type[Exception]]]:
        from torch.distributed.rpc import internal as _untyped_internal

        internal: Any = _untyped_internal  # upstream's functions have no types
        # An error of another worker may have a class that exceptions.also_runtime_error() has made.
        # Such a class cannot be pickled; the class that it derives from, of the same name, can.
        cls: Any = type(getattr(self.error, "_remote_original", self.error))
        try:
            pickle.dumps(cls)
        except Exception:  # noqa: BLE001  a class within a function, for example
            cls = RuntimeError
        return internal.RemoteException, ("".join(traceback.format_exception(self.error)), cls)


def as_exception(error: BaseException) -> Exception:
    """Return an exception itself, and a RuntimeError in place of what is no Exception.

    A signal handler may have raised KeyboardInterrupt or SystemExit while a future was completed.
    Whoever waits for that future may be another thread, which must not end by it.
    """
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
