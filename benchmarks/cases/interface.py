"""The interface of a case. To add one: an instance, or a file with a class, and a line in
__init__.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchmarks.backends.interface import Backend
from tests.support.netns import Link

if TYPE_CHECKING:
    from benchmarks.group import Group

Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Target:
    """What our back end must reach in a metric.

    Attributes:
        at_least: the minimum; a ratio, or a value in the metric's unit.
        aim: a better figure that is wanted; None for none.
        kind: 'ratio': how many times better than another back end; 'cpu': how many times less CPU
            time than another back end; 'value': the figure itself.
        against: the other back end.
    """

    at_least: float
    aim: float | None = None
    kind: Literal["ratio", "cpu", "value"] = "ratio"
    against: str = "tensorpipe"


@dataclass(frozen=True)
class Metric:
    """One figure of a case.

    Attributes:
        title: of its row in the table.
        unit: 's', 'B', 'B/s', 'n', or '%' for a share, 0 to 1.
        targets: those of issue 3, or where it has none, what the first prototype reached.
        more_is_better: True for a bandwidth, for example.
        tail: the 99th percentile counts, not the median.
        paper: figures of the paper "PyTorch RPC", of other machines: gRPC's and PyTorch RPC's.
    """

    title: str
    unit: str = "s"
    targets: tuple[Target, ...] = ()
    more_is_better: bool = False
    tail: bool = False
    paper: tuple[float, float] | None = None


@dataclass(frozen=True)
class Round:
    """The figures of one round of a case on one back end.

    Attributes:
        figures: by metric.
        cpu: CPU time of all workers per call, s; None where it cannot be divided among calls.
        passing: number of the pass that the round belongs to.
    """

    figures: Figures
    cpu: float | None
    passing: int = 0


class Case(ABC):
    """Something to measure.

    Args:
        name: on the command line.
        metrics: key of a figure -> metric; CPU time belongs to the first metric.
        rounds: by default.
        needs: names in functions.py, and abilities, that a back end must have.
    """

    #: Starts a group of its own in each round.
    alone = False
    #: Number of workers in the group.
    size = 2
    #: Takes long, so it is measured on request only.
    long = False
    #: Its tensors are on a GPU, so it belongs to the command `cuda`.
    gpu = False
    #: The network between worker 0's host and that of the others; None if all are on one host.
    link: Link | None = None

    def __init__(
        self, name: str, metrics: dict[str, Metric], rounds: int, needs: frozenset[str]
    ) -> None:
        self.name, self.metrics, self.rounds, self.needs = name, metrics, rounds, needs

    def memory(self, backend: str) -> int:
        """Return what all workers of a back end together may need for a round at most, B.

        The runner ends the groups of other back ends where less is available.
        """
        return 2 * 2**30

    @abstractmethod
    def round(self, group: Group) -> Round:
        """Run one round, in the driver.

        Args:
            group: workers of one back end; a new one, not started, if alone.
        """


class CallCase(Case):
    """A case that workers of a group measure, by calling other workers."""

    #: Number of calls of a caller in a round; 0 if CPU time per call would mean nothing.
    calls = 0
    #: Ranks of the workers that measure, at the same time.
    callers: tuple[int, ...] = (0,)

    def round(self, group: Group) -> Round:
        before = group.cpu_seconds()
        found: list[Figures] = group.run_on(self.callers, "measure", self.name)
        used = group.cpu_seconds() - before
        figures = {key: [value for one in found for value in one[key]] for key in found[0]}
        calls = self.calls * len(self.callers)
        return Round(figures, used / calls if calls else None)

    @abstractmethod
    def measure(self, backend: Backend) -> Figures:
        """Make the calls of one round, in a caller."""
