"""What an application is, and the ways in which its processes may communicate.

To add one: a folder with model.py, with_rpc.py, a module for each further way, and a line in
__init__.py. The ``run(rank, job, backend)`` of a way's module is called in every process of a run;
what a process returns are the figures, the others return None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tests.support.netns import Link

#: TENSORPIPE without shared memory: not for comparison, but to find out what shared memory costs.
SOCKETS_ONLY = "tensorpipe, sockets"

#: UCX with an option, where bytes or secrets matter.
BFLOAT16, ENCRYPTED = "ucx, bfloat16", "ucx, encryption"

#: Upstream's pipelines, which do not use RPC.
PIPELINING = "torch pipelining, gloo"

#: Ways to communicate -> (module of the application, back end of torch.distributed.rpc, its
#: options).
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tensorpipe": ("with_rpc", "TENSORPIPE", {}),
    SOCKETS_ONLY: ("with_rpc", "TENSORPIPE", {"_transports": ["uv"]}),
    "ucx": ("with_rpc", "UCX", {}),
    BFLOAT16: ("with_rpc", "UCX", {"wire_dtype": torch.bfloat16}),
    ENCRYPTED: ("with_rpc", "UCX", {"encryption": "on"}),
    "grpc": ("with_grpc", "", {}),
    PIPELINING: ("with_pipelining", "", {}),
}

#: The ways that are chosen where nobody chooses.
DEFAULT_WAYS = ("tensorpipe", "ucx", "grpc")

#: What a run measured; each figure has one value or many.
Figures = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of an application; subclasses say what is computed.

    Attributes:
        name: of the case, unique in the application.
        title: for people.
        processes: how many it takes.
        rounds: how often each way runs.
        seed: of whatever is random; the number of the round.
        memory: bytes that a process needs at most.
        threads: of torch, in each process.
        ways: that take part where they are chosen.
        more_ways: that take part beside the chosen ones.
        packages: that are imported, besides those of the benchmarks.
        network: each process is on a host of its own, joined by such links to one switch; None for
            all on this host.
        comes_back: ranks of processes that kill themselves once, and are started again.
        life: of the process, 0 the first; set by the runner.
    """

    name: str
    title: str
    processes: int
    rounds: int = 1
    seed: int = 0
    memory: int = 400 << 20
    threads: int = 1
    ways: tuple[str, ...] = DEFAULT_WAYS
    more_ways: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    network: Link | None = None
    comes_back: tuple[int, ...] = ()
    life: int = 0


@dataclass(frozen=True)
class Metric:
    """A figure that is shown.

    Attributes:
        title: for people.
        unit: "s", "1/s", or empty.
        is_spread: shown as mean and deviation of the rounds instead of the median of all values.
        is_course: its values follow each other; those of a run are kept for a plot.
        is_list: its values are of several things, of each stage for one; all are shown.
    """

    title: str
    unit: str = "s"
    is_spread: bool = False
    is_course: bool = False
    is_list: bool = False


@dataclass(frozen=True)
class Course:
    """A picture of the page: how metrics go in one run of a case, a line for each way.

    Attributes:
        metrics: a panel each; they have is_course.
        label: of the horizontal axis, where the first value stands at 1.
        job: the case.
    """

    metrics: tuple[str, ...]
    label: str
    job: str


@dataclass(frozen=True)
class Plot:
    """A picture of the page: a metric of several cases, a line for each way.

    Attributes:
        metrics: a panel each.
        label: of the horizontal axis.
        places: case -> where it stands on that axis.
    """

    metrics: tuple[str, ...]
    label: str
    places: Mapping[str, float]


class Application(ABC):
    """One of the paper's applications."""

    name: ClassVar[str]
    title: ClassVar[str]
    #: What differs from the paper's set-up, and what the figures say: paragraphs of the page.
    remarks: ClassVar[str] = ""
    plots: ClassVar[tuple[Plot | Course, ...]] = ()
    metrics: ClassVar[dict[str, Metric]]
    #: The paper's lines of communication by way; "generated" are those that protoc makes.
    paper_lines: ClassVar[dict[str, int]] = {}

    @abstractmethod
    def jobs(self, *, small: bool) -> Sequence[Job]:
        """Return its cases.

        Args:
            small: those of the tests, a few seconds all together.
        """

    @abstractmethod
    def shown(self, job: Job) -> Sequence[str]:
        """Return the metrics that its table shows, in order."""

    def paper(self, job: Job, metric: str) -> str:
        """Return the paper's figure for a case; empty where the paper has none."""
        return ""
