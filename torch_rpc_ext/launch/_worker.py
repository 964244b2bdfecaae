"""The side of the worker: runs what comes through the pipe in its main thread, until told to end.

A second thread reads the pipe. It ends the process, and all that it has started, when the process
that launched it is gone: then the pipe is at its end, or, where a forked child has inherited the
other side, this process has another parent.
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

# How often to look whether the parent is still there, s.
_LOOK = 0.5


def main(name: str, handle: int, parent: int) -> NoReturn:
    """Serve until the end.

    Args:
        name: of this worker.
        handle: file descriptor of the pipe.
        parent: process id of who started this process.
    """
    # Ctrl-C belongs to the caller, who passes it on; see _run().
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(handle)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, parent, requests), daemon=True).start()
    while (request := requests.get()) != _protocol.END:
        reply = _run(name, request)
        # Before the reply, so that the caller has shown it when the call returns.
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
    except BaseException as error:  # noqa: BLE001  SystemExit and Ctrl-C too: the worker lives on
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
    """While this process ends, which may take long, keep watching."""
    wait = threading.Event()
    while os.getppid() == parent:
        wait.wait(_LOOK)
    _die()


def _die() -> NoReturn:
    # The worker leads a process group of its own: what it has started ends with it.
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
