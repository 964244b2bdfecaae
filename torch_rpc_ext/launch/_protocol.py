"""What passes between a group's process and a worker's, over a pipe of their own.

A request is ``(function, args, kwargs)``, a reply ``(ok, value)``, both pickled by cloudpickle: by
value what is defined in a notebook or a script, by reference what can be imported.
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

#: Instead of a request: end after what has been asked for.
END = b""


def dump(value: Any) -> bytes:
    """Return the value pickled."""
    data: bytes = cloudpickle.dumps(value)
    return data


def load(data: bytes) -> Any:
    """Return what dump() was given. Only for bytes from our own pipe: it runs what they say."""
    return pickle.loads(data)


def dump_error(error: BaseException, worker: str) -> bytes:
    """Return the reply that raises ``error`` at the caller, with its traceback here as a note.

    An error that cannot be pickled becomes a RuntimeError with its type and text.
    """
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        error.add_note(f"on {worker}:\n{text}")
        data = dump((False, error))
        load(data)
    except Exception:  # noqa: BLE001  whatever the exception's own pickling does
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(f"on {worker}:\n{text}")
        data = dump((False, plain))
    return data
