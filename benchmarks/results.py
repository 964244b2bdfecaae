"""From rounds to figures: medians, percentiles, ratios taken round by round, and targets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cases.interface import Case, Metric, Round, Target


@dataclass(frozen=True)
class Summary:
    """One metric of one back end over all rounds.

    Attributes:
        median, p95, p99: of all samples.
        samples: number of samples.
    """

    median: float
    p95: float
    p99: float
    samples: int


@dataclass
class CaseResult:
    """The result of a case.

    Attributes:
        case: the case.
        rounds: back end -> its rounds, in order; back ends that failed have fewer.
        begun: how many rounds have begun.
        turns: back end -> how long each of its turns took, s, turns that are not counted included.
        failures: back end -> why it has no figures, or not all.
        skips: back end -> why it did not take part.
    """

    case: Case
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    begun: int = 0
    turns: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)

    def summary(self, backend: str, metric: str) -> Summary | None:
        """Return a metric of a back end; None if it was not measured."""
        values = [value for one in self.rounds.get(backend, ()) for value in one.figures[metric]]
        if not values:
            return None
        median, p95, p99 = (float(q) for q in np.percentile(values, (50, 95, 99)))
        return Summary(median, p95, p99, len(values))

    def cpu(self, backend: str) -> float | None:
        """Return the CPU time per call of all workers, s, the median of the rounds."""
        return median([one.cpu for one in self.rounds.get(backend, ()) if one.cpu is not None])

    def ratios(self, metric: str, subject: str, baseline: str) -> list[float]:
        """Return how many times better the subject is, round by round.

        In a round both run directly one after the other, so other work on the machine disturbs
        both alike.
        """
        return [ratio for _, ratio in self._ratios(metric, subject, baseline)]

    def interval(self, metric: str, subject: str, baseline: str) -> tuple[float, float] | None:
        """Return an interval that holds the ratio with a confidence of at least 95 %.

        Valid if each pass had processes of its own. None where there are too few passes. Computed
        by order statistics of the passes' medians, so no distribution is assumed.
        """
        passes: defaultdict[int, list[float]] = defaultdict(list)
        for passing, ratio in self._ratios(metric, subject, baseline):
            passes[passing].append(ratio)
        medians = sorted(float(np.median(ratios)) for ratios in passes.values())
        count = len(medians)
        # Probability that the true median lies outside when `cut` values at each end are left out.
        outside = 0.0
        for cut in range(count // 2):
            outside += 2 * math.comb(count, cut) / 2**count
            if outside > 0.05:
                return (medians[cut - 1], medians[-cut]) if cut > 0 else None
        return None

    def _ratios(self, metric: str, subject: str, baseline: str) -> Iterator[tuple[int, float]]:
        found = self.case.metrics[metric]
        for ours, theirs in zip(
            self.rounds.get(subject, ()), self.rounds.get(baseline, ()), strict=False
        ):
            one = _of_round(found, ours.figures[metric])
            other = _of_round(found, theirs.figures[metric])
            if one > 0 and other > 0:
                yield ours.passing, one / other if found.more_is_better else other / one

    def cpu_ratios(self, subject: str, baseline: str) -> list[float]:
        """Return how many times less CPU the subject needs, round by round."""
        pairs = zip(self.rounds.get(subject, ()), self.rounds.get(baseline, ()), strict=False)
        return [theirs.cpu / ours.cpu for ours, theirs in pairs if ours.cpu and theirs.cpu]

    def found(self, metric: str, target: Target, subject: str) -> float | None:
        """Return the figure that a target is about; None if it was not measured."""
        if target.kind == "ratio":
            return median(self.ratios(metric, subject, target.against))
        if target.kind == "cpu":
            return median(self.cpu_ratios(subject, target.against))
        summary = self.summary(subject, metric)
        if summary is None:
            return None
        return summary.p99 if self.case.metrics[metric].tail else summary.median


def reaches(metric: Metric, target: Target, found: float, wanted: float) -> bool:
    """Return whether a figure is as good as wanted."""
    if target.kind == "value" and not metric.more_is_better:
        return found <= wanted
    return found >= wanted


def median(values: Sequence[float]) -> float | None:
    """Return the median; None of nothing."""
    return float(np.median(values)) if values else None


def _of_round(metric: Metric, values: Sequence[float]) -> float:
    return float(np.percentile(values, 99 if metric.tail else 50))
