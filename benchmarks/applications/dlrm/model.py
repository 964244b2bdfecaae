"""DLRM (Naumov et al., 2019), the computation: the same for every way to communicate.

The tables stand on a server. A trainer looks up the rows of a batch, computes with its copy of the
dense network, which DistributedDataParallel keeps equal to the others', and sends the gradients of
the rows to the server.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.applications.dlrm import flights
from benchmarks.applications.interface import Figures, Job

_Result = TypeVar("_Result")
LookUp = Callable[[Tensor], Tensor]
Update = Callable[[Tensor, Tensor], None]

# Of sparse tensors as Adagrad makes them: nobody has chosen whether their indices are checked.
warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
_TABLE_RATE, _DENSE_RATE = 0.05, 1e-3
_EVALUATED = 4096  # flights at once


@dataclass(frozen=True, kw_only=True)
class DlrmJob(Job):
    """What a run of DLRM does.

    Attributes:
        trainers: how many; the server is one process more.
        flights: the first so many are taken, once; None for all.
        batch: flights of a step and trainer.
        width: of a row of the tables.
    """

    trainers: int = 1
    flights: int | None = None
    batch: int = 512
    width: int = 64


class Tables:
    """The tables of all names, joined to one.

    Thread: calls come from several at once; updates take turns.
    """

    def __init__(self, job: DlrmJob) -> None:
        _, _, size = flights.load(job.flights)
        torch.manual_seed(job.seed)
        self.table = nn.Embedding(size, job.width, sparse=True)
        nn.init.normal_(self.table.weight, std=0.1)
        self.optimizer = torch.optim.Adagrad(self.table.parameters(), lr=_TABLE_RATE)
        self.lock = threading.Lock()
        self.spent: dict[str, list[float]] = {"lock": [], "step": []}

    def look_up(self, rows: Tensor) -> Tensor:
        """Return the vectors [..., width] of rows int64 [...]."""
        with torch.no_grad():
            return self.table(rows)

    def update(self, rows: Tensor, gradients: Tensor) -> None:
        """Step the rows by the gradients of what look_up() returned; a row may come twice."""
        called = time.perf_counter()
        with self.lock:
            begin = time.perf_counter()
            weight = self.table.weight
            indices, values = rows.flatten()[None], gradients.flatten(end_dim=-2)
            weight.grad = torch.sparse_coo_tensor(indices, values, weight.shape)
            self.optimizer.step()
            self.spent["lock"].append(begin - called)
            self.spent["step"].append(time.perf_counter() - begin)

    def figures(self, reports: Sequence[Mapping[str, Sequence[float]]]) -> Figures:
        """Return what the run gave, with what the trainers have measured."""
        found = {key: [value for one in reports for value in one[key]] for key in reports[0]}
        checksum = float(self.table.weight.detach().double().sum())
        return {
            **found,
            **self.spent,
            "samples": [sum(found["samples"])],
            "checksum": [checksum],
        }


class Dense(nn.Module):
    """What DLRM has besides tables: numbers to a vector, products of all vectors, a prediction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(flights.NUMBERS, 64), nn.ReLU(), nn.Linear(64, width))
        vectors = 1 + len(flights.NAMES)
        self.first, self.second = torch.triu_indices(vectors, vectors, 1).unbind()
        inputs = width + len(self.first)
        self.top = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, numbers: Tensor, vectors: Tensor) -> Tensor:
        """Return logits [batch] for numbers [batch, NUMBERS] and vectors [batch, names, width]."""
        bottom = self.bottom(numbers)
        all_of_them = torch.cat([bottom[:, None], vectors], dim=1)
        products = all_of_them @ all_of_them.transpose(1, 2)
        chosen = products[:, self.first, self.second]
        logits: Tensor = self.top(torch.cat([bottom, chosen], dim=1)).squeeze(1)
        return logits


def train(look_up: LookUp, update: Update, job: DlrmJob, number: int) -> Figures:
    """Be a trainer.

    Args:
        look_up, update: those of Tables, wherever they are.
        number: of the trainer, 1 the first.

    Returns:
        How long each look-up and each update took, s; flights per second; and of the first trainer
        the area under the curve (AUC) of the flights held out.
    """
    trained, held_out, _ = flights.load(job.flights)
    store = dist.FileStore(f"{os.environ['MEETING']}.trainers", job.trainers)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=number - 1, world_size=job.trainers)
    torch.manual_seed(job.seed)
    dense = DistributedDataParallel(Dense(job.width))
    optimizer = torch.optim.Adam(dense.parameters(), lr=_DENSE_RATE)
    # One pass: every trainer has as many batches as the others, for DDP waits for all.
    generator = torch.Generator().manual_seed(job.seed)
    order = torch.randperm(len(trained.late), generator=generator)
    steps = len(order) // (job.batch * job.trainers)
    batches = order[: steps * job.batch * job.trainers].view(steps, job.trainers, job.batch)
    times: Figures = {"look_up": [], "update": []}
    dist.barrier()
    begin = time.perf_counter()
    for chosen in batches[:, number - 1]:
        batch = trained.of(chosen)
        vectors = _timed(times["look_up"], look_up, batch.rows).requires_grad_()
        loss = functional.binary_cross_entropy_with_logits(
            dense(batch.numbers, vectors), batch.late
        )
        optimizer.zero_grad()
        loss.backward()
        assert vectors.grad is not None
        _timed(times["update"], update, batch.rows, vectors.grad / job.trainers)
        optimizer.step()
    samples = steps * job.batch / (time.perf_counter() - begin)
    dist.barrier()  # so that no table changes any more
    found = [auc(look_up, dense.module, held_out)] if number == 1 else []
    dist.barrier()
    # First: DDP must not be the last that holds the process group (pytorch issue 56297).
    del dense
    dist.destroy_process_group()
    delays = {key: values[1:] or values for key, values in times.items()}  # the first connects
    return {**delays, "samples": [samples], "auc": found, "loss": [loss.item()]}


def auc(look_up: LookUp, dense: Dense, held_out: flights.Flights) -> float:
    """Return how likely a late flight is predicted to be later than another one."""
    scores = []
    with torch.no_grad():
        for begin in range(0, len(held_out.late), _EVALUATED):
            batch = held_out.of(slice(begin, begin + _EVALUATED))
            scores.append(dense(batch.numbers, look_up(batch.rows)))
    ranks = torch.cat(scores).argsort().argsort().double() + 1
    late = held_out.late.bool()
    count, others = int(late.sum()), int((~late).sum())
    return float((ranks[late].sum() - count * (count + 1) / 2) / (count * others))


def _timed(times: list[float], call: Callable[..., _Result], *arguments: Tensor) -> _Result:
    start = time.perf_counter()
    result = call(*arguments)
    times.append(time.perf_counter() - start)
    return result
