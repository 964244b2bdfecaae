"""A process outside of the group connects to a worker and sends rubbish; the worker goes on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time

import pytest

from tests.process import functions as f
from tests.process.deaths import QUICK, check_alive
from tests.process.group import Group
from tests.support.backend import needs_ucx

LISTEN = "0A"


def listening_ports(pid: int) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket that a process listens on, from /proc."""
    mine = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/{pid}/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == LISTEN and f"socket:[{fields[9]}]" in mine:
                    address, port = fields[1].split(":")
                    found.append((_address(address, family), int(port, 16)))
    return found


def _address(text: str, family: int) -> str:
    raw = b"".join(struct.pack("<I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8))
    address = socket.inet_ntop(family, raw)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def rubbish(seed: int) -> list[bytes]:
    """What a port scanner, a confused browser and a fuzzer send."""
    source = random.Random(seed)
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 64,
        struct.pack("<QQQ", 2**63, 2**64 - 1, 2**40),
        bytes(4096),
        source.randbytes(17),
        source.randbytes(65_536),
        struct.pack("<I", 0x7FFFFFFF) + source.randbytes(100),
    ]


def attack(address: str, port: int, data: bytes, stay: list[socket.socket]) -> None:
    """Send the data; then close the socket, reset it, or keep it open."""
    victim = socket.create_connection((address, port), timeout=20)
    with contextlib.suppress(OSError):
        victim.settimeout(0.2)
        victim.sendall(data)
        with contextlib.suppress(OSError):
            victim.recv(4096)
        how = len(data) % 3
        if how == 0:
            stay.append(victim)
            return
        if how == 1:
            victim.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        victim.close()


@needs_ucx("may crash on bytes from a stranger")
@pytest.mark.parametrize("env", [{}, {"UCX_TLS": "tcp"}], ids=["default", "tcp only"])
def test_rubbish_on_every_port(env: dict[str, str]) -> None:
    stay: list[socket.socket] = []
    with Group(3, env=env) as group:
        group.run(check_alive, "worker1")
        ports = listening_ports(group[1].child.pid)
        assert ports, "found no listening port: where does the control connection arrive?"
        for address, port in ports:
            for data in rubbish(seed=port):
                attack(address, port, data, stay)
            group.run(check_alive, "worker1")
        for sender, to in ((1, "worker2"), (2, "worker1"), (0, "worker1")):
            group[sender].run(check_alive, to)
        for victim in stay:
            victim.close()


@needs_ucx("may crash on bytes from a stranger")
def test_many_silent_connections_do_not_stop_calls() -> None:
    with Group(2) as group, contextlib.ExitStack() as open_connections:
        ports = listening_ports(group[1].child.pid)
        assert ports, "found no listening port"
        for address, port in ports:
            for _ in range(100):
                open_connections.enter_context(
                    socket.create_connection((address, port), timeout=60)
                )
        start = time.monotonic()
        group.run(check_alive, "worker1")
        assert time.monotonic() - start < QUICK
        assert group[1].run(f.name_here) == "worker1"


@needs_ucx("may crash on bytes from a stranger")
def test_rubbish_during_init() -> None:
    """Rubbish comes while the port is open and the group is not complete yet."""
    stay: list[socket.socket] = []
    with Group(2, init=False) as group:
        first = group[0].init(2)
        deadline = time.monotonic() + 60
        while not (ports := listening_ports(group[0].child.pid)):
            assert time.monotonic() < deadline, "worker0 opens no port"
            time.sleep(0.001)
        for address, port in ports:
            for data in rubbish(seed=1):
                attack(address, port, data, stay)
        assert not first.done()
        group[1].init(2).result()
        first.result()
        group.run(check_alive, "worker1")
        for victim in stay:
            victim.close()
