"""The messages between the process of a group and the process of a worker, over a pipe.

A request is ``(function, args, kwargs)``, a reply ``(ok, value)``. cloudpickle pickles both:
functions and classes of a notebook or a script by value, those that can be imported by name.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any

try:
    import cloudpickle  # type: ignore[import-untyped]
except ImportError as problem:
    raise ImportError(
        "torch_rpc_ext.launch needs cloudpickle: pip install 'torch-rpc-ext[launch]'"
    ) from problem

#: In place of a request: end when all earlier requests are done.
END = b""


def dump(value: Any) -> bytes:
    """Return the value pickled."""
    data: bytes = cloudpickle.dumps(value)
    return data


def load(data: bytes) -> Any:
    """Undo dump(). Only for bytes from our own pipe: a pickle can run any code."""
    return pickle.loads(data)


def dump_error(error: BaseException, worker: str) -> bytes:
    """Return the reply that raises ``error`` at the caller, with the traceback as a note.

    An error that cannot be pickled becomes a RuntimeError with its type and text.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        error.add_note(f"on {worker}:\n{text}")
        data = dump((False, error))
        load(data)
    except Exception:  # noqa: BLE001  pickling a class of a user may raise anything
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(f"on {worker}:\n{text}")
        data = dump((False, plain))
    return data
