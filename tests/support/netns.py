"""Two "hosts" on one machine: namespaces of their own (network, pid, ipc, mount, name), joined by
veth pairs.

The hosts share only the file system: no loopback, no shared memory, no pids, no ptrace. Everything
that is made for a host belongs to its holder process and vanishes with that process, also when the
tests are killed. Tests and benchmarks use this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
_KINDS = ("ipc", "uts", "net", "pid", "mnt")
_CLONE_FS = 0x200  # of <sched.h>
_JUMBO = 9000  # bytes of a frame
# The holder mounts its own /dev/shm, and its own /sys, where UCX looks for interfaces. It brings up
# loopback, and reaps orphaned processes.
_HOLDER = """
hostname {name}
ip link set lo up
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount -t sysfs sysfs /sys
echo ready
trap '' CHLD
exec sleep infinity
"""


@dataclass(frozen=True)
class Host:
    """One host. ``eth0`` has an IPv4 and an IPv6 address, ``eth1`` an IPv4 address of another
    network. Both also have link-local IPv6 addresses."""

    name: str
    holder: int
    ipv4: str
    ipv6: str

    def run(self, *command: str) -> str:
        """Run a command on the host; return its stdout."""
        return _run("nsenter", "-t", str(self.holder), "-n", "-i", "-u", "-m", "-p", *command)


@dataclass(frozen=True)
class Link:
    """Rate and delay of the network between the hosts, in each direction.

    Attributes:
        gbit_per_s: the rate; 0 means no limit.
        delay_ms: the least time of a packet, one way.
    """

    gbit_per_s: float = 0.0
    delay_ms: float = 0.0

    def __str__(self) -> str:
        rate = f"{self.gbit_per_s:g} Gb/s" if self.gbit_per_s else "unshaped"
        return rate + (f", {self.delay_ms:g} ms" if self.delay_ms else "")


@dataclass(frozen=True)
class Star:
    """Hosts that are joined by a switch.

    Attributes:
        hosts: with an ``eth0`` each.
        link: between each host and the switch; without the delay that was asked for where the
            kernel has no netem.
    """

    hosts: tuple[Host, ...]
    link: Link


class NotPossible(Exception):
    """This machine does not permit such hosts or links; the text says what is missing."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts. Raises NotPossible with the reason if the machine does not permit it."""
    _check_permitted()
    with contextlib.ExitStack() as stack:
        hosts = []
        for number in (1, 2):
            pid = stack.enter_context(_holder(f"host{number}"))
            hosts.append(Host(f"host{number}", pid, f"10.77.0.{number}", f"fd77::{number}"))
        for device in ("eth0", "eth1"):
            _join(hosts[0], hosts[1], device)
        for host in hosts:
            # Else a device that a test sets down and up again comes back without its IPv6 address.
            keep = "/proc/sys/net/ipv6/conf/all/keep_addr_on_down"
            host.run("sh", "-c", f"echo 1 > {keep}")
            host.run("ip", "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
            host.run("ip", "addr", "add", f"{host.ipv6}/64", "dev", "eth0", "nodad")
            second = host.ipv4.replace("10.77.", "10.78.")
            host.run("ip", "addr", "add", f"{second}/24", "dev", "eth1")
        _wait_for_link_local(hosts)
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def cut(host: Host, other: Host) -> Iterator[None]:
    """Nothing that the host sends over IPv4 reaches the other one.

    The devices of both stay up, so new workers can start: a device of a veth pair whose other end
    is down has no carrier, and UCX does not use it.
    """
    host.run("ip", "route", "add", "blackhole", f"{other.ipv4}/32")
    try:
        yield
    finally:
        host.run("ip", "route", "del", "blackhole", f"{other.ipv4}/32")


@contextlib.contextmanager
def star(count: int, link: Link) -> Iterator[Star]:
    """Make so many hosts, each joined to a switch by such a link; raises NotPossible with the
    reason where the machine forbids it. IPv4 only.

    What a host sends passes its own link and the one of the host that it goes to, so a server gets
    no more than its link carries, from however many clients.
    """
    _check_permitted()
    with contextlib.ExitStack() as stack:
        switch = Host("switch", stack.enter_context(_holder("switch")), "", "")
        switch.run("ip", "link", "add", "br0", "type", "bridge")
        switch.run("ip", "link", "set", "br0", "mtu", str(_JUMBO), "up")
        hosts, plain = [], Link(link.gbit_per_s)
        for number in range(1, count + 1):
            pid = stack.enter_context(_holder(f"host{number}"))
            host = Host(f"host{number}", pid, f"10.79.0.{number}", "")
            _join(host, switch, "eth0", f"port{number}")
            host.run("ip", "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
            switch.run("ip", "link", "set", f"port{number}", "master", "br0")
            _shape_device(switch, f"port{number}", plain)
            try:
                _shape_device(host, "eth0", link)
            except NotPossible as reason:
                if "netem" not in str(reason):
                    raise
                link = plain
                _shape_device(host, "eth0", link)
            hosts.append(host)
        yield Star(tuple(hosts), link)


def shape(hosts: tuple[Host, Host], link: Link) -> None:
    """Give eth0 of both hosts the rate and delay of a link, by tc. Raises NotPossible if the
    machine does not permit it.

    A shaped link has jumbo frames, because of a packet of 1500 bytes the headers take more than 4
    %, and benchmarks should show the share of the link that a program leaves unused.
    """
    for host in hosts:
        _shape_device(host, "eth0", link)


def _shape_device(host: Host, device: str, link: Link) -> None:
    """Make what a device sends such a link."""
    if shutil.which("tc") is None:
        raise NotPossible("no command 'tc'")
    with contextlib.suppress(subprocess.CalledProcessError):  # fails if none was set before
        host.run("tc", "qdisc", "del", "dev", device, "root")
    host.run("ip", "link", "set", device, "mtu", str(_JUMBO) if link.gbit_per_s else "1500")
    parent = ["root"]
    if link.gbit_per_s:
        # A burst is the data of a millisecond, because timers may fire late, but at least one
        # 64 KB packet of TCP, because larger packets would be dropped.
        burst = max(int(link.gbit_per_s * 1e9 / 8 / 1000), 131_072)
        rate = ["rate", f"{int(link.gbit_per_s * 1e9)}bit", "burst", f"{burst}b"]
        # The queue holds a bandwidth-delay product, so that no packet is lost.
        queue = ["limit", str(16 * 1024 * 1024)]
        _shape(host, device, [*parent, "handle", "1:", "tbf", *rate, *queue])
        parent = ["parent", "1:1", "handle", "10:"]
    if link.delay_ms:
        delay = ["netem", "delay", f"{link.delay_ms}ms", "limit", "100000"]
        _shape(host, device, [*parent, *delay])


def _check_permitted() -> None:
    if os.geteuid() != 0:
        raise NotPossible("network namespaces need root")
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            raise NotPossible(f"no command {tool!r}")


def _shape(host: Host, device: str, arguments: list[str]) -> None:
    try:
        host.run("tc", "qdisc", "add", "dev", device, *arguments)
    except subprocess.CalledProcessError as error:
        kind = next(one for one in ("netem", "tbf") if one in arguments)
        raise NotPossible(f"tc cannot make a {kind} queue: {error.stderr.strip()}") from None


@contextlib.contextmanager
def _holder(name: str) -> Iterator[int]:
    """Start the process that keeps a host's namespaces alive; return its pid in this namespace."""
    flags = [
        "--net",
        "--ipc",
        "--pid",
        "--uts",
        "--mount",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    process = subprocess.Popen(
        ["unshare", *flags, "sh", "-ec", _HOLDER.format(name=name)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline().strip() != "ready":
            raise NotPossible(f"unshare: {process.stderr.read().strip()}")
        children = _read(f"/proc/{process.pid}/task/{process.pid}/children").split()
        yield int(children[0])
    finally:
        process.kill()
        process.communicate()


def _join(one: Host, other: Host, device: str, its: str = "") -> None:
    """Make a veth pair with one end in each host; the other's end has another name if ``its`` names
    one. Its names are unique until the ends are there."""
    ends = [f"rt{os.getpid() % 1_000_000}{device[-1]}{letter}" for letter in "ab"]
    try:
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    except subprocess.CalledProcessError as error:
        raise NotPossible(f"ip link add: {error.stderr.strip()}") from None
    for host, end, name in zip((one, other), ends, (device, its or device), strict=True):
        _run("ip", "link", "set", end, "netns", str(host.holder))
        host.run("ip", "link", "set", end, "name", name)
        host.run("ip", "link", "set", name, "up")


def _wait_for_link_local(hosts: list[Host]) -> None:
    """Wait until the link-local addresses can be used. Duplicate address detection takes a second
    or two."""
    deadline = time.monotonic() + 10
    for host in hosts:
        for device in ("eth0", "eth1"):
            while True:
                shown = host.run("ip", "-6", "addr", "show", "dev", device, "scope", "link")
                if "fe80" in shown and "tentative" not in shown:
                    break
                if time.monotonic() > deadline:
                    raise NotPossible(f"no IPv6 link-local address on {device}")
                time.sleep(0.1)


def enter_and_run(holder: int, fn: Callable[..., Any], pipe: Connection) -> None:
    """To be called in a new child: move into a host and run ``fn(pipe)`` there, in a process that
    dies with the child."""
    libc = ctypes.CDLL(None, use_errno=True)
    # A thread cannot change its mount namespace while it shares its root directory with other
    # threads, such as those of a BLAS.
    libc.unshare(_CLONE_FS)
    namespaces = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
    for kind, namespace in zip(_KINDS, namespaces, strict=True):
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(namespace)
    inner = os.fork()  # a new pid namespace applies only to children
    if inner == 0:
        _die_with_parent()
        code = 1
        try:
            fn(pipe)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    pipe.close()
    faulthandler.unregister(signal.SIGUSR2)
    for number in (signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda received, _frame: os.kill(inner, received))
    code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    sys.exit(code if code >= 0 else 128 - code)


def pid_inside(pid: int) -> int:
    """The pid, in this namespace, of the process that runs the function of enter_and_run()."""
    return int(_read(f"/proc/{pid}/task/{pid}/children").split()[0])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
