"""The program of a worker process: its main thread runs the requests that come through the pipe.

A second thread reads the pipe. That thread kills this process and all that it has started when the
launching process is gone. It sees this by the end of the pipe, or, where a forked child still holds
the pipe's other side, by a new parent process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NoReturn

from torch_rpc_ext.launch import _protocol

# How often the reading thread checks that the parent is still there, s.
_LOOK = 0.5
# Wakes the main thread from a system call. Ignored by a process that has no handler for it.
_KNOCK = signal.SIGURG


def main(name: str, handle: int, parent: int) -> NoReturn:
    """Serve requests until END.

    Args:
        name: of this worker.
        handle: file descriptor of the pipe.
        parent: id of the process that started this one.
    """
    # SIGINT counts only while a request runs: see _run().
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(_KNOCK, lambda *_: None)
    pipe = Connection(handle)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    interrupts = _Interrupts()
    threading.Thread(target=_read, args=(pipe, parent, requests, interrupts), daemon=True).start()
    while (request := requests.get()) != _protocol.END:
        reply = _run(name, request, interrupts)
        # Flushed before the reply, so that the caller has shown all output when the call returns.
        _flush()
        pipe.send_bytes(reply)
    sys.exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The function may have closed the stream, or put anything in its place.
        with contextlib.suppress(Exception):
            stream.flush()


class _Interrupts:
    """Which request runs, and which requests were interrupted before they began.

    Thread Safety: any thread; running() is for the main thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: bytes | None = None
        self._signaled = False  # whether the request that runs was interrupted
        self._early: set[bytes] = set()

    def interrupt(self, key: bytes) -> None:
        """Raise KeyboardInterrupt in a request, now if it runs, otherwise when it begins."""
        with self._lock:  # so the next request cannot begin before the signal is sent
            if self._running == key:
                self._signaled = True
                self._send(signal.SIGINT)
            else:
                self._early.add(key)

    def knock(self) -> None:
        """Wake the main thread if the request that runs was interrupted, now or long ago.

        A signal that comes when the main thread is about to make a system call does not end that
        call, and Python raises KeyboardInterrupt only after the call. A second SIGINT would be a
        second KeyboardInterrupt in a function that handles the first.
        """
        with self._lock:
            if self._signaled:
                self._send(_KNOCK)

    @staticmethod
    def _send(number: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    @contextlib.contextmanager
    def running(self, key: bytes) -> Iterator[None]:
        """Let interrupt() reach the request during the block."""
        try:
            with self._lock:
                if key in self._early:
                    self._early.remove(key)
                    raise KeyboardInterrupt
                self._running = key
                self._signaled = False
            yield
        finally:
            with self._lock:
                self._running = None
                self._signaled = False


def _run(name: str, request: bytes, interrupts: _Interrupts) -> bytes:
    key = _protocol.key_of(request)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with interrupts.running(key):
                function, args, kwargs = _protocol.load(request)
                return _protocol.dump(key, (True, function(*args, **kwargs)))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:  # noqa: BLE001  SystemExit and Ctrl-C end the request only
        return _protocol.dump_error(key, error, name)


def _read(
    pipe: Connection, parent: int, requests: queue.SimpleQueue[bytes], interrupts: _Interrupts
) -> None:
    while True:
        try:
            while not pipe.poll(_LOOK):
                if os.getppid() != parent:
                    _die()
                interrupts.knock()
            interrupts.knock()
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            _die()
        if _protocol.is_interrupt(message):
            interrupts.interrupt(message)
            continue
        requests.put(message)
        if message == _protocol.END:
            _outlive_nobody(parent)


def _outlive_nobody(parent: int) -> NoReturn:
    """Keep watching the parent while this process ends, which may take long."""
    wait = threading.Event()
    while os.getppid() == parent:
        wait.wait(_LOOK)
    _die()


def _die() -> NoReturn:
    # The worker leads a process group, so this kills the processes that it has started too.
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
