"""A limit that no RPC over TCP can beat between two hosts: a call's bytes by a blocking socket.

Each side sleeps in one system call until all bytes are there. Only sizes are serialised; there are
no time-outs, no errors and no authentication.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.backends.flat import Buffer, unpack

_SIZE = struct.Struct("<Q")
_JOINED = 65_536  # bytes up to which one system call sends all parts
_PATIENCE = 60.0  # s for the other worker to appear


class SocketChannel:
    """One side of a connection, and memory for what arrives.

    Thread Safety: one thread at a time.
    """

    window = 1  # asynchronous calls under way: both sides could wait until the other one reads

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.memory = self.arrived = np.empty(0, np.uint8)
        self.unanswered: deque[Any] = deque()

    def send(self, parts: list[Buffer]) -> None:
        """Send what pack() made."""
        size = sum(memoryview(part).nbytes for part in parts)
        if size <= _JOINED:
            self.connection.sendall(b"".join([_SIZE.pack(size), *parts]))
            return
        self.connection.sendall(_SIZE.pack(size), socket.MSG_MORE)
        for part in parts:
            self.connection.sendall(part)

    def hand_over(self) -> None:
        """Send back what came last, which the function has changed in place."""
        self.send([self.arrived.data])

    def receive(self) -> tuple[str, list[Any]]:
        """Return what unpack() returns; the next message uses the same memory again."""
        head = np.empty(_SIZE.size, np.uint8)
        self._fill(head)
        (size,) = _SIZE.unpack(head)
        if size > self.memory.size:
            self.memory = np.empty(size, np.uint8)
        self.arrived = self.memory[:size]
        self._fill(self.arrived)
        return unpack(self.arrived)

    def _fill(self, memory: npt.NDArray[np.uint8]) -> None:
        view = memory.data
        while view:
            got = self.connection.recv_into(view, flags=socket.MSG_WAITALL)
            if not got:
                raise EOFError
            view = view[got:]


def listen(address: str, path: str) -> socket.socket:
    """Listen, and write the address to a file that both hosts see."""
    listener = socket.create_server((address, 0))
    with open(path + ".new", "w") as file:
        file.write(f"{address} {listener.getsockname()[1]}")
    os.rename(path + ".new", path)
    return listener


def wait_for(path: str) -> None:
    """Wait until the other worker has made the file."""
    deadline = time.monotonic() + _PATIENCE
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the callee has not started in {_PATIENCE:.0f} s")
        time.sleep(0.001)


def connect(path: str) -> SocketChannel:
    """Wait for the file, and connect to the address in it."""
    wait_for(path)
    with open(path) as file:
        address, port = file.read().split()
    return SocketChannel(socket.create_connection((address, int(port))))
