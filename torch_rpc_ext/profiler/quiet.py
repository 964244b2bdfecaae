"""Keeps Kineto, on which torch.profiler is built, from writing to the program's standard error.

A worker that is profiled from another one has not asked for such lines. Kineto writes two kinds:

- "ERROR: External init callback must run in same thread as registerClient", by C's stdio, when
  Kineto is first used in another thread than the one that imported torch; requests run in such a
  thread. The line is about a daemon that does not exist here.
- "USDT:...", by Kineto's logger, whenever a recording begins or ends.

Both are suppressed while a recording begins or ends. Lines that others write meanwhile are kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["first_use", "logger"]

_LIBRARY = Path(torch.__file__).resolve().parent / "lib" / "libtorch_cpu.so"
# Kineto's level of logging, an int.
_LEVEL = "_ZN9libkineto6Logger14severityLevel_E"
_NOTHING = 99  # above all levels
_ABOUT_THREADS = b"ERROR: External init callback must run in same thread as registerClient"
_STANDARD_ERROR = 2

_lock = threading.Lock()
_used = False


@contextlib.contextmanager
def first_use() -> Iterator[None]:
    """Suppress the line about threads within the block; does nothing but the first time."""
    global _used
    with _lock:
        if _used:
            yield
            return
        _used = True
        with _without_line(_ABOUT_THREADS):
            yield


@contextlib.contextmanager
def logger() -> Iterator[None]:
    """Silence Kineto's logger within the block; no effect where Kineto has another logger."""
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(_LIBRARY)), _LEVEL)
    except (OSError, ValueError):
        yield
        return
    before, level.value = level.value, _NOTHING
    try:
        yield
    finally:
        level.value = before


@contextlib.contextmanager
def _without_line(begin: bytes) -> Iterator[None]:
    """Drop lines with this beginning that are written to C's `stderr` within the block.

    Meanwhile the variable `stderr` refers to a stream into memory. The file descriptor is not
    changed, because Python, C++ and child processes use it.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        variable = ctypes.c_void_p.in_dll(libc, "stderr")
        file = os.memfd_create("torch_rpc_ext-stderr")
    except (OSError, ValueError):
        yield
        return
    libc.fdopen.restype = ctypes.c_void_p
    # Never closed, because another thread may still use the stream. A process makes only one.
    stream = ctypes.c_void_p(libc.fdopen(file, b"w"))
    before = variable.value

    def put_back() -> None:
        if variable.value == stream.value:
            variable.value = before

    os.register_at_fork(after_in_child=put_back)
    if stream.value is not None:
        variable.value = stream.value
    try:
        yield
    finally:
        put_back()
        libc.fflush(stream)
        written = os.pread(file, os.fstat(file).st_size, 0)
        kept = [line for line in written.splitlines(True) if not line.startswith(begin)]
        if kept:
            os.write(_STANDARD_ERROR, b"".join(kept))
