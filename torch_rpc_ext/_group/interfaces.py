"""Which network interface TCP uses, and why.

The first of these that names an interface decides: the option, TP_SOCKET_IFNAME,
GLOO_SOCKET_IFNAME, the route to the host of the store (MASTER_ADDR), the default route, the
loopback.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlparse

from torch_rpc_ext._native import loader

# Addresses whose route is the default route. Only the route is looked up; nothing is sent to them.
_FAR_AWAY = ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888"))
_ENVIRONMENT = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class InterfaceChoice(NamedTuple):
    """The interfaces that TCP may use.

    Attributes:
        names: interface names, the preferred one first.
        addresses: the IP address of each that was asked for or found; link-local with %scope.
        reason: one sentence for people.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    reason: str

    @property
    def prefer_ipv6(self) -> bool:
        """Whether the first address is an IPv6 one."""
        return bool(self.addresses) and ":" in self.addresses[0]

    def described(self) -> dict[str, list[str] | str]:
        """Return the choice in a form that JSON can hold."""
        return {
            "names": list(self.names),
            "addresses": list(self.addresses),
            "reason": self.reason,
        }


def choose(
    wanted: Sequence[str], init_method: str, *, environment: Mapping[str, str] | None = None
) -> InterfaceChoice:
    """Choose the interfaces.

    Args:
        wanted: the option `interface`: names or IP addresses, empty for none.
        init_method: the options' URL; env:// leads to MASTER_ADDR.
        environment: in place of os.environ, for tests.

    Raises:
        ValueError: an interface does not exist or is down; the text lists the existing ones.
    """
    env = os.environ if environment is None else environment
    table = _addresses()
    if wanted:
        return _explicit(wanted, "option interface", table)
    for variable in _ENVIRONMENT:
        names = [part.strip() for part in env.get(variable, "").split(",") if part.strip()]
        if names:
            return _explicit(names, variable, table)
    host, origin = store_host(init_method, env)
    if host:
        found = _route_to_host(host, origin, table)
        if found is not None:
            return found
    why = f"no route to {host} ({origin}) tells more" if host else f"{origin} names no host"
    return _default_route(table, why)


def store_host(init_method: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return (host of the store, where the host was read); the host is '' for a file."""
    url = urlparse(init_method)
    if url.scheme == "env":
        return env.get("MASTER_ADDR", ""), "MASTER_ADDR"
    if url.scheme == "tcp":
        return url.hostname or "", f"init_method {init_method}"
    return "", f"init_method {init_method}"


def _addresses() -> dict[str, list[str]]:
    """Return interface name -> IP addresses (IPv6 link-local ones with %scope)."""
    return {name: addresses for name, (_, addresses) in loader.load().interfaces().items()}


def _is_up(name: str) -> bool:
    up, _ = loader.load().interfaces().get(name, (False, []))
    return bool(up)


def _explicit(
    wanted: Sequence[str], origin: str, table: Mapping[str, list[str]]
) -> InterfaceChoice:
    names: list[str] = []
    addresses: list[str] = []
    for item in wanted:
        name, address = _find(item, table)
        if not name:
            there = ", ".join(
                f"{known} ({', '.join(found) or 'no address'})" for known, found in table.items()
            )
            raise ValueError(f"{origin} names {item!r}, which this host does not have: {there}")
        if not _is_up(name):
            raise ValueError(f"{origin} names {item!r}, but interface {name} is down")
        if name not in names:
            names.append(name)
            addresses.extend([address] if address else table[name][:1])
    return InterfaceChoice(
        tuple(names), tuple(addresses), f"{', '.join(names)}, because {origin} says so."
    )


def _find(item: str, table: Mapping[str, list[str]]) -> tuple[str, str]:
    """Return (interface, address) for a name ('' as address) or an IP address; ('', '') if none."""
    if item in table:
        return item, ""
    try:
        wanted = ipaddress.ip_address(item)
    except ValueError:
        return "", ""
    for name, addresses in table.items():
        for address in addresses:
            here = ipaddress.ip_address(address)
            if here == wanted:
                return name, address
            # fe80::1 without a scope means the first interface that has this address.
            if (
                isinstance(here, ipaddress.IPv6Address)
                and isinstance(wanted, ipaddress.IPv6Address)
                and wanted.scope_id is None
                and here.packed == wanted.packed
            ):
                return name, address
    return "", ""


def _route_to_host(
    host: str, origin: str, table: Mapping[str, list[str]]
) -> InterfaceChoice | None:
    """Return the interface that routes to the host; None where the route says nothing."""
    try:
        # Given as bytes: getaddrinfo() would encode a str with the codec "idna", which takes 1 ms
        # to import and raises errors of its own for bytes that an environment variable may hold.
        found = socket.getaddrinfo(os.fsencode(host), 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None  # opening the store fails later, with a better error about the name
    for family, _, _, _, address in found:
        target = str(address[0])
        if _names_this_host_only(host, target):
            # Debian maps a host's own name to 127.0.1.1: other hosts cannot reach that.
            continue
        name, source = _route(family, address, table)
        if name:
            return InterfaceChoice(
                (name,), (source,), f"{name} ({source}), because it routes to {host} ({origin})."
            )
    return None


def _names_this_host_only(host: str, target: str) -> bool:
    if not ipaddress.ip_address(target).is_loopback or host.lower() == "localhost":
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _route(
    family: int, address: tuple[object, ...], table: Mapping[str, list[str]]
) -> tuple[str, str]:
    """Return (interface, local address) that the kernel takes towards an address, or ('', '')."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # UDP: only looks the route up
            local = probe.getsockname()
    except OSError:
        return "", ""
    source = str(local[0])
    if family == socket.AF_INET6 and len(local) > 3 and local[3] and "%" not in source:
        source = f"{source}%{socket.if_indextoname(local[3])}"
    name, known = _find(source, table)
    if not name and ipaddress.ip_address(source).is_loopback:
        return _loopback(table), source  # any of 127.0.0.0/8
    return name, known


def _loopback(table: Mapping[str, list[str]]) -> str:
    for name, addresses in table.items():
        if any(ipaddress.ip_address(address).is_loopback for address in addresses):
            return name
    return "lo"


def _default_route(table: Mapping[str, list[str]], why: str) -> InterfaceChoice:
    for family, host in _FAR_AWAY:
        name, source = _route(family, (host, 9), table)
        if name:
            return InterfaceChoice(
                (name,),
                (source,),
                f"{name} ({source}), because it is the default route's, and {why}.",
            )
    name = _loopback(table)
    addresses = tuple(table.get(name, [])[:1])
    return InterfaceChoice(
        (name,), addresses, f"{name}, because there is no default route, and {why}."
    )
