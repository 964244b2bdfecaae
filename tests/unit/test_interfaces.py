"""The choice of the network interface."""

from __future__ import annotations

import socket
from typing import Self

import pytest

from torch_rpc_ext._group import interfaces

_TABLE = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fe80::1%eth0", "2001:db8::5"],
    "eth1": ["192.168.1.5", "fe80::1%eth1"],
    "eth2": ["172.16.0.5"],
}
_ROUTES = {"10.0.0.1": "10.0.0.5", "8.8.8.8": "192.168.1.5", "2001:db8::1": "2001:db8::5"}


@pytest.fixture(autouse=True)
def known_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with known interfaces, routes and names."""

    class Probe:
        def __init__(self, family: int, kind: int) -> None:
            self.address: tuple[object, ...] = ()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, address: tuple[object, ...]) -> None:
            target = str(address[0])
            if target.startswith("127.") or target == "::1":
                self.address = (target, 0)
            elif target.startswith("fe80::2"):
                self.address = ("fe80::1", 0, 0, 7)
            elif target in _ROUTES:
                self.address = (_ROUTES[target], 0)
            else:
                raise OSError("unreachable")

        def getsockname(self) -> tuple[object, ...]:
            return self.address

    def resolve(name: bytes, *_: object, **__: object) -> list[tuple[object, ...]]:
        host = name.decode()
        known = {"head": ("10.0.0.1",), "myself": ("127.0.1.1",), "localhost": ("127.0.0.1",)}
        if host not in known and not (":" in host or host[0].isdigit()):
            raise socket.gaierror("unknown")
        found = known.get(host, (host,))
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                0,
                0,
                "",
                (address, 9, 0, 7) if ":" in address else (address, 9),
            )
            for address in found
        ]

    monkeypatch.setattr(interfaces, "_addresses", lambda: _TABLE)
    monkeypatch.setattr(interfaces, "_is_up", lambda name: name != "eth2")
    monkeypatch.setattr(interfaces.socket, "socket", Probe)
    monkeypatch.setattr(interfaces.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(interfaces.socket, "if_indextoname", lambda index: f"eth{index - 6}")


def _choose(*wanted: str, url: str = "env://", **env: str) -> interfaces.InterfaceChoice:
    return interfaces.choose(wanted, url, environment=env)


def test_option_comes_first() -> None:
    choice = _choose("eth1", TP_SOCKET_IFNAME="eth0", MASTER_ADDR="head")
    assert choice.names == ("eth1",)
    assert "option" in choice.reason


def test_option_by_address() -> None:
    assert _choose("192.168.1.5").names == ("eth1",)
    assert _choose("fe80::1%eth1").names == ("eth1",)
    assert _choose("2001:db8::5").prefer_ipv6


def test_several() -> None:
    assert _choose("eth1", "eth0").names == ("eth1", "eth0")


def test_variables_in_order() -> None:
    choice = _choose(TP_SOCKET_IFNAME="eth1", GLOO_SOCKET_IFNAME="eth0")
    assert choice.names == ("eth1",) and "TP_SOCKET_IFNAME" in choice.reason
    assert _choose(GLOO_SOCKET_IFNAME="eth0,eth1").names == ("eth0", "eth1")


@pytest.mark.parametrize("host", ["head", "10.0.0.1"])
def test_route_to_master(host: str) -> None:
    choice = _choose(MASTER_ADDR=host)
    assert choice.names == ("eth0",) and choice.addresses == ("10.0.0.5",)
    assert host in choice.reason and not choice.prefer_ipv6


def test_route_to_tcp_url() -> None:
    assert _choose(url="tcp://[2001:db8::1]:29500").prefer_ipv6


def test_link_local() -> None:
    choice = _choose(MASTER_ADDR="fe80::2%eth1")
    assert choice.names == ("eth1",) and choice.addresses == ("fe80::1%eth1",)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.5", "::1"])
def test_loopback_on_request(host: str) -> None:
    assert _choose(MASTER_ADDR=host).names == ("lo",)


@pytest.mark.parametrize("host", ["myself", "nobody"])
def test_a_name_that_says_nothing_leads_to_the_default_route(host: str) -> None:
    choice = _choose(MASTER_ADDR=host)
    assert choice.names == ("eth1",) and "default route" in choice.reason


@pytest.mark.parametrize("name", ["a..b", "\udcff"])
def test_a_name_that_cannot_be_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Python's own resolver raises UnicodeError for these as str
    assert _choose(MASTER_ADDR=name).names


def test_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _choose(url="file:///tmp/x").names == ("eth1",)
    monkeypatch.delitem(_ROUTES, "8.8.8.8")
    choice = _choose(url="file:///tmp/x")
    assert choice.names == ("lo",) and "no default route" in choice.reason


def test_unknown_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"option interface names 'ib0'.*eth0 \(10.0.0.5"):
        _choose("ib0")
    with pytest.raises(ValueError, match="TP_SOCKET_IFNAME names 'ib0'"):
        _choose(TP_SOCKET_IFNAME="ib0")
    with pytest.raises(ValueError, match=r"10\.9\.9\.9"):
        _choose("10.9.9.9")


def test_down() -> None:
    with pytest.raises(ValueError, match="eth2 is down"):
        _choose("eth2")
