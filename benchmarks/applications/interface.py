"""What an application is, and the ways in which its processes may communicate.

To add one: a folder with model.py, with_rpc.py and with_grpc.py, and a line in __init__.py. The
``run(rank, job, backend)`` of the last two is called in every process of a run; what the first
process returns are the figures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

#: TENSORPIPE without shared memory: not for comparison, but to find out what shared memory costs.
SOCKETS_ONLY = "tensorpipe, sockets"

#: Ways to communicate -> (module of the application, back end of torch.distributed.rpc).
WAYS = {
    "tensorpipe": ("with_rpc", "TENSORPIPE"),
    SOCKETS_ONLY: ("with_rpc", "TENSORPIPE"),
    "ucx": ("with_rpc", "UCX"),
    "grpc": ("with_grpc", ""),
}

#: The ways that all cases are run in.
DEFAULT_WAYS = tuple(way for way in WAYS if way != SOCKETS_ONLY)

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
        more_ways: that take part beside the usual ones.
        packages: that are imported, besides those of the benchmarks.
    """

    name: str
    title: str
    processes: int
    rounds: int = 1
    seed: int = 0
    memory: int = 400 << 20
    threads: int = 1
    more_ways: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """A figure that is shown.

    Attributes:
        title: for people.
        unit: "s", "1/s", or empty.
        is_spread: shown as mean and deviation of the rounds instead of the median of all values.
    """

    title: str
    unit: str = "s"
    is_spread: bool = False


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
    plots: ClassVar[tuple[Plot, ...]] = ()
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
