"""The connections of another process, ended from outside: what the kernel does when it kills it,
in that order and without its end."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable
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
    return _each_connection(pid, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def set_user_timeout(pid: int, seconds: float) -> int:
    """Have the kernel give up the TCP connections of a process where nothing is acknowledged.

    Args:
        pid: the process; this one must be permitted to trace it.
        seconds: without an acknowledgement (TCP_USER_TIMEOUT, see tcp(7)).

    Returns:
        How many there were.

    Raises:
        OSError: the process is gone, or may not be traced.
    """
    return _each_connection(
        pid,
        lambda connection: connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000)
        ),
    )


def _each_connection(pid: int, act: Callable[[socket.socket], None]) -> int:
    process = os.pidfd_open(pid)
    try:
        numbers = [int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        return sum(_act_on(process, number, act) for number in numbers)
    finally:
        os.close(process)


def _act_on(process: int, number: int, act: Callable[[socket.socket], None]) -> bool:
    fd = _libc.syscall(_PIDFD_GETFD, process, number, 0)
    if fd < 0:
        code = ctypes.get_errno()
        if code == errno.EBADF:
            return False  # closed since it was listed
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
        act(connection)
        return True
