"""The clocks of other workers, compared over RPC.

Cristian's algorithm: the other clock is read once during a round trip. The reading counts as that
of the middle of the round trip, so it is wrong by half of the round trip at most. The shortest of
many round trips counts.
Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext.profiler import recorder

__all__ = ["Clock", "Sample", "compare"]

rpc: Any = _untyped_rpc  # upstream's functions have no types

_ROUND_TRIPS = 30
_TIMEOUT = 10.0


class Sample(NamedTuple):
    """One comparison of another worker's clock with this worker's.

    Attributes:
        at_ns: time of the comparison, on this worker's time.perf_counter_ns().
        offset_ns: the other worker's clock minus this worker's.
        error_ns: the largest error that offset_ns can have.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


class Clock(NamedTuple):
    """The clock of another worker, from one comparison before the profile and one after it.

    ::

        clock = prof.clocks["worker1"]  # a Clock
        execution = prof.recordings["worker1"].executions[0]
        print(clock.to_ours(execution.begin_ns), "+-", clock.error_ns, "ns")

    Attributes:
        first: the comparison before the profile.
        last: the comparison after it.
    """

    first: Sample
    last: Sample

    @property
    def error_ns(self) -> int:
        """The largest error of a converted time, ns, if the clocks drift evenly."""
        return max(self.first.error_ns, self.last.error_ns)

    def to_ours(self, theirs_ns: int) -> int:
        """Convert a time of the other worker's clock to this worker's clock, ns."""
        span = self.last.at_ns - self.first.at_ns
        drift = self.last.offset_ns - self.first.offset_ns
        since = theirs_ns - self.first.offset_ns - self.first.at_ns
        return theirs_ns - self.first.offset_ns - (round(drift * since / span) if span else 0)


def compare(worker: str) -> Sample:
    """Compare a worker's clock with this worker's clock now.

    Args:
        worker: name of the other worker.

    Raises:
        RpcError: the other worker does not answer.
        TypeError: the other worker's answer is no time.
    """
    best: Sample | None = None
    for _ in range(_ROUND_TRIPS):
        begin = time.perf_counter_ns()
        theirs = rpc.rpc_sync(worker, recorder.now, timeout=_TIMEOUT)
        half = (time.perf_counter_ns() - begin + 1) // 2
        if type(theirs) is not int:
            raise TypeError(f"its clock shows a {type(theirs).__name__} and no time")
        if best is None or half < best.error_ns:
            best = Sample(begin + half, theirs - begin - half, half)
    assert best is not None
    return best
