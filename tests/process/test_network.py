"""Workers on two hosts (network namespaces), without shared memory and common pids: only TCP
connects them."""

from __future__ import annotations

import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import (
    QUICK,
    call_error,
    check_alive,
    check_alive_again,
    kill,
    named,
    open_sockets,
    wait_for_file,
    wait_until_serving,
)
from tests.process.group import Group
from tests.support import netns
from tests.support.backend import needs_ucx, on_ucx
from tests.support.cut import set_user_timeout

STORE_PORT = 29_511


Hosts = tuple[netns.Host, netns.Host]


def group_on(
    hosts: Hosts,
    address: str,
    env: dict[str, str] | None = None,
    size: int = 2,
    each: list[dict[str, Any]] | None = None,
    **options: Any,
) -> Group:
    """Start a group with its even ranks on the first host and its odd ranks on the second.

    ``options`` are for all workers; or ``each`` has those of each worker.
    """
    if not on_ucx():  # TENSORPIPE takes the loopback interface otherwise
        env = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", **(env or {})}
    return Group(
        size,
        hosts=[hosts[rank % 2] for rank in range(size)],
        options=each or options,
        init_method=f"tcp://{address}:{STORE_PORT}",
        env={"MASTER_ADDR": address.strip("[]"), "MASTER_PORT": str(STORE_PORT), **(env or {})},
    )


def test_the_hosts_are_apart(hosts: Hosts) -> None:
    with Group(2, hosts=hosts, init=False) as group:
        assert max(group.run_all(os.getpid)) < 100, "not in pid namespaces of their own"
        assert group.run_all(os.listdir, "/dev/shm") == [[], []]
        assert [uname.nodename for uname in group.run_all(os.uname)] == ["host1", "host2"]


def control_path(to: str) -> str:
    import torch_rpc_ext

    rpc.rpc_sync(to, f.nothing)
    paths = {peer["worker"]: peer["control"] for peer in torch_rpc_ext.info()["agent"]["peers"]}
    return str(paths[to])


@needs_ucx("has no such variable")
def test_ucxs_own_variable_wins_over_the_interface_that_is_found(hosts: Hosts) -> None:
    only_tcp = {"UCX_TLS": "tcp", "TP_SOCKET_IFNAME": "eth0"}
    where = [hosts[0], hosts[0]]
    with Group(2, hosts=where, env=only_tcp) as group:
        assert group[0].run(control_path, "worker1") == "tcp (eth0)"
    with Group(2, hosts=where, env={**only_tcp, "UCX_NET_DEVICES": "lo"}) as group:
        assert group[0].run(control_path, "worker1") == "tcp (lo)"
    chosen = {"interface": "eth0"}  # the option wins over the variable
    with Group(2, hosts=where, env={**only_tcp, "UCX_NET_DEVICES": "lo"}, options=chosen) as group:
        assert group[0].run(control_path, "worker1") == "tcp (eth0)"


def check_everyday() -> None:
    check_alive("worker1")
    for count in (0, 1, 10_000):
        sent = torch.arange(float(count))
        assert rpc.rpc_sync("worker1", f.identity, args=(sent,)).equal(sent)
    assert rpc.rpc_sync("worker1", f.nested, args=(5, 2)) == 5


def test_calls_over_ipv4(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4) as group:
        group.run(check_everyday)


def test_calls_over_ipv6(hosts: Hosts) -> None:
    with group_on(hosts, f"[{hosts[0].ipv6}]") as group:
        group.run(check_everyday)


@needs_ucx("cannot use a link-local address")
def test_calls_over_an_interface_with_a_link_local_address(hosts: Hosts) -> None:
    """The store is on eth0. On eth1, UCX takes the IPv4 address, because it cannot use link-local
    addresses."""
    before = received(hosts[1], "eth1")
    with group_on(hosts, hosts[0].ipv4, {"TP_SOCKET_IFNAME": "eth1"}) as group:
        group.run(check_everyday)
        group.run(check_size, 4_000_000)
    assert received(hosts[1], "eth1") - before > 8_000_000


@needs_ucx("has another text")
def test_an_interface_with_nothing_but_a_link_local_address_is_named(hosts: Hosts) -> None:
    for host in hosts:
        host.run("ip", "addr", "flush", "dev", "eth1", "scope", "global")
    try:
        with group_on(hosts, hosts[0].ipv4, {"TP_SOCKET_IFNAME": "eth1"}) as group:
            text, _ = group[0].run(call_error, "worker1")
            assert "IPv4 or a global IPv6 address" in text, text
            for worker in group:
                worker.kill()  # the workers could not say goodbye to each other
    finally:
        for host in hosts:
            second = host.ipv4.replace("10.77.", "10.78.")
            host.run("ip", "addr", "add", f"{second}/24", "dev", "eth1")


def received(host: netns.Host, device: str) -> int:
    """Bytes that have arrived on a network device."""
    for line in host.run("cat", "/proc/net/dev").splitlines():
        if line.strip().startswith(device + ":"):
            return int(line.split(":")[1].split()[0])
    raise ValueError(f"no {device} on {host.name}")


@needs_ucx("has its own environment variable only")
@pytest.mark.parametrize("variable", ["TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_the_environment_chooses_the_interface(hosts: Hosts, variable: str) -> None:
    for device in ("eth0", "eth1"):
        before = received(hosts[1], device)
        with group_on(hosts, hosts[0].ipv4, {variable: device}) as group:
            group.run(check_size, 4_000_000)
        assert received(hosts[1], device) - before > 8_000_000, device


@needs_ucx("takes no interface")
def test_the_option_chooses_the_interface(hosts: Hosts) -> None:
    before = received(hosts[1], "eth1")
    with group_on(hosts, hosts[0].ipv4, {"TP_SOCKET_IFNAME": "eth0"}, interface="eth1") as group:
        group.run(check_size, 4_000_000)
    assert received(hosts[1], "eth1") - before > 8_000_000


def check_size(size: int) -> None:
    sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for _ in range(2):
        assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(sent,)), sent)


@pytest.mark.parametrize("size", [4_000_000, 100_000_000])
def test_size(hosts: Hosts, size: int) -> None:
    with group_on(hosts, hosts[0].ipv4) as group:
        group.run(check_size, size)
        group[1].run(f.name_here)


def check_small_sizes() -> None:
    """The sizes around which a tensor goes another way, alone, together, and many at once."""
    for size in (16_384, 16_385, 65_536, 262_144, 262_145, 524_288):
        check_size(size)
    for count in (2, 8, 9):  # 9 tensors are too much for one frame
        sent = [torch.full((32_768,), i, dtype=torch.uint8) for i in range(count)]
        back = rpc.rpc_sync("worker1", f.identity, args=(sent,))
        assert all(map(torch.equal, sent, back))
    many = [torch.full((100_000,), i, dtype=torch.uint8) for i in range(60)]
    futures = [rpc.rpc_async("worker1", f.identity, args=(one,)) for one in many]
    assert all(torch.equal(one.wait(), sent) for one, sent in zip(futures, many, strict=True))


@pytest.mark.parametrize("encryption", [False, True], ids=["plain", "encrypted"])
def test_small_sizes(hosts: Hosts, encryption: bool) -> None:
    if encryption and not on_ucx():
        pytest.skip("TENSORPIPE has no encryption")
    options = {"encryption": "on", "secret": "the secret of this test"} if encryption else {}
    with group_on(hosts, hosts[0].ipv4, **options) as group:
        group.run(check_small_sizes)
        group[1].run(f.name_here)


def small_calls_beside_bulk(to: str) -> tuple[list[float], float]:
    """(seconds of each small call that began while large tensors moved to the same worker, seconds
    of the calls with these tensors)."""
    check_alive(to)
    sent = torch.ones(100_000_000, dtype=torch.uint8)
    start = time.monotonic()
    bulk = [rpc.rpc_async(to, f.nothing, args=(sent,)) for _ in range(10)]
    took = []
    while not all(call.done() for call in bulk):
        began = time.monotonic()
        assert rpc.rpc_sync(to, f.identity, args=(1,)) == 1
        took.append(time.monotonic() - began)
    torch.futures.wait_all(bulk)
    return took, time.monotonic() - start


@needs_ucx("sends small calls behind bulk")
def test_small_calls_do_not_wait_behind_bulk(hosts: Hosts) -> None:
    """A small call that waits behind bulk takes as long as what is left of the bulk. So the test
    compares the two, and needs no figure for the speed of the machine."""
    with group_on(hosts, hosts[0].ipv4) as group:
        took, seconds = group[0].run(small_calls_beside_bulk, "worker1")
        assert len(took) >= 20, (took, seconds)
        assert statistics.median(took) < seconds / 20, (took, seconds)


def test_three_workers_on_two_hosts(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4, size=3) as group:
        assert group.run(f.nested, 7, 3) == 7
        group[2].run(check_alive, "worker0")


def test_a_killed_peer_is_noticed(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4, size=3) as group:
        call = group[0].start(call_error, "worker1")
        wait_until_serving(group[1])
        killed = kill(group[1])
        text, failed = call.result()
        assert failed - killed < QUICK and named("worker1", text), (text, failed - killed)
        group[0].run(check_alive, "worker2")


def seconds_until_lost(to: str, *, busy: bool) -> tuple[str, float]:
    """Call until the worker is lost: with large calls one after another if ``busy``, else with one
    long call. Return the error and the seconds until it came."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        if busy:
            while True:
                rpc.rpc_sync(to, f.identity, args=(torch.ones(1_000_000),), timeout=30)
        rpc.rpc_sync(to, f.sleep, args=(120,), timeout=0)
    return f"{type(raised.value).__name__} {raised.value}", time.monotonic() - start


def wait_until_nothing_waits_for(ip: str) -> None:
    """Wait until no TCP connection of this host to ``ip`` has bytes that are not acknowledged: the
    memory from which they were sent can be used again."""
    remote = socket.inet_aton(ip)[::-1].hex().upper() + ":"
    established = "01"
    end = time.monotonic() + 30
    waiting = ["?"]
    while waiting:
        assert time.monotonic() < end, waiting
        time.sleep(0.1)
        rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        waiting = [
            queues
            for _, _, peer, state, queues, *_ in rows
            if peer.startswith(remote) and state == established and int(queues[:8], 16) > 0
        ]


@needs_ucx("waits for the kernel's time-out, a quarter of an hour")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_cut_cable_is_noticed(hosts: Hosts, busy: bool) -> None:
    with group_on(hosts, hosts[0].ipv4, size=3, keepalive=2.0) as group:
        group[0].run(check_alive, "worker1")
        group[0].run(check_alive, "worker2")
        call = group[0].start(seconds_until_lost, "worker1", busy=busy)
        time.sleep(0.5)
        hosts[1].run("ip", "link", "set", "eth0", "down")
        try:
            text, seconds = call.result(60)
            assert "PeerLostError" in text and "worker1" in text, text
            assert seconds < 20, (text, seconds)  # the kernel would try for 15 minutes
            group[0].run(wait_until_nothing_waits_for, hosts[1].ipv4)
            group[0].run(check_alive, "worker2")  # on the same host as worker0
        finally:
            hosts[1].run("ip", "link", "set", "eth0", "up")
        group[1].killed = True
        group.close(gently=False)


def shorten_patience(to: str, seconds: float) -> int:
    """Make the kernel give up the TCP connections to a worker after ``seconds``, also that for
    bulk; return how many there are."""
    rpc.rpc_sync(to, f.identity, args=(torch.ones(1_000_000),))
    return set_user_timeout(os.getpid(), seconds)


def wait_until_received(host: netns.Host, count: int) -> None:
    """Wait until eth0 of a host has received so many bytes more."""

    def received() -> int:
        lines = Path(f"/proc/{host.holder}/net/dev").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.strip().startswith("eth0:"))

    before = received()
    while received() < before + count:
        time.sleep(0.01)


def error_of_sending(to: str) -> str:
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, torch.numel, args=(torch.ones(20_000_000),), timeout=30)
    return f"{type(raised.value).__name__} {raised.value}"


@needs_ucx("waits for the kernel's time-out, a quarter of an hour")
def test_a_cut_cable_that_the_kernel_notices_first(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4, keepalive=20.0) as group:
        assert group[0].run(shorten_patience, "worker1", 0.3) > 0
        try:
            netns.shape(hosts, netns.Link(gbit_per_s=0.2))  # 80 MB take 3 s
        except netns.NotPossible as reason:
            pytest.skip(str(reason))
        call = group[0].start(error_of_sending, "worker1")
        try:
            # In the middle of the tensor: only data that is not acknowledged has this time-out.
            wait_until_received(hosts[1], 8_000_000)
            hosts[1].run("ip", "link", "set", "eth0", "down")
            text = call.result(60)
            assert "PeerLostError" in text and "worker1" in text, text
        finally:
            hosts[1].run("ip", "link", "set", "eth0", "up")
            netns.shape(hosts, netns.Link())
        group[1].killed = True
        group.close(gently=False)


def knock(to: str, seconds: float) -> int:
    """Call a worker that is gone again and again; return how often."""
    end, times = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        with pytest.raises(RuntimeError, match="worker1"):
            rpc.rpc_sync(to, f.nothing, timeout=10)
        times += 1
        time.sleep(0.05)
    return times


def sockets_after_knocks(to: str, seconds: float) -> int:
    assert knock(to, seconds) > 1
    return open_sockets()


@needs_ucx("its errors are RuntimeErrors without names")
def test_calls_to_a_dead_worker_elsewhere_open_nothing(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4) as group:
        group[0].run(check_alive, "worker1")
        group[1].kill()
        before = group[0].run(sockets_after_knocks, "worker1", 2.0)
        assert group[0].run(sockets_after_knocks, "worker1", 8.0) == before


def lose(gone: str) -> None:
    """Call a worker that is about to die until it is lost."""
    with pytest.raises(RuntimeError, match=gone):
        while True:
            rpc.rpc_sync(gone, f.nothing, timeout=60)


def seconds_beside_an_attempt(to: str, gone: str) -> float:
    """Call a worker while this one tries to connect to another; return the seconds from the
    beginning of the attempt to the last answer."""
    deadline = time.monotonic() + 60
    while True:
        start = time.monotonic()
        attempt = rpc.rpc_async(gone, f.nothing, timeout=60)
        while not attempt.done() and time.monotonic() < start + 1:
            time.sleep(0.01)
        if not attempt.done():
            break
        # After the loss there is a pause, in which calls fail at once.
        with pytest.raises(RuntimeError, match=gone):
            attempt.wait()
        assert time.monotonic() < deadline, "there is no attempt that takes a while"
    check_alive(to)
    return time.monotonic() - start


@needs_ucx("not a promise of its")
def test_connecting_to_a_host_that_is_gone_delays_nobody_else(hosts: Hosts) -> None:
    with group_on(hosts, hosts[0].ipv4, size=3, keepalive=20.0) as group:
        group[0].run(check_alive, "worker1")
        loses = group[0].start(lose, "worker1")
        group[1].kill()
        loses.result()
        # The kernel knows where to send to, so that it waits for an answer for the 20 s.
        ether = hosts[1].run("cat", "/sys/class/net/eth0/address").strip()
        neighbour = (hosts[1].ipv4, "dev", "eth0")
        hosts[0].run("ip", "neigh", "replace", *neighbour, "lladdr", ether, "nud", "permanent")
        hosts[1].run("ip", "link", "set", "eth0", "down")
        try:
            seconds = group[0].run(seconds_beside_an_attempt, "worker2", "worker1")
            assert seconds < 15, "an attempt to connect took the others along"  # takes > 20 s
        finally:
            hosts[1].run("ip", "link", "set", "eth0", "up")
            hosts[0].run("ip", "neigh", "del", *neighbour)
        group.close(gently=False)


def lose_an_answer(to: str) -> None:
    from torch_rpc_ext.errors import PeerLostError

    # The fault makes the other end lose the connection when it answers a builtin.
    with pytest.raises(PeerLostError, match="worker1.*the connection broke"):
        rpc.rpc_sync(to, torch.add, args=(torch.ones(1), 1), timeout=30)
    check_alive_again(to)


@needs_ucx("upstream's fault injection cannot break one end")
def test_a_connection_that_broke_at_one_end_only(hosts: Hosts) -> None:
    faults: dict[str, Any] = {"messages_to_lose": ["SCRIPT_RET"], "num_fail_sends": 1}
    with group_on(hosts, hosts[0].ipv4, **faults) as group:
        group[0].run(lose_an_answer, "worker1")


def sleep_through(to: str, size: int, begun: Path, stopped: Path, waited: Path) -> None:
    """Make calls, two at once, and the file ``begun``. When the callee is ``stopped``, wait until
    two calls take 4 s more, and make the file ``waited``, after which the callee has to go on."""
    sent = torch.ones(size, dtype=torch.uint8)
    while not waited.exists():
        calls = [rpc.rpc_async(to, f.total, args=(sent,), timeout=60) for _ in range(2)]
        begun.touch()
        end = float("inf")
        while not all(call.done() for call in calls):
            if stopped.exists():
                end = min(end, time.monotonic() + 4)
            if time.monotonic() > end:
                waited.touch()
            time.sleep(0.01)
        assert [call.wait() for call in calls] == [size, size]


@needs_ucx("not a promise of its")
@pytest.mark.parametrize("size", [1, 262_144])  # the second is what a frame carries at most
def test_a_stopped_process_elsewhere_is_not_dead(hosts: Hosts, size: int, tmp_path: Path) -> None:
    with group_on(hosts, hosts[0].ipv4, keepalive=1.0) as group:
        group[0].run(check_alive, "worker1")
        pid = str(group[1].run(os.getpid))  # the pid in its namespace
        begun, stopped, waited = (tmp_path / name for name in ("begun", "stopped", "waited"))
        arguments = ("worker1", size, begun, stopped, waited)
        if size == 1:
            call = group[0].start(sleep_through, *arguments)
            wait_for_file(begun)
            hosts[1].run("kill", "-STOP", pid)
        else:  # the kernel's receive buffer is as small as at first
            hosts[1].run("kill", "-STOP", pid)
            time.sleep(0.2)  # a peer that has just said something is taken to go on
            call = group[0].start(sleep_through, *arguments)
        stopped.touch()
        while not (waited.exists() or call.done()):
            time.sleep(0.01)
        hosts[1].run("kill", "-CONT", pid)
        call.result()
        assert waited.exists(), "no call waited for the callee"
        group[0].run(check_alive, "worker1")


def test_a_shaped_link_holds_its_rate(hosts: Hosts) -> None:
    """Tests netns.shape() itself: the benchmarks rely on the rate of the link."""
    try:
        netns.shape(hosts, netns.Link(gbit_per_s=0.2))
    except netns.NotPossible as reason:
        pytest.skip(str(reason))
    try:
        with group_on(hosts, hosts[0].ipv4) as group:
            group.run(check_size, 1000)
            start = time.monotonic()
            group.run(check_size, 5_000_000)  # there and back twice: 0.8 s at this rate
            assert 0.7 < time.monotonic() - start < 10
    finally:
        netns.shape(hosts, netns.Link())
