"""Starting a group of processes that run on one machine, and what each of them then holds."""

from __future__ import annotations

from benchmarks.cases.interface import Case, Metric, Round
from benchmarks.group import Group


class Startup(Case):
    """init_rpc, from the first that enters to the last that returns; the processes stand ready.

    Memory and file descriptors are what a process has more than before, on average, after every
    worker has called every other one.

    Args:
        size: number of processes.
        floors: the prototype's ratios: time, memory, file descriptors.
    """

    alone = True

    def __init__(self, size: int, floors: tuple[float, float, float]) -> None:
        metrics = {
            "time": Metric(f"init of {size} processes", "s", floors[0]),
            "memory": Metric("  private memory of each", "B", floors[1]),
            "fds": Metric("  file descriptors of each", "n", floors[2]),
        }
        super().__init__(f"init-{size}", metrics, 5, frozenset({"nothing"}))
        self.size = size

    def round(self, backend: str, pair: Group | None) -> Round:
        group = Group(backend, self.size)
        try:
            group.run_all("prepare")
            before = group.cpu_seconds()
            moments = group.run_all("start")
            used = group.cpu_seconds() - before
            group.run_all("call_all")
            grown = group.run_all("growth")
            group.run_all("stop")
        finally:
            group.close()
        seconds = max(end for _, end in moments) - min(begin for begin, _ in moments)
        memory = sum(one for one, _ in grown) / self.size
        fds = sum(one for _, one in grown) / self.size
        return Round({"time": [seconds], "memory": [memory], "fds": [fds]}, used)


CASES = [Startup(8, (12, 20, 17))]
