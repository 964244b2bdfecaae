"""Federated learning among the applications: what is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.applications.federated.model import FederatedJob
from benchmarks.applications.interface import (
    BFLOAT16,
    ENCRYPTED,
    Application,
    Course,
    Job,
    Metric,
    Plot,
)
from tests.support.netns import Link

_NAMES = {"fedavg": "FedAvg", "fedsgd": "FedSGD"}
_RATES = {"fedavg": 0.05, "fedsgd": 0.2}
_DELAY = 1.0  # ms
_REMARKS = """\
A server and eight clients, each on a host of its own: a network namespace, joined to a switch by a
link of 10 or 1 Gb/s with a delay of 1 ms, each way. What the server sends to all has to pass its
one link, and so has what comes back. The model has 25 million parameters, 100 MB; the data are the
1797 handwritten digits that scikit-learn ships. Each client knows two to four of the ten digits
(two shards of the data sorted by digit, as in McMahan et al., 2017), and one picture of five is
held out for the accuracy, which the server looks at after each round; that is no part of the round.
With FedAvg a client does three steps of 32 pictures and gives back how far its weights went; with
FedSGD it gives back the gradient over all its pictures.

TENSORPIPE, UCX, UCX with encryption and gRPC end with the same weights, bit for bit; with
`wire_dtype` bfloat16 half the bytes travel, and the weights differ.

In the last case, on UCX only, a client's process is killed in a round; a new one comes back, is
asked again in the same round, and the round counts all eight. Another client leaves for good after
a later round, and the rest goes on without it. The weights at the end are those of a run in one
process from which nobody but that one client is missing.

A round's time is the median of all rounds. "All rounds" contain the first one, in which UCX and
gRPC take up to twice as long as later, and TENSORPIPE does not. UCX keeps its receive buffers, 1.6
GB in all nine processes, and all of them are new then. `perf` over five rounds of FedSGD: in the
first one, of 4.5 s, the two cores clear new pages for 3.5 s of their 9 s (`clear_page_erms`); the
machine's host has to give these pages, too. In the later rounds there is no such work. TENSORPIPE
takes new memory in each round. So where rounds are few, as here with FedSGD, the sum of all may be
larger on UCX though each later round is shorter.

What differs from the paper: there the clients are machines of their own, so that their computing
takes no time from each other and from the network; here nine processes, nine network stacks and the
switch share the cores of one host, and where these are few, they and not the link set the pace at
10 Gb/s. The paper's clients are in several accounts of a cloud, its server has a GPU. gRPC sends
the bytes of tensors, without pickle. Where the kernel cannot delay packets (tc's netem), there is
no delay: the table says which one there was.
"""


class Federated(Application):
    """The paper's federated learning."""

    name = "federated"
    title = "Federated learning"
    metrics = {
        "seconds": Metric("a round", is_course=True),
        "bytes": Metric("bytes over the server's link in a round", "B"),
        "run": Metric("all rounds", is_spread=True),
        "accuracy": Metric("accuracy", "", is_course=True),
        "last_accuracy": Metric("accuracy after all rounds", "", is_spread=True),
        "updates": Metric("updates of the last round", ""),
        "delay": Metric("delay of the link"),
    }
    remarks = _REMARKS
    plots = (
        Course(("seconds", "accuracy"), "round, FedAvg, 10 Gb/s", "fedavg-10g"),
        Course(("seconds", "accuracy"), "round, FedSGD, 10 Gb/s", "fedsgd-10g"),
        Plot(("seconds", "bytes"), "Gb/s, FedAvg", {"fedavg-1g": 1, "fedavg-10g": 10}),
    )

    def jobs(self, *, small: bool) -> Sequence[Job]:
        return list(_small() if small else _full())

    def shown(self, job: Job) -> Sequence[str]:
        return ("seconds", "bytes", "run", "last_accuracy", "delay")


def _small() -> Iterator[Job]:
    size: dict[str, Any] = {"clients": 3, "width": 64, "steps": 4, "rate": 0.2}
    for algorithm in _NAMES:
        yield _job(algorithm, 0.0, f"{algorithm}-here", "on one host", **size)
    yield _job("fedavg", 1.0, "fedavg-hosts", "four hosts, 1 Gb/s", **size)
    yield _churn(0.0, "3 clients", **size, dies=(2, 1), leaves=(3, 2))


def _full() -> Iterator[Job]:
    for algorithm, gbit, steps in (("fedavg", 10.0, 6), ("fedsgd", 10.0, 5), ("fedavg", 1.0, 3)):
        name = f"{algorithm}-{gbit:g}g"
        where, rate = f"8 clients, {gbit:g} Gb/s", _RATES[algorithm]
        yield _job(algorithm, gbit, name, where, clients=8, steps=steps, rate=rate)
    yield _churn(10.0, "8 clients, 10 Gb/s", clients=8, steps=5, dies=(3, 1), leaves=(5, 3))


def _job(
    algorithm: str, gbit: float, name: str, where: str, *, clients: int, **others: Any
) -> FederatedJob:
    arguments: dict[str, Any] = {
        "title": f"{_NAMES[algorithm]}, {where}",
        "memory": 800 << 20 if gbit > 1 or clients > 3 else 300 << 20,
        "more_ways": (BFLOAT16, ENCRYPTED),
    }
    return FederatedJob(
        **{**arguments, **others},
        name=name,
        processes=clients + 1,
        packages=("sklearn",),
        network=Link(gbit, _DELAY) if gbit else None,
        clients=clients,
        algorithm=algorithm,
    )


def _churn(gbit: float, where: str, *, dies: tuple[int, int], **others: Any) -> FederatedJob:
    return _job(
        "fedavg",
        gbit,
        "churn",
        where,
        title=f"FedAvg, {where}; one dies and comes back, one leaves",
        ways=("ucx",),
        more_ways=(),
        comes_back=(dies[0],),
        dies=dies,
        **others,
    )
