"""The program of a worker process: its main thread runs the requests that come through the pipe.

A second thread reads the pipe. That thread kills this process and all that it has started when the
launching process is gone. It sees this by the end of the pipe, or, where a forked child still holds
the pipe's other side, by a new parent process.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import NoReturn

from torch_rpc_ext.launch import _protocol

# How often the reading thread checks that the parent is still there, s.
_LOOK = 0.5


def main(name: str, handle: int, parent: int) -> NoReturn:
    """Serve requests until END.

    Args:
        name: of this worker.
        handle: file descriptor of the pipe.
        parent: id of the process that started this one.
    """
    # Ctrl-C counts only while a request runs: Worker.interrupt() sends it then. See _run().
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(handle)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, parent, requests), daemon=True).start()
    while (request := requests.get()) != _protocol.END:
        reply = _run(name, request)
        # Flushed before the reply, so that the caller has shown all output when the call returns.
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(reply)
    sys.exit(0)


def _run(name: str, request: bytes) -> bytes:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            function, args, kwargs = _protocol.load(request)
            return _protocol.dump((True, function(*args, **kwargs)))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:  # noqa: BLE001  SystemExit and Ctrl-C end the request only
        return _protocol.dump_error(error, name)


def _read(pipe: Connection, parent: int, requests: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            while not pipe.poll(_LOOK):
                if os.getppid() != parent:
                    _die()
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            _die()
        requests.put(request)
        if request == _protocol.END:
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
