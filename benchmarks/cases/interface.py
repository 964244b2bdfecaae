"""What a case is. To add one: an instance, or a file with a class, and a line in __init__.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.backends.interface import Backend

if TYPE_CHECKING:
    from benchmarks.group import Group

Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Metric:
    """One figure of a case.

    Attributes:
        title: its row in the table.
        unit: 's', 'B', 'B/s' or 'n'.
        floor: the ratio against TENSORPIPE that the handbook's prototype reached
            (shared/handbook/ucx.md); None where it has none.
        more_is_better: as of a bandwidth.
        tail: its ratio is that of the 99th percentiles, not that of the medians.
    """

    title: str
    unit: str = "s"
    floor: float | None = None
    more_is_better: bool = False
    tail: bool = False


@dataclass(frozen=True)
class Round:
    """What one round of a case on one back end gave.

    Attributes:
        figures: by metric.
        cpu: CPU time of all workers per call, s; None where a call's share cannot be told.
    """

    figures: Figures
    cpu: float | None


class Case(ABC):
    """Something to measure.

    Args:
        name: on the command line.
        metrics: by the keys of its figures; the first one is that to which CPU time belongs.
        rounds: by default.
        needs: names in functions.py that a back end must be able to call.
        alone: it makes its own processes instead of using the pair.
    """

    alone = False

    def __init__(
        self, name: str, metrics: dict[str, Metric], rounds: int, needs: frozenset[str]
    ) -> None:
        self.name, self.metrics, self.rounds, self.needs = name, metrics, rounds, needs

    @abstractmethod
    def round(self, backend: str, pair: Group | None) -> Round:
        """Run one round, in the driver.

        Args:
            backend: its name.
            pair: its two workers; None if alone.
        """


class CallCase(Case):
    """A case that worker 0 of a pair measures, by calling worker 1."""

    #: How many calls a round makes; 0 if CPU time per call would mean nothing.
    calls = 0

    def round(self, backend: str, pair: Group | None) -> Round:
        assert pair is not None
        before = pair.cpu_seconds()
        figures: Figures = pair.workers[0].run("measure", self.name)
        used = pair.cpu_seconds() - before
        return Round(figures, used / self.calls if self.calls else None)

    @abstractmethod
    def measure(self, backend: Backend) -> Figures:
        """Make the calls of one round, in worker 0."""
