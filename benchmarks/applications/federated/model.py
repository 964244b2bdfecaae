"""Federated learning (McMahan et al., 2017), the computation: the same for every way to
communicate.

In a round each client gets the weights, trains with what it has, and gives back an update, which
the server averages by the numbers of pictures. FedAvg: some local steps, the update is how far the
weights went. FedSGD: the update is the gradient over all that the client has, and the server steps.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.applications.federated import digits
from benchmarks.applications.interface import Figures, Job

Weights = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class FederatedJob(Job):
    """What a run of federated learning does.

    Attributes:
        clients: how many; the server is one process more.
        algorithm: "fedavg" or "fedsgd".
        steps: rounds of the training.
        width: of each of the three hidden layers.
        local_steps, batch: of a client in a round of FedAvg.
        rate: of learning.
        dies: client and round, 0 the first: its process is killed there while it trains.
        leaves: client and round after which it leaves for good.
    """

    clients: int = 8
    algorithm: str = "fedavg"
    steps: int = 8
    width: int = 3520
    local_steps: int = 3
    batch: int = 32
    rate: float = 0.05
    dies: tuple[int, int] | None = None
    leaves: tuple[int, int] | None = None


@dataclass(frozen=True)
class Update:
    """What a client gives back.

    Attributes:
        tensors: a change of the weights (FedAvg) or a gradient (FedSGD).
        count: of the pictures that it has trained with.
        leaves: whether it must not be asked again.
    """

    tensors: Weights
    count: int
    leaves: bool = False


def network(job: FederatedJob) -> nn.Sequential:
    """Return the network as it is in the beginning."""
    torch.manual_seed(job.seed)
    sizes = [digits.PIXELS, job.width, job.width, job.width]
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(job.width, digits.KINDS))


class Client:
    """What a client has: pictures of a few digits, and a network to train.

    Thread: one at a time.
    """

    def __init__(self, job: FederatedJob, number: int) -> None:
        self.job, self.number, self.network = job, number, network(job)
        self.parameters = list(self.network.parameters())
        self.pictures, self.digits = digits.of_client(number, job.clients)

    def train(self, weights: Sequence[Tensor], step: int) -> Update:
        """Return the update of a round that begins with these weights."""
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)
        if self.job.algorithm == "fedsgd":
            made = self._gradients(torch.arange(len(self.digits)))
        else:
            self._descend(step)
            made = [own.detach() - one for own, one in zip(self.parameters, weights, strict=True)]
        if self.job.dies == (self.number, step) and self.job.life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return Update(made, len(self.digits), leaves=self.job.leaves == (self.number, step))

    def _descend(self, step: int) -> None:
        """Do the local steps."""
        generator = torch.Generator().manual_seed(step)
        order = torch.randperm(len(self.digits), generator=generator)
        for number in range(self.job.local_steps):
            chosen = order[torch.arange(self.job.batch) + number * self.job.batch - len(order)]
            gradients = self._gradients(chosen)
            with torch.no_grad():
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=self.job.rate)

    def _gradients(self, chosen: Tensor) -> Weights:
        scores = self.network(self.pictures[chosen])
        loss = functional.cross_entropy(scores, self.digits[chosen])
        return list(torch.autograd.grad(loss, self.parameters))


class Server:
    """What the server has: the weights, and pictures held out."""

    def __init__(self, job: FederatedJob) -> None:
        self.job, self.network = job, network(job)
        self.parameters = list(self.network.parameters())
        self.found: Figures = {key: [] for key in ("seconds", "accuracy", "bytes", "updates")}

    @property
    def weights(self) -> Weights:
        """The weights of the round."""
        return [parameter.detach() for parameter in self.parameters]

    def serve(self, ask: Callable[[Weights, int], Mapping[int, Update]]) -> Figures:
        """Do all rounds.

        Args:
            ask: give the weights of a round to all clients; returns their updates by their number.

        Returns:
            What was measured in each round, and the sum of the weights at the end.
        """
        for step in range(self.job.steps):
            before, begin = link_bytes(), time.perf_counter()
            updates = ask(self.weights, step)
            self._average([updates[client] for client in sorted(updates)])
            self.found["seconds"].append(time.perf_counter() - begin)
            self.found["bytes"] += [
                now - was for now, was in zip(link_bytes(), before, strict=True)
            ]
            self.found["updates"].append(len(updates))
            del updates
            self.found["accuracy"].append(self._accuracy())
        total = sum(float(weight.double().sum()) for weight in self.weights)
        last = {"last_accuracy": self.found["accuracy"][-1:], "checksum": [total]}
        return {**self.found, **last, "run": [sum(self.found["seconds"])]}

    def _average(self, updates: Sequence[Update]) -> None:
        count = sum(update.count for update in updates)
        factor = -self.job.rate if self.job.algorithm == "fedsgd" else 1.0
        with torch.no_grad():
            for update in updates:
                for parameter, tensor in zip(self.parameters, update.tensors, strict=True):
                    parameter.add_(tensor, alpha=factor * update.count / count)

    def _accuracy(self) -> float:
        _, _, pictures, wanted = digits.load()
        with torch.no_grad():
            return float((self.network(pictures).argmax(1) == wanted).float().mean())


def run_here(job: FederatedJob) -> Figures:
    """Do a run in this process: what all others are compared with."""
    clients = {number: Client(job, number) for number in range(1, job.clients + 1)}

    def ask(weights: Weights, step: int) -> dict[int, Update]:
        updates = {number: one.train(weights, step) for number, one in clients.items()}
        for number, update in updates.items():
            if update.leaves:
                del clients[number]
        return updates

    return Server(job).serve(ask)


def link_bytes() -> list[float]:
    """Return the bytes that have passed the link of this host, both directions; none where all are
    on one host."""
    if "LINK" not in os.environ:
        return []
    counts = Path("/sys/class/net") / os.environ["LINK"] / "statistics"
    passed = [int((counts / name).read_text()) for name in ("rx_bytes", "tx_bytes")]
    return [float(sum(passed))]
