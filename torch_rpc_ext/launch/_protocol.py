"""The messages between the process of a group and the process of a worker, over a pipe.

A message begins with the key of a request. Behind the key a request has ``(function, args,
kwargs)``, and a reply ``(True, result)`` or ``(False, (error, text, note))``; see dump_error().
cloudpickle pickles both: functions and classes of a notebook or a script by value, those that can
be imported by name. A key alone interrupts its request.
"""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import linecache
import os
import pickle
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

try:
    import cloudpickle  # type: ignore[import-untyped]
except ImportError as problem:
    raise ImportError(
        "torch_rpc_ext.launch needs cloudpickle: pip install cloudpickle"
    ) from problem

#: In place of a request: end when all earlier requests are done.
END = b""

_KEY_SIZE = 8
_numbers = itertools.count()


def new_key() -> bytes:
    """Return a key that no other request of this process has."""
    return next(_numbers).to_bytes(_KEY_SIZE)


def key_of(message: bytes) -> bytes:
    """Return the key of a request, a reply or an interrupt."""
    return message[:_KEY_SIZE]


def is_interrupt(message: bytes) -> bool:
    """Return whether a message to a worker interrupts a request."""
    return len(message) == _KEY_SIZE


def dump(key: bytes, value: Any) -> bytes:
    """Return the message with a key and a pickled value."""
    data = io.BytesIO()
    data.write(key)
    _Pickler(data).dump(value)
    return data.getvalue()


def load(message: bytes) -> Any:
    """Return the value of dump(). Only for bytes from our own pipe: a pickle can run any code."""
    return pickle.loads(memoryview(message)[_KEY_SIZE:])


def dump_error(key: bytes, error: BaseException, worker: str) -> bytes:
    """Return the reply that raises ``error`` at the caller, with the traceback as a note.

    The reply holds the pickled error, the error's type and text, and the note, side by side. So the
    text and the note arrive also when the error cannot be pickled here or loaded there.
    """
    trace = traceback.TracebackException.from_exception(error)
    note = f"on {worker}:\n" + "".join(trace.format()).rstrip()
    # Not str(error), because a __str__ may raise. Only the first line, because the error's own
    # notes follow, which are in the note as well. A SyntaxError's lines begin with the place.
    lines = trace.format_exception_only()
    text = "".join(lines if isinstance(error, SyntaxError) else [next(lines)]).rstrip()
    data: bytes | None
    try:
        data = dump(b"", error)
    except BaseException:  # noqa: BLE001  pickling a class of a user may raise anything
        data = None
    return dump(key, (False, (data, text, note)))


def load_reply(message: bytes) -> tuple[bool, Any]:
    """Return whether the function returned, and what it returned or raised.

    An error that cannot be loaded becomes a RuntimeError with the error's type and text.
    """
    ok, value = load(message)
    return (True, value) if ok else (False, _load_error(*value))


def _load_error(data: bytes | None, text: str, note: str) -> BaseException:
    if data is not None:
        with contextlib.suppress(BaseException):  # loading a class of a user may raise anything
            error = pickle.loads(data)
            if isinstance(error, BaseException):
                error.add_note(note)
                return error
    plain = RuntimeError(text)
    plain.add_note(note)
    return plain


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    name = code.co_filename
    # A cell of a notebook is in no file. The lines are in the cache that traceback reads.
    lines = [] if os.path.exists(name) else linecache.getlines(name)
    return _make_code, (make, parts, name, lines)


def _make_code(
    make: Callable[..., CodeType], parts: tuple[Any, ...], name: str, lines: list[str]
) -> CodeType:
    if lines:
        # Without a time of change, the cache keeps the lines.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return make(*parts).replace(co_filename=name)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Also pickles where code comes from, so that a traceback of the worker shows the lines.

    From version 3.1.3 on cloudpickle pickles code without the name of its file.
    """

    dispatch_table = collections.ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )
