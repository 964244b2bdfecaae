"""Joining a running group from the command line, for as long as a command takes.

A dynamic group (init_rpc with world_size=None) takes in every process that finds its store. A
static group takes in none; there, workers can call the commands' functions (docs/cli.md).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

from torch_rpc_ext._calls import failures
from torch_rpc_ext.cli import common

__all__ = ["LARGEST_MESSAGE", "OFFERED", "PREFIX", "add_arguments", "joined", "other_workers"]

#: Names of guests begin so; names of workers should not.
PREFIX = "guest_"
# Guests take high ranks, which jobs do not use, so that a guest never has the rank of a worker that
# joins later. A rank has 15 bits (worker_id_t).
_FIRST_RANK, _RANKS = 16_384, 16_384
_THREADS = 4
#: What the group's workers may call at a guest: what a Poller, ping() and profile() inside of the
#: group ask every member. Anything else would run with the rights of whoever called the command.
OFFERED = ("torch_rpc_ext.monitoring", "torch_rpc_ext.profiler.recorder")
#: Of a guest that expects small answers, bytes: room for what ping() sends by default.
LARGEST_MESSAGE = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which group to join."""
    group = parser.add_argument_group("which group")
    group.add_argument(
        "--init-method",
        default="env://",
        metavar="URL",
        help="the group's store, as given to init_rpc: env:// (MASTER_ADDR and MASTER_PORT; the "
        "default), tcp://host:port or file:///path",
    )
    group.add_argument(
        "--interface", metavar="NAME", help="as the option `interface`: a name or an IP address"
    )
    common.add_seconds(group, "--join-timeout", 10.0, "how long to look for the group")


@contextlib.contextmanager
def joined(
    given: argparse.Namespace, *, max_message_bytes: int = LARGEST_MESSAGE
) -> Iterator[None]:
    """Join the group for the block, and leave it however the block ends.

    Args:
        given: what add_arguments() has parsed.
        max_message_bytes: as the option of that name.

    Raises:
        CannotJoinError: there is no such group, it is static, or joining failed.
        ValueError: a URL or an interface is wrong.
    """
    from torch.distributed import rpc as _untyped_rpc

    from torch_rpc_ext import monitoring

    rpc: Any = _untyped_rpc  # upstream's functions have no types
    with _leaving_when_told_to():
        try:
            _join(given, max_message_bytes)
            yield
        finally:
            if monitoring.is_initialized():  # a signal may have ended _join() at any place
                rpc.shutdown()


def other_workers() -> list[str]:
    """Return the names of the group's workers, without guests and so without this process."""
    from torch_rpc_ext import monitoring

    return [name for name in monitoring.member_names() if not name.startswith(PREFIX)]


def _join(given: argparse.Namespace, max_message_bytes: int) -> None:
    from torch.distributed import rpc as _untyped_rpc

    from torch_rpc_ext._group import dynamic, members
    from torch_rpc_ext.options import UcxRpcBackendOptions

    rpc: Any = _untyped_rpc
    options = UcxRpcBackendOptions(
        init_method=given.init_method,
        interface=given.interface,
        init_timeout=given.join_timeout,
        num_worker_threads=_THREADS,
        allow_list=OFFERED,
        max_message_bytes=max_message_bytes,
    )
    try:
        directory = dynamic.Directory(_open_store(given.init_method, given.join_timeout))
        dead = [
            member
            for member in directory.read().members.values()
            if member.name.startswith(PREFIX)
            and member.host == members.host_identity()
            and not members.is_alive(member.pid)
        ]
        for guest in dead:
            directory.leave(guest)
        rpc.init_rpc(
            f"{PREFIX}{re.sub('[^A-Za-z0-9-]', '-', socket.gethostname())}_{os.getpid()}",
            backend=rpc.backend_registry.BackendType["UCX"],
            rank=_FIRST_RANK + secrets.randbelow(_RANKS),
            rpc_backend_options=options,
        )
        for guest in dead:
            dynamic.announce_departure(guest)
    except RuntimeError as problem:
        raise common.CannotJoinError(failures.brief(problem)) from problem


def _open_store(url: str, seconds: float) -> Any:
    """Open the store of an existing dynamic group; never create a store."""
    from torch_rpc_ext._group import dynamic, rendezvous, stores
    from torch_rpc_ext._group.store_opening import open_tcp

    parts = urlparse(url)
    if parts.scheme == "file":
        if not os.path.isfile(parts.path):
            raise common.CannotJoinError(f"There is no RPC group at {url}: no such file.")
        opened: Any = stores.dist.FileStore(parts.path, -1)
    else:
        host, port = _address(parts)
        opened = open_tcp(host, port, _FIRST_RANK, None, seconds)
    store = stores.Answering(opened, seconds)
    if dynamic.Directory(store).read().members:
        return store
    if rendezvous.is_static(store.of(stores.dist.PrefixStore("rpc_prefix_0", opened))):
        raise common.CannotJoinError(
            f"The RPC group at {stores.describe(store)} is static (init_rpc with a world_size): "
            "nobody can join it any more. From inside of it, any worker can call "
            "torch_rpc_ext.cli.ping.ping(), torch_rpc_ext.cli.top.show() and "
            "torch_rpc_ext.profiler.profile(). Started with world_size=None it can be joined."
        )
    raise common.CannotJoinError(
        f"There is no RPC group on UCX at {stores.describe(store)}: its workers have left, have "
        "not come yet, or run on another back end."
    )


def _address(parts: Any) -> tuple[str, int]:
    if parts.scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} must be set as for the group's workers, or "
                "--init-method must say where its store is"
            )
        port = os.environ["MASTER_PORT"]
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"MASTER_PORT must be a port, from 1 to 65535, got {port!r}")
        return os.environ["MASTER_ADDR"], int(port)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(
            f"--init-method must be env://, tcp://host:port or file:///path, got {parts.geturl()!r}"
        )
    return str(parts.hostname), int(parts.port)


@contextlib.contextmanager
def _leaving_when_told_to() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: a guest must not stay behind."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
