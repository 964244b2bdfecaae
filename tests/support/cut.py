"""Ends the TCP connections of another process from outside, as the kernel does when the process is
killed, but without killing it; and looks at them."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

_PIDFD_GETFD = 438  # Linux 5.6, all architectures
# tcpi_bytes_received of struct tcp_info (linux/tcp.h): how many bytes come before it.
_BYTES_RECEIVED = 128
_libc = ctypes.CDLL(None, use_errno=True)


def cut_connections(pid: int) -> int:
    """Shut down the TCP connections of a process.

    Args:
        pid: the process; the caller must be permitted to trace it.

    Returns:
        The number of connections.

    Raises:
        OSError: the process is gone, or may not be traced.
    """
    return _each_connection(pid, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def set_user_timeout(pid: int, seconds: float) -> int:
    """Make the kernel give up those TCP connections of a process whose data is not acknowledged.

    Args:
        pid: the process; the caller must be permitted to trace it.
        seconds: the time without an acknowledgement (TCP_USER_TIMEOUT, see tcp(7)).

    Returns:
        The number of connections.

    Raises:
        OSError: the process is gone, or may not be traced.
    """
    return _each_connection(
        pid,
        lambda connection: connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000)
        ),
    )


def bytes_received(pid: int) -> int:
    """How many bytes the kernel has received for the TCP connections that a process has now.

    Args:
        pid: the process, which may be stopped; the caller must be permitted to trace it.

    Raises:
        OSError: the process is gone, or may not be traced.
    """
    counts = []

    def look(connection: socket.socket) -> None:
        size = _BYTES_RECEIVED + 8
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        counts.append(struct.unpack_from("Q", information, _BYTES_RECEIVED)[0])

    _each_connection(pid, look)
    return sum(counts)


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
            return False  # the descriptor was closed after it was listed
        raise OSError(code, os.strerror(code))
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)  # not a socket
        return False
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False  # a listening socket stays as it is
        act(connection)
        return True
