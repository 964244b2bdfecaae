"""Runs the applications: groups of processes, the ways to communicate in turns."""

from __future__ import annotations

import contextlib
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

from benchmarks.applications.interface import WAYS, Application, Figures, Job
from benchmarks.applications.stubs import generate
from benchmarks.processes import Worker, WorkerFailed
from tests.support import netns
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
    if WAYS[way][1] == "UCX":
        import torch_rpc_ext

        return str(torch_rpc_ext.info()["ucx"].get("error", ""))
    return ""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def run_once(application: Application, job: Job, way: str) -> Figures:
    """Run a job in one way.

    Raises:
        WorkerFailed: a process raised, ended or does not answer.
        NotPossible: this machine forbids the network that the job needs.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rpc_paper_"))
        star = None if job.network is None else stack.enter_context(_star(job))
        group = _Group(application.name, job, way, os.path.join(folder, "meeting"), star)
        try:
            figures = group.run()
        finally:
            group.close()
    delay = [] if star is None else [star.link.delay_ms / 1000]
    return {**figures, "delay": delay}


class _Group:
    """Owns: the processes of a run."""

    def __init__(
        self, application: str, job: Job, way: str, meeting: str, star: netns.Star | None
    ) -> None:
        self.application, self.job, self.way, self.star = application, job, way, star
        self.meeting, self.port = meeting, free_port()
        self.workers: list[Worker] = []

    def run(self) -> Figures:
        """Start all and wait for all; returns what one of them returns, raises what any raises."""
        figures: Figures = {}
        waiting: dict[Any, tuple[int, int, Worker]] = {}
        for rank in range(self.job.processes):
            worker = self._start(rank, 0)
            waiting[worker.pipe] = (rank, 0, worker)
        while waiting:
            ready = connection.wait(list(waiting), PATIENCE)
            if not ready:
                raise WorkerFailed(f"{len(waiting)} processes did not end in {PATIENCE:.0f} s")
            for pipe in ready:
                rank, life, worker = waiting.pop(pipe)
                try:
                    figures = worker.result() or figures
                except WorkerFailed:
                    if life > 0 or rank not in self.job.comes_back or worker.exitcode() is None:
                        raise
                    again = self._start(rank, life + 1)
                    waiting[again.pipe] = (rank, life + 1, again)
        return figures

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.close()

    def _start(self, rank: int, life: int) -> Worker:
        name = f"{self.application}'s process {rank} on {self.way}"
        job, host = replace(self.job, life=life), None
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        if self.star is not None:
            host = self.star.hosts[rank]
            address = {"MASTER_ADDR": self.star.hosts[0].ipv4, "LINK": "eth0"}
            interfaces = dict.fromkeys(("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "eth0")
            environment = {**environment, **address, **interfaces}
        arguments = (self.application, job, self.way, rank)
        worker = Worker(name, _Process, *arguments, host=host)
        self.workers.append(worker)
        worker.start("run", {**environment, "MEETING": self.meeting})
        return worker


class _Process:
    """What a process of a run holds."""

    def __init__(self, application: str, job: Job, way: str, rank: int) -> None:
        self.application, self.job, self.way, self.rank = application, job, way, rank

    def run(self, environment: dict[str, str]) -> Figures | None:
        """Be a process of the run, started as torchrun would."""
        import torch

        os.environ.update(environment)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or it tells of every goodbye
        # A takeover would compare a back end with itself.
        os.environ.pop("TORCH_RPC_BACKEND", None)
        # Upstream's init of TENSORPIPE warns about itself (pytorch issue 149393).
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        torch.set_num_threads(self.job.threads)
        module, backend, options = WAYS[self.way]
        if options:
            _with_options(backend, options)
        name = f"benchmarks.applications.{self.application}.{module}"
        application: Any = importlib.import_module(name)
        figures: Figures | None = application.run(self.rank, self.job, backend)
        return figures


def _of(job: Job, ways: Sequence[str]) -> list[str]:
    chosen = set(ways) & set(job.ways)
    return [way for way in WAYS if way in {*chosen, *job.more_ways}]


def _star(job: Job) -> contextlib.AbstractContextManager[netns.Star]:
    assert job.network is not None
    return netns.star(job.processes, job.network)


def _with_options(backend: str, options: dict[str, Any]) -> None:
    """Give this process, whose program passes no options, options of its back end."""
    import torch.distributed.rpc as rpc

    import torch_rpc_ext

    kinds = {"UCX": torch_rpc_ext.UcxRpcBackendOptions, "TENSORPIPE": _tensorpipe_options}
    made: Any = kinds[backend](**options)
    rpc.init_rpc = functools.partial(rpc.init_rpc, rpc_backend_options=made)


def _tensorpipe_options(**options: Any) -> Any:
    import torch.distributed.rpc as rpc

    return rpc.TensorPipeRpcBackendOptions(**options)


PATIENCE = 600.0  # s to wait for one of the processes to end


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
                except netns.NotPossible as reason:
                    result.skips[way] = str(reason)
                    progress.write(f"{application.name} {job.name}: {way} is left out: {reason}")
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
