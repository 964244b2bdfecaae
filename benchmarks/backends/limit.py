"""What no RPC can beat: the bytes of a call by one copy, and its wake-ups by pipes.

A call is one copy of its arguments from the caller's memory into the callee's, a byte to wake the
callee, the function on that copy, and a byte to wake the caller. What is small travels in the pipe.
A large result that lies where the arguments arrived is taken to be handed over: its bytes are
fetched when a caller's thread first calls a function with so many bytes, and that is what it gets
from then on. Nothing is serialised beyond sizes, nothing times out, no error returns. Between two
hosts it is a blocking socket instead (limit_network.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from benchmarks.backends.flat import Buffer, as_arguments, as_result, pack, unpack
from benchmarks.backends.interface import CALLERS, HOSTS, Backend, Pending, Place
from benchmarks.backends.limit_network import SocketChannel, connect, listen, wait_for
from benchmarks.functions import FUNCTIONS

Bytes = npt.NDArray[np.uint8]
Piece = tuple[int, int]  # address and size, bytes

_INLINE = 4000  # bytes: with the head less than PIPE_BUF, what a packet of a pipe can be
_HEAD = struct.Struct("<QQ")  # number of pieces to fetch, 0: all follows here; 1: handed over
_PIECE = struct.Struct("<QQ")
_PIECES = 16  # more are joined before they are sent
_SPLIT = 2_000_000  # bytes from which on a copy is spread over the cores
_WINDOW = 12  # asynchronous calls under way: a pipe in packet mode has room for 16
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class Limit(Backend):
    """A call has a channel of its own while it lasts: nobody waits for a lock."""

    name = "limit"
    functions: ClassVar[frozenset[str]] = frozenset(FUNCTIONS)
    offers = frozenset({CALLERS, HOSTS})

    def start(self, place: Place) -> None:
        # Where the kernel lets only parents read a process's memory.
        _LIBC.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
        self.place, self.local = place, threading.local()
        self.free: dict[int, list[_Channel | SocketChannel]] = {
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

    def _connect(self, to: int) -> _Channel | SocketChannel:
        path = _path(self.place, to)
        return connect(path) if self.place.address else _connect(path)

    def _channel(self, to: int) -> _Channel | SocketChannel:
        # This thread's own: answers come in the order of its calls.
        channels = self.local.__dict__.setdefault("channels", {})
        if to not in channels:
            channels[to] = self._connect(to)
        channel: _Channel | SocketChannel = channels[to]
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
                caller, ends, _, _ = socket.recv_fds(connection, 16, 2)
                connection.send(str(os.getpid()).encode())
            _serve_in_thread(_Channel(ends[0], ends[1], int(caller)))


class _Channel:
    """Two pipes, and memory for what arrives, seen from one side.

    Thread: one at a time.

    Args:
        inbox, outbox: ends of pipes in packet mode.
        peer: id of the other process, whose memory is read.
    """

    def __init__(self, inbox: int, outbox: int, peer: int) -> None:
        self.inbox, self.outbox, self.peer = inbox, outbox, peer
        self.memory: Bytes = np.empty(0, np.uint8)
        self.arrived = self.memory  # the part of it that the last large message fills
        self.unanswered: deque[_Pending] = deque()
        self.sent: list[Buffer] = []  # until the peer has it, which its answer shows
        self.handed: dict[tuple[int, bytes], Bytes] = {}

    def send(self, parts: list[Buffer]) -> None:
        """Send what pack() made."""
        if sum(memoryview(part).nbytes for part in parts) <= _INLINE:
            os.write(self.outbox, b"".join([_HEAD.pack(0, 0), *parts]))
            return
        self.sent = parts if len(parts) <= _PIECES else [b"".join(parts)]
        self._announce([_place(part) for part in self.sent])

    def hand_over(self) -> None:
        """Send what came last, which was changed where it lies."""
        self._announce([_place(self.arrived)], handed=True)

    def receive(self) -> tuple[str, list[Any]]:
        """Return what unpack() does, in memory that the next large message uses again."""
        packet = os.read(self.inbox, _INLINE + _HEAD.size)
        if not packet:
            raise EOFError
        count, handed = _HEAD.unpack_from(packet)
        if not count:
            return unpack(packet[_HEAD.size :])
        pieces = list(_PIECE.iter_unpack(packet[_HEAD.size :]))
        size = sum(size for _, size in pieces)
        if handed:
            # The head tells which function it was: to read that much costs nothing.
            head = np.empty(min(size, 64), np.uint8)
            _fetch(head, self.peer, [(pieces[0][0], head.size)])
            key = (size, head.tobytes())
            if key not in self.handed:
                self.handed = {key: _huge(size)}  # the last one only: 400 MB are much
                _fetch(self.handed[key], self.peer, pieces)
            return unpack(self.handed[key])
        # The elements begin after the first piece: there at a cache line, as allocators have it.
        start = -pieces[0][1] % 64
        if start + size > self.memory.size:
            self.memory = _huge(start + size)
        self.arrived = self.memory[start : start + size]
        _fetch(self.arrived, self.peer, pieces)
        return unpack(self.arrived)

    def _announce(self, pieces: list[Piece], *, handed: bool = False) -> None:
        told = [_PIECE.pack(*piece) for piece in pieces]
        os.write(self.outbox, b"".join([_HEAD.pack(len(pieces), handed), *told]))


class _Pending:
    """A call that was sent, and its answer once it was read; answers come in the calls' order."""

    def __init__(self, channel: _Channel | SocketChannel, parts: list[Buffer]) -> None:
        self.channel, self.answer, self.there = channel, None, False
        if len(channel.unanswered) == _WINDOW:
            channel.unanswered[0].wait()
        self.parts = parts
        channel.send(parts)
        channel.unanswered.append(self)

    def wait(self) -> Any:
        while not self.there:
            first = self.channel.unanswered.popleft()
            first.answer, first.there = as_result(self.channel.receive()[1]), True
        return self.answer


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    return listener


def _connect(path: str) -> _Channel:
    wait_for(path)
    requests, answers = os.pipe2(os.O_DIRECT), os.pipe2(os.O_DIRECT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        ends = [requests[0], answers[1]]
        socket.send_fds(connection, [str(os.getpid()).encode()], ends)
        callee = int(connection.recv(16))
    for end in ends:
        os.close(end)
    return _Channel(answers[0], requests[1], callee)


def _serve_in_thread(channel: _Channel | SocketChannel) -> None:
    threading.Thread(target=_serve, args=(channel,), daemon=True).start()


def _serve(channel: _Channel | SocketChannel) -> None:
    while True:
        try:
            function, arguments = channel.receive()
        except EOFError:
            return
        result = FUNCTIONS[function](*arguments)
        if _lies_in(result, channel.arrived):
            channel.hand_over()
        else:
            channel.send(pack(function, as_arguments(result)))


def _lies_in(result: Any, memory: Bytes) -> bool:
    first = result[0] if isinstance(result, list) else result
    if not isinstance(first, Tensor) or not memory.size:
        return False
    start, size = _place(memory)
    return start <= first.data_ptr() < start + size


def _place(part: Buffer) -> Piece:
    array = np.frombuffer(part, np.uint8)
    return int(array.__array_interface__["data"][0]), array.size


def _huge(size: int) -> Bytes:
    """Return memory in huge pages where there are any: with small ones a copy takes longer."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


_COPIERS = ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)) - 1))


def _fetch(target: Bytes, process: int, pieces: Sequence[Piece]) -> None:
    """Copy pieces of another process's memory, one after the other, each on all cores."""
    offset = 0
    for address, size in pieces:
        shares = len(os.sched_getaffinity(0)) if size >= _SPLIT else 1
        bounds = [size * share // shares for share in range(shares + 1)]
        jobs = [
            (target[offset + begin : offset + end], process, address + begin)
            for begin, end in zip(bounds, bounds[1:], strict=False)
        ]
        others = [_COPIERS.submit(_read, *job) for job in jobs[1:]]
        _read(*jobs[0])
        for other in others:
            other.result()
        offset += size


class _Span(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def _read(target: Bytes, process: int, address: int) -> None:
    here, there = _Span(*_place(target)), _Span(address, target.size)
    read = _LIBC.process_vm_readv
    read.restype = ctypes.c_ssize_t
    got = read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if got != target.size:
        raise OSError(ctypes.get_errno(), "process_vm_readv")


def _path(place: Place, rank: int) -> str:
    return f"{place.rendezvous}.{rank}"
