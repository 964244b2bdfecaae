"""Two "hosts" on this machine: worker 0 on one, worker 1 on the other, joined by a network."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.backends.interface import HOSTS, Backend
from benchmarks.cases.calls import SyncCalls, elements
from benchmarks.cases.interface import CallCase, Figures, Metric, Target
from tests.support.netns import Link

UNSHAPED = Link()


class HostsCalls(SyncCalls):
    """Calls from host to host, one after the other; the arguments are those of SyncCalls."""

    link = UNSHAPED

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.needs |= {HOSTS}


class HostsParallel(CallCase):
    """Several calls from host to host at once; time until all have ended.

    Args:
        payload: size of the tensor, bytes.
        count: number of calls.
    """

    link = UNSHAPED

    def __init__(self, payload: int, count: int, targets: tuple[Target, ...]) -> None:
        title = f"two hosts: {count} identities of {payload // 1_000_000} MB at once"
        name = f"hosts-{count}x{payload // 1_000_000}m"
        super().__init__(
            name, {"time": Metric(title, "s", targets)}, 10, frozenset({HOSTS, "identity"})
        )
        self.payload, self.count = payload, count

    def measure(self, backend: Backend) -> Figures:
        tensor, times = elements(self.payload), []
        for _ in range(5):
            start = time.perf_counter()
            pending = [backend.call_async(1, "identity", tensor) for _ in range(self.count)]
            for call in pending:
                call.wait()
            times.append(time.perf_counter() - start)
        return {"time": times}


class HostsBulk(CallCase):
    """A tensor there and back, over and over; the rate counts both ways, one after the other.

    Args:
        name: on the command line.
        link: between the hosts.
        payload: size of the tensor, bytes.
        calls: in a round.
        rounds: by default.
        rate: target of the rate.
        share: target of the share of the link's rate that the tensor's bytes have; headers of IP
            and TCP take 0.7 % of it.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        payload: int,
        *,
        calls: int,
        rounds: int,
        rate: tuple[Target, ...] = (),
        share: tuple[Target, ...] = (),
    ) -> None:
        title = f"two hosts, {link}: {payload // 1_000_000} MB"
        metrics = {"rate": Metric(title, "B/s", rate, more_is_better=True)}
        if link.gbit_per_s:
            metrics["share"] = Metric(
                f"  share of {link.gbit_per_s:g} Gb/s", "%", share, more_is_better=True
            )
        super().__init__(name, metrics, rounds, frozenset({HOSTS, "identity"}))
        self.link, self.payload, self.calls = link, payload, calls

    def measure(self, backend: Backend) -> Figures:
        assert self.link is not None
        tensor, rates = elements(self.payload), []
        for _ in range(self.calls):
            start = time.perf_counter()
            backend.call(1, "identity", tensor)
            rates.append(2 * self.payload / (time.perf_counter() - start))
        if not self.link.gbit_per_s:
            return {"rate": rates}
        link = self.link.gbit_per_s * 1e9 / 8
        return {"rate": rates, "share": [rate / link for rate in rates]}


CASES = [
    HostsCalls(
        "hosts-builtin",
        "two hosts: builtin add, 4 B",
        "add",
        4,
        calls=150,
        rounds=10,
        targets=(Target(4, 6),),
    ),
    *(
        HostsCalls(
            f"hosts-{name}",
            f"two hosts: python identity, {title}",
            "identity",
            payload,
            calls=calls,
            rounds=10,
            targets=targets,
        )
        for name, title, payload, calls, targets in (
            ("64k", "64 KB", 65_536, 60, (Target(2), Target(1 / 1.3, against="limit"))),
            ("1m", "1 MB", 1_000_000, 30, (Target(2), Target(1 / 1.3, against="limit"))),
            ("4m", "4 MB", 4_000_000, 20, (Target(2), Target(1 / 1.3, against="limit"))),
            ("32m", "32 MB", 32_000_000, 5, (Target(1.15), Target(1 / 1.3, against="limit"))),
        )
    ),
    HostsParallel(4_000_000, 8, (Target(1.5),)),
    HostsBulk("hosts-bulk", UNSHAPED, 200_000_000, calls=2, rounds=10, rate=(Target(1.15, 1.5),)),
    HostsBulk(
        "hosts-10g",
        Link(10),
        200_000_000,
        calls=2,
        rounds=5,
        share=(Target(0.95, 0.97, "value"),),
    ),
    HostsBulk(
        "hosts-1g", Link(1), 50_000_000, calls=1, rounds=5, share=(Target(0.97, 0.98, "value"),)
    ),
    # Needs the kernel's netem; without it the case is skipped, with a message.
    HostsBulk("hosts-1g-1ms", Link(1, 1), 50_000_000, calls=1, rounds=3),
]
