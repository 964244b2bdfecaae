"""TCP ports for tests that must know a port before anything listens on it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_PORTS = range(10_000, 65_536)
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port that nothing listens on, and that no other test process gets."""
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, int]:
    """Return the first and the last of ``count`` TCP ports in a row that nothing listens on, and
    that no other test process gets.

    They are not among those that the kernel gives to sockets by itself: before the test uses a
    port, the kernel could give it to another socket, and parallel tests open many. A port is
    claimed by an abstract socket name in the same network namespace, until this process ends.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    # If the kernel may give out all of them, take any of them.
    ports = [port for port in _PORTS if not low <= port <= high] or list(_PORTS)
    random.shuffle(ports)
    for first in ports:
        claims: list[socket.socket] = []
        for port in range(first, first + count):
            claim = _claim(port)
            if claim is None:
                break
            claims.append(claim)
        if len(claims) == count:
            _claims.extend(claims)
            return first, first + count - 1
        for claim in claims:
            claim.close()
    raise RuntimeError(f"of {len(ports)} ports, no {count} in a row are free")


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0torch_rpc_ext test port {port}")
        with socket.socket() as probe:
            probe.bind(("", port))
    except (OSError, OverflowError):
        claim.close()
        return None
    return claim
