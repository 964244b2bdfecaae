"""Runs the applications: groups of processes, the ways to communicate in turns."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.applications.interface import SOCKETS_ONLY, WAYS, Application, Figures, Job
from benchmarks.applications.stubs import generate
from benchmarks.processes import Worker, WorkerFailed
from tests.support.ports import free_port


@dataclass
class JobResult:
    """What a job gave.

    Attributes:
        rounds: of each way that took part, in order; ways that failed have fewer.
        failures: why a way has no figures, or not all.
        skips: why a way did not take part.
    """

    application: Application
    job: Job
    rounds: defaultdict[str, list[Figures]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)


def run(
    chosen: Sequence[tuple[Application, Sequence[Job]]], ways: Sequence[str]
) -> Iterator[JobResult]:
    """Yield the result of each job; what cannot run or fails keeps nothing else from running."""
    turns = sum(job.rounds * len(_of(job, ways)) for _, jobs in chosen for job in jobs)
    with tqdm(total=turns, unit="run", mininterval=1) as progress:
        for application, jobs in chosen:
            for job in jobs:
                yield _run(application, job, _of(job, ways), progress)


def why_not(application: Application, job: Job, way: str) -> str:
    """Return why a job cannot run in a way here, in a sentence; empty if it can."""
    missing = [name for name in job.packages if not is_installed(name)]
    if missing:
        return f"{' and '.join(missing)} must be installed (make paper does so)"
    needed = job.memory * job.processes
    free = int(psutil.virtual_memory().available)
    if needed > free:
        return f"{job.processes} processes need {_gib(needed)} of memory, {_gib(free)} are free"
    if way == "grpc":
        return _why_no_grpc(application)
    if way == "ucx":
        import torch_rpc_ext

        return str(torch_rpc_ext.info()["ucx"].get("error", ""))
    return ""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def run_once(application: Application, job: Job, way: str) -> Figures:
    """Run a job in one way.

    Raises:
        WorkerFailed: a process raised, ended or does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="rpc_paper_") as folder:
        meeting = os.path.join(folder, "meeting")
        port, workers = free_port(), []
        try:
            for rank in range(job.processes):
                name = f"{application.name}'s process {rank} on {way}"
                workers.append(Worker(name, _Process, application.name, job, way, rank))
                workers[-1].start("run", meeting, port)
            return _first(workers)
        finally:
            for worker in workers:
                worker.close()


class _Process:
    """What a process of a run holds."""

    def __init__(self, application: str, job: Job, way: str, rank: int) -> None:
        self.application, self.job, self.way, self.rank = application, job, way, rank

    def run(self, meeting: str, port: int) -> Figures | None:
        """Be a process of the run, started as torchrun would."""
        import torch

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MEETING=meeting)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or it tells of every goodbye
        # A takeover would compare a back end with itself.
        os.environ.pop("TORCH_RPC_BACKEND", None)
        # Upstream's init of TENSORPIPE warns about itself (pytorch issue 149393).
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        torch.set_num_threads(self.job.threads)
        if self.way == SOCKETS_ONLY:
            _without_shared_memory()
        module, backend = WAYS[self.way]
        name = f"benchmarks.applications.{self.application}.{module}"
        application: Any = importlib.import_module(name)
        figures: Figures | None = application.run(self.rank, self.job, backend)
        return figures


def _of(job: Job, ways: Sequence[str]) -> list[str]:
    return [way for way in WAYS if way in {*ways, *job.more_ways}]


def _without_shared_memory() -> None:
    """Make TENSORPIPE use sockets in this process, whose program passes no options."""
    import torch.distributed.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    rpc.init_rpc = functools.partial(rpc.init_rpc, rpc_backend_options=options)


def _first(workers: Sequence[Worker]) -> Figures:
    """Wait for all; returns what the first one returns, raises what any raises."""
    figures: Figures = {}
    waiting: dict[Any, Worker] = {worker.pipe: worker for worker in workers}
    while waiting:
        ready = connection.wait(list(waiting), PATIENCE)
        if not ready:
            raise WorkerFailed(f"{len(waiting)} processes did not end in {PATIENCE:.0f} s")
        for pipe in ready:
            worker = waiting.pop(pipe)
            figures = worker.result() or figures
    return figures


PATIENCE = 240.0  # s to wait for a process to end


def _run(application: Application, job: Job, ways: Sequence[str], progress: Any) -> JobResult:
    result = JobResult(application, job)
    for way in ways:
        why = why_not(application, job, way)
        if why:
            result.skips[way] = why
            progress.write(f"{application.name} {job.name}: {way} is left out: {why}")
    for number in range(job.rounds):
        # Another one begins each time: what comes first on a machine gets another machine.
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            progress.set_description(f"{application.name} {job.name}, {way}")
            if way not in result.skips and way not in result.failures:
                try:
                    figures = run_once(application, replace(job, seed=number), way)
                    result.rounds[way].append(figures)
                except WorkerFailed as failure:
                    result.failures[way] = " ".join(str(failure).split())
                    progress.write(f"{application.name} {job.name}: {failure}")
            progress.update()
    return result


def _why_no_grpc(application: Application) -> str:
    if not is_installed("grpc"):
        return "grpcio must be installed (make paper does so)"
    try:
        generate(application.name)
    except (ImportError, RuntimeError) as error:
        return f"{error} (make paper installs grpcio-tools)"
    return ""


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
