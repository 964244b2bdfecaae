"""Opening the store: over TCP, with a time limit and errors that say which process has the port;
in a file, after a look at its folder."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import urllib.parse
from datetime import timedelta
from typing import Any

from torch_rpc_ext import errors
from torch_rpc_ext._group.rendezvous import check_rank_0
from torch_rpc_ext._group.stores import Deadline, dist, launcher_serves, poll, within

# How long to wait for a port that an ended process has held, s.
_PORT_PATIENCE = 3.0
# How long who takes connections has for the first answer, s.
_LEAST_PATIENCE = 1.0
# How much longer than its time limit torch may take to give up, s.
_GRACE = 1.0


def open_tcp(
    host: str,
    port: int,
    rank: int,
    world_size: int | None,
    seconds: float,
    use_libuv: bool = True,
) -> Any:
    """Open the TCPStore of env:// and tcp://, with a time limit and interruptible by Ctrl-C.

    torch itself waits inside C++ for all workers, up to 30 minutes. Here the store opens at once;
    the rendezvous waits afterwards, and can say who is missing.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        rank: of this worker; rank 0 serves the store, except under torchrun, which serves it.
        world_size: None or negative for a dynamic group.
        seconds: how long to try.
        use_libuv: torch's choice of server.

    Raises:
        RpcError: the port is taken, or nobody answers there.
    """
    deadline = Deadline(seconds)
    serves = rank == 0 and not launcher_serves()
    arguments: dict[str, Any] = {
        "world_size": world_size if world_size and world_size > 0 else None,
        "timeout": timedelta(seconds=max(1.0, seconds)),
        "wait_for_workers": False,
    }
    if serves:
        return _serve(host, port, seconds, arguments, use_libuv)
    problem = ""

    def answers() -> bool:
        nonlocal problem
        try:
            socket.create_connection((host, port), timeout=0.5).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            problem = str(error)
            return False
        return True

    if not poll(answers, deadline):
        raise errors.RpcError(
            f"init_rpc timed out after {seconds:g} s: no store answers at {host}:{port} "
            f"({problem}). Rank 0 serves it: start rank 0, and see that MASTER_ADDR and "
            "MASTER_PORT are the same everywhere and no firewall is between."
        )
    # torch has a time limit for the connection, and none for the answer.
    patience = max(_LEAST_PATIENCE, deadline.remaining())
    try:
        return within(
            patience + _GRACE, lambda: dist.TCPStore(host, port, is_master=False, **arguments)
        )
    except (TimeoutError, RuntimeError) as error:
        why = "nothing comes back" if isinstance(error, TimeoutError) else str(error)
        raise errors.RpcError(
            f"init_rpc timed out after {seconds:g} s: {host}:{port} takes connections, but does "
            f"not answer as a store ({why}). Rank 0 serves it: see whether rank 0 is stopped, or "
            "another program has the port (MASTER_PORT)."
        ) from error


def check_url(url: str) -> None:
    """Check what torch's errors about a store would not name.

    Args:
        url: the option init_method.

    Raises:
        ValueError: no such kind of store; no such port; a file's folder is missing, its path is a
            folder, or it cannot be written.
    """
    parts = urllib.parse.urlparse(url)
    # "localhost:29500" has the scheme "localhost". A program may have registered further schemes.
    if not parts.scheme or (parts.scheme not in ("env", "tcp", "file") and "://" not in url):
        raise ValueError(
            f"init_method must be env://, tcp://host:port or file:///path, got {url!r}"
        )
    if parts.scheme == "env":
        port = os.environ.get("MASTER_PORT", "0")  # torch's error says where it is missing
        try:
            number = int(port)
        except ValueError:
            number = -1
        if not 0 <= number < 65536:
            raise ValueError(f"MASTER_PORT must be a port, from 0 to 65535, got {port!r}")
    elif parts.scheme == "tcp":
        try:
            _ = parts.port
        except ValueError as error:
            raise ValueError(f"init_method is {url!r}: {error}") from None
    elif parts.scheme == "file" and parts.path:
        _check_file(url, parts.path)


def _check_file(url: str, path: str) -> None:
    """Check that this process can open the store of a file:// URL.

    torch's FileStore tries to open its file for 5 minutes, inside of C++, without reacting to
    Ctrl-C, and its error names no file.
    """
    folder = os.path.dirname(path)
    problem = ""
    if os.path.isdir(path):
        problem = "that is a folder: name a file in it"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {folder}: make it, or name a file elsewhere"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = "this process may not write there: name a file elsewhere"
    if problem:
        raise ValueError(f"init_method is {url}, and {problem}")


def _look_at_rank_0(host: str, port: int) -> bool:
    """Check whether another process that was started as rank 0 has the port.

    Returns:
        False where the process that has the port does not answer.

    Raises:
        RefusedError: such a process has the port; the text names the process.
    """

    def look() -> errors.RefusedError | None:
        # The port may belong to another program, which does not speak the store's protocol.
        with contextlib.suppress(RuntimeError, ValueError):
            store = dist.TCPStore(
                host, port, timeout=timedelta(seconds=1), is_master=False, wait_for_workers=False
            )
            try:
                check_rank_0(store)
            except errors.RefusedError as error:
                return error
        return None

    try:
        found = within(1.0, look)
    except TimeoutError:
        return False
    if found is not None:
        raise found
    return True


def _serve(host: str, port: int, seconds: float, arguments: dict[str, Any], use_libuv: bool) -> Any:
    patience = Deadline(_PORT_PATIENCE)
    answers = True
    while True:
        try:
            return within(
                max(_LEAST_PATIENCE, seconds) + _GRACE,
                lambda: dist.TCPStore(
                    host, port, is_master=True, multi_tenant=True, use_libuv=use_libuv, **arguments
                ),
            )
        except (TimeoutError, RuntimeError) as error:
            if isinstance(error, TimeoutError) or "socket has timed out" in str(error):
                raise errors.RpcError(
                    f"init_rpc timed out after {seconds:g} s: rank 0 serves the store on its own "
                    f"host, and cannot reach it at {host}:{port}. MASTER_ADDR must lead to the "
                    "host of rank 0."
                ) from error
            if "address already in use" not in str(error).lower():
                raise
            if patience.remaining() <= 0:
                raise errors.RpcError(
                    f"The store cannot listen on port {port} (MASTER_PORT): Address already in "
                    "use. Another program, or a job before this one, still has it; choose "
                    "another port. If it is another process of this job, give each a rank of its "
                    "own: rank 0 alone serves the store."
                ) from error
            # Each look at a process that does not answer leaves a thread behind.
            answers = answers and _look_at_rank_0(host, port)
        time.sleep(0.1)
