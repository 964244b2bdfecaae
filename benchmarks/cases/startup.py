"""Starting a group of processes on one machine, and what each process then holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.backends.interface import GROUPS
from benchmarks.cases.interface import Case, Metric, Round, Target

if TYPE_CHECKING:
    from benchmarks.group import Group

# Memory that TENSORPIPE needs for each pair of processes that have called each other, bytes: of 8
# processes each has 138 MB.
_TENSORPIPE_PAIR = 17e6


class Startup(Case):
    """init_rpc, a first call of each process to each other, and shutdown; processes exist before.

    Each time is from when the first process begins to when the last one returns. Memory and file
    descriptors are the growth of a process, on average, after the calls.

    Args:
        size: number of processes.
        rounds: by default.
        targets: by the keys of the metrics.
        long: measured only when asked for.
    """

    alone = True

    def __init__(
        self,
        size: int,
        rounds: int,
        targets: dict[str, Target] | None = None,
        *,
        long: bool = False,
    ) -> None:
        given = {key: (target,) for key, target in (targets or {}).items()}
        metrics = {
            "time": Metric(f"init of {size} processes", "s", given.get("time", ())),
            "calls": Metric("  then first calls, all to all", "s", given.get("calls", ())),
            "both": Metric("  init and first calls", "s", given.get("both", ())),
            "shutdown": Metric("  shutdown", "s"),
            "memory": Metric("  private memory of each", "B", given.get("memory", ())),
            "fds": Metric("  file descriptors of each", "n", given.get("fds", ())),
        }
        super().__init__(f"init-{size}", metrics, rounds, frozenset({GROUPS, "nothing"}))
        self.size, self.long = size, long

    def memory(self, backend: str) -> int:
        pairs = self.size**2 if backend == "tensorpipe" else 0
        return super().memory(backend) + int(_TENSORPIPE_PAIR * pairs)

    def round(self, group: Group) -> Round:
        group.run_all("prepare")
        before = group.cpu_seconds()
        started = group.run_all("start")
        used = group.cpu_seconds() - before
        called = group.run_all("call_all")
        grown = group.run_all("growth")
        stopped = group.run_all("stop")
        init, calls = _span(started), _span(called)
        return Round(
            {
                "time": [init],
                "calls": [calls],
                "both": [init + calls],
                "shutdown": [_span(stopped)],
                "memory": [sum(one for one, _ in grown) / self.size],
                "fds": [sum(one for _, one in grown) / self.size],
            },
            used,
        )


def _span(moments: list[tuple[float, float]]) -> float:
    return max(end for _, end in moments) - min(begin for begin, _ in moments)


CASES = [
    Startup(2, 5),
    Startup(8, 5, {"time": Target(12), "memory": Target(20), "fds": Target(17)}),
    Startup(24, 3, {"both": Target(1.0, 0.3, "value")}),
    Startup(
        64,
        2,
        {
            "time": Target(6.0, 2.0, "value"),
            "memory": Target(15e6, 10e6, "value"),
            "fds": Target(130, kind="value"),
        },
        long=True,
    ),
    Startup(
        256,
        1,
        {"time": Target(10.0, kind="value"), "calls": Target(16.0, kind="value")},
        long=True,
    ),
]
