"""A limit that no RPC can beat: one plain copy of a call's bytes, and wake-ups by pipes.

A call copies its arguments into memory that caller and callee have both mapped, wakes the callee
with a byte, runs the function on the arguments where they are, and wakes the caller with a byte.
Small arguments travel in the pipe. A result that is the argument stays where it is; another result
is copied there. Only sizes are serialised; there are no time-outs and no errors. Between two hosts
a blocking socket is used (limit_network.py).
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from benchmarks.backends.flat import Buffer, as_arguments, as_result, pack, unpack
from benchmarks.backends.interface import CALLERS, HOSTS, Backend, Pending, Place
from benchmarks.backends.limit_network import SocketChannel, connect, listen, wait_for
from benchmarks.functions import FUNCTIONS

Bytes = npt.NDArray[np.uint8]
Room = tuple[int, int]  # a part of the memory: (begin, size), bytes

_INLINE = 4000  # bytes; with the head less than PIPE_BUF, the largest packet of a pipe
_HEAD = struct.Struct("<QQ")  # (begin in the memory, size); size 0: the message follows the head
_LINE = 64  # bytes; elements begin at a cache line, as those of allocators do
_PAGE = 2 << 20  # bytes of a huge page


class Limit(Backend):
    """The limit. Each thread has channels of its own, so no call waits for a lock."""

    name = "limit"
    functions: ClassVar[frozenset[str]] = frozenset(FUNCTIONS)
    offers = frozenset({CALLERS, HOSTS})

    def start(self, place: Place) -> None:
        self.place, self.local = place, threading.local()
        self.free: dict[int, list[_Caller | SocketChannel]] = {
            rank: [] for rank in range(place.size)
        }
        path = _path(place, place.rank)
        self.listener = listen(place.address, path) if place.address else _listen(path)
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self.listener.close()

    def call(self, to: int, function: str, *arguments: Any) -> Any:
        try:
            channel = self.free[to].pop()
        except IndexError:
            channel = self._connect(to)
        channel.send(pack(function, arguments))
        answer = as_result(channel.receive()[1])
        self.free[to].append(channel)
        return answer

    def call_async(self, to: int, function: str, *arguments: Any) -> Pending:
        return _Pending(self._channel(to), pack(function, arguments))

    def _connect(self, to: int) -> _Caller | SocketChannel:
        path = _path(self.place, to)
        return connect(path) if self.place.address else _connect(path)

    def when_done(self, pending: Any, then: Callable[[], None]) -> None:
        """Call `then` when wait() has taken the answer: no thread takes answers before."""
        pending.then = then

    def _channel(self, to: int) -> _Caller | SocketChannel:
        # A channel of this thread only, so that answers come in the order of its calls.
        channels = self.local.__dict__.setdefault("channels", {})
        if to not in channels:
            channels[to] = self._connect(to)
        channel: _Caller | SocketChannel = channels[to]
        return channel

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # stopped
                return
            if self.place.address:
                _serve_in_thread(SocketChannel(connection))
                continue
            with connection:
                _, (inbox, outbox, file), _, _ = socket.recv_fds(connection, 1, 3)
            _serve_in_thread(_Callee(inbox, outbox, file))


class _Channel:
    """One side of two pipes and of memory that both sides have mapped.

    Thread Safety: one thread at a time.

    Args:
        inbox, outbox: ends of pipes in packet mode.
        file: the memory; it grows.
    """

    def __init__(self, inbox: int, outbox: int, file: int) -> None:
        self.inbox, self.outbox, self.file = inbox, outbox, file
        self.mapped: Bytes = np.empty(0, np.uint8)

    def read(self) -> tuple[bytes, Buffer]:
        """Return the next packet, and its message, which is in the packet or in the memory."""
        packet = os.read(self.inbox, _HEAD.size + _INLINE)
        if not packet:
            raise EOFError
        begin, size = _HEAD.unpack_from(packet)
        return packet, self.at(begin, size) if size else memoryview(packet)[_HEAD.size :]

    def write(self, parts: list[Buffer]) -> None:
        """Send a message within the packet."""
        os.write(self.outbox, b"".join([_HEAD.pack(0, 0), *parts]))

    def put(self, parts: list[Buffer], size: int, room: Room) -> None:
        """Copy a message into this part of the memory, and send where it is."""
        begin = end = room[0] + -(room[0] + len(parts[0])) % _LINE
        if begin + size > sum(room):
            raise ValueError(f"a result of {size} bytes has no room in its call's {room[1]}")
        for part in parts:
            np.copyto(self.at(end, len(part)), np.frombuffer(part, np.uint8))
            end += len(part)
        os.write(self.outbox, _HEAD.pack(begin, size))

    def at(self, begin: int, size: int) -> Bytes:
        """Return a part of the memory."""
        if begin + size > self.mapped.size:
            memory = mmap.mmap(self.file, 0)  # the file as it is now
            memory.madvise(mmap.MADV_HUGEPAGE)
            self.mapped = np.frombuffer(memory, np.uint8)
        return self.mapped[begin : begin + size]


class _Caller(_Channel):
    """The side that decides where in the memory a call and its answer are.

    The memory of an answer is not used again while anything refers to the answer. So a caller that
    drops each answer gets the same memory, warm in the cache, for all calls.
    """

    window = 12  # asynchronous calls under way: a pipe in packet mode has room for 16

    def __init__(self, inbox: int, outbox: int, file: int) -> None:
        super().__init__(inbox, outbox, file)
        self.end = 0  # of the memory
        self.free: list[Room] = []
        self.taken: deque[Room | None] = deque()  # by the calls under way
        self.unanswered: deque[_Pending] = deque()

    def send(self, parts: list[Buffer]) -> None:
        """Send what pack() made."""
        size = sum(map(len, parts))
        if size <= _INLINE:
            self.taken.append(None)
            self.write(parts)
        else:
            room = self._take(size + _LINE)
            self.taken.append(room)
            self.put(parts, size, room)

    def receive(self) -> tuple[str, list[Any]]:
        """Return what unpack() does of the next answer."""
        _, message = self.read()
        room = self.taken.popleft()
        if room is not None and isinstance(message, np.ndarray):
            weakref.finalize(message, self.free.append, room)  # the tensors refer to it
        elif room is not None:
            self.free.append(room)
        return unpack(message)

    def _take(self, size: int) -> Room:
        fitting = [room for room in reversed(self.free) if room[1] >= size]
        if fitting:
            room = min(fitting, key=lambda one: one[1])  # the smallest that fits
            self.free.remove(room)
            return room
        room = self.end, -(-size // _PAGE) * _PAGE
        self.end += room[1]
        os.ftruncate(self.file, self.end)
        return room


class _Callee(_Channel):
    """The side that writes an answer to the memory of its call."""

    def receive(self) -> tuple[str, list[Any]]:
        """Return what unpack() does of the next call."""
        self.packet, message = self.read()
        return unpack(message)

    def send(self, parts: list[Buffer]) -> None:
        """Answer with what pack() made of a result that is elsewhere, and no larger than the
        arguments."""
        size = sum(map(len, parts))
        if size <= _INLINE:
            self.write(parts)
        else:
            self.put(parts, size, _HEAD.unpack_from(self.packet))

    def hand_over(self) -> None:
        """Answer with the memory of the call, in which the function has changed the argument."""
        os.write(self.outbox, self.packet)


class _Pending:
    """A call that was sent, and its answer once read; answers come in the order of the calls."""

    def __init__(self, channel: _Caller | SocketChannel, parts: list[Buffer]) -> None:
        self.channel, self.answer, self.there = channel, None, False
        self.then: Callable[[], None] | None = None
        if len(channel.unanswered) == channel.window:
            channel.unanswered[0].wait()
        channel.send(parts)
        channel.unanswered.append(self)

    def wait(self) -> Any:
        while not self.there:
            first = self.channel.unanswered.popleft()
            first.answer, first.there = as_result(self.channel.receive()[1]), True
            if first.then is not None:
                first.then()
        return self.answer


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    return listener


def _connect(path: str) -> _Caller:
    wait_for(path)
    requests, answers = os.pipe2(os.O_DIRECT), os.pipe2(os.O_DIRECT)
    file = os.memfd_create("limit")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"c"], [requests[0], answers[1], file])
    os.close(requests[0])
    os.close(answers[1])
    return _Caller(answers[0], requests[1], file)


def _serve_in_thread(channel: _Callee | SocketChannel) -> None:
    threading.Thread(target=_serve, args=(channel,), daemon=True).start()


def _serve(channel: _Callee | SocketChannel) -> None:
    while True:
        try:
            function, arguments = channel.receive()
        except EOFError:
            return
        result = FUNCTIONS[function](*arguments)
        if _is_argument(result, arguments):
            channel.hand_over()
        else:
            channel.send(pack(function, as_arguments(result)))


def _is_argument(result: Any, arguments: list[Any]) -> bool:
    """Return whether a result is the only argument, perhaps changed in place."""
    if len(arguments) != 1 or not isinstance(result, Tensor):
        return len(arguments) == 1 and result is arguments[0]
    (argument,) = arguments
    return bool(result.data_ptr() == argument.data_ptr() and result.numel() == argument.numel())


def _path(place: Place, rank: int) -> str:
    return f"{place.rendezvous}.{rank}"
