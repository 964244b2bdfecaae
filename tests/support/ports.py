"""TCP ports for tests that must know a port before anything listens on it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_PORTS = range(10_000, 65_536)
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port that nothing listens on, and that no other test process gets.

    The port is not one that the kernel gives to sockets by itself: before the test uses it, the
    kernel could give it to another socket, and parallel tests open many. The port is claimed by an
    abstract socket name in the same network namespace, until this process ends.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    # If the kernel may give out all of them, take any of them.
    ports = [port for port in _PORTS if not low <= port <= high] or list(_PORTS)
    random.shuffle(ports)
    for port in ports:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0torch_rpc_ext test port {port}")
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return port
    raise RuntimeError(f"none of {len(ports)} ports is free")
