"""The connections of another process, ended from outside: what the kernel does when it kills it,
in that order and without its end."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

_PIDFD_GETFD = 438  # Linux 5.6, all architectures
_libc = ctypes.CDLL(None, use_errno=True)


def cut_connections(pid: int) -> int:
    """Shut down the TCP connections of a process.

    Args:
        pid: the process; this one must be permitted to trace it.

    Returns:
        How many there were.

    Raises:
        OSError: the process is gone, or may not be traced.
    """
    process = os.pidfd_open(pid)
    try:
        return sum(_cut(process, int(entry.name)) for entry in Path(f"/proc/{pid}/fd").iterdir())
    finally:
        os.close(process)


def _cut(process: int, number: int) -> bool:
    fd = _libc.syscall(_PIDFD_GETFD, process, number, 0)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)  # no socket
        return False
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False  # it listens, and goes on
        connection.shutdown(socket.SHUT_RDWR)
        return True
