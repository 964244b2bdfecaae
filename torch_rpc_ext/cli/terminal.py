"""Single key presses from the terminal, without Enter."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

__all__ = ["keys"]


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Read single keys within the block; afterwards restore the terminal.

    Yields:
        A function that waits for a key, at most the given time, s, and returns the key; '' for
        none. At the end of the input the function returns 'q'.
    """
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    # Ctrl-C stays a signal in this mode.
    tty.setcbreak(handle)
    try:
        yield lambda seconds: _read(handle, seconds)
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _read(handle: int, seconds: float) -> str:
    ready, _, _ = select.select([handle], [], [], seconds)
    if not ready:
        return ""
    return os.read(handle, 1).decode(errors="replace") or "q"
