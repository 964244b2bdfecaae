"""Two "hosts" on this machine: worker 0 on one, worker 1 on the other, joined by a network."""

from __future__ import annotations

import time

from benchmarks.backends.interface import HOSTS, Backend
from benchmarks.cases.calls import SyncCalls, elements
from benchmarks.cases.interface import CallCase, Figures, Metric, Target
from tests.support.netns import Link

UNSHAPED = Link()


class HostsBuiltin(SyncCalls):
    """Small calls from host to host."""

    link = UNSHAPED

    def __init__(self) -> None:
        super().__init__(
            "hosts-builtin",
            "two hosts: builtin add, 4 B",
            "add",
            4,
            calls=150,
            rounds=10,
            targets=(Target(4, 6),),
        )
        self.needs |= {HOSTS}


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
    HostsBuiltin(),
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
