"""The latency protocol of the paper "PyTorch RPC" (MLSys 2023).

Ten calls are in flight at once; the figure is the mean delay of a call, from its start to the
callback of its future, in the rounds after the first one. The published programs of the paper's
authors are FedML-AI/FedML, python/tests/grpc_benchmark/benchmark. The paper's figures are of other
machines, so only their ratios can be compared with ours.
"""

from __future__ import annotations

import time
from functools import partial

from benchmarks.backends.interface import HOSTS, Backend, Pending
from benchmarks.cases.calls import elements
from benchmarks.cases.hosts import UNSHAPED
from benchmarks.cases.interface import CallCase, Figures, Metric, Target
from tests.support.netns import Link

IN_FLIGHT = 10
# How many times the tensor of a call lies in memory at most: argument and result, at both ends.
_COPIES = {"ucx": 2, "limit": 2, "tensorpipe": 3}


class TenInFlight(CallCase):
    """Ten calls of one function with one tensor, all under way at once.

    Args:
        name: on the command line.
        title: in the table.
        function: name in functions.py.
        payload: size of the tensor, bytes.
        link: between the two workers' hosts; None if both are on one host.
        rounds: by default.
        paper: gRPC -> PyTorch RPC, the paper's figures, s.
        targets: of the mean delay.
        long: measured only when asked for.
    """

    calls = IN_FLIGHT

    def __init__(
        self,
        name: str,
        title: str,
        function: str,
        payload: int,
        *,
        rounds: int,
        paper: tuple[float, float],
        link: Link | None = None,
        targets: tuple[Target, ...] = (),
        long: bool = False,
    ) -> None:
        needs = frozenset({function} if link is None else {function, HOSTS})
        super().__init__(name, {"delay": Metric(title, "s", targets, paper=paper)}, rounds, needs)
        self.function, self.payload, self.link, self.long = function, payload, link, long

    def memory(self, backend: str) -> int:
        return super().memory(backend) + _COPIES.get(backend, 4) * IN_FLIGHT * self.payload

    def measure(self, backend: Backend) -> Figures:
        tensor = elements(self.payload)
        delays: list[float] = []
        pending: list[Pending] = []
        for _ in range(IN_FLIGHT):
            start = time.perf_counter()
            call = backend.call_async(1, self.function, tensor)
            backend.when_done(call, partial(_note, delays, start))
            pending.append(call)
        # All answers are kept until the last one has come, as in the paper's programs.
        answers = [call.wait() for call in pending]
        while len(delays) < len(answers):
            time.sleep(0.0001)  # the last callbacks may run on another thread
        return {"delay": [sum(delays) / len(delays)]}


def _note(delays: list[float], start: float) -> None:
    delays.append(time.perf_counter() - start)


def _cases() -> list[TenInFlight]:
    # (function, its title, bytes, paper's figures on one host, and between two hosts)
    matrix = (
        ("identity", "python identity", 4, (0.0267, 0.0087), (0.0616, 0.0055)),
        ("script_identity", "TorchScript identity", 4, (0.0325, 0.0089), (0.0534, 0.0056)),
        ("operate", "python, 200 ops", 4, (0.204, 0.0817), (0.156, 0.0808)),
        ("identity", "python identity", 400, (22.203, 1.249), (25.67, 0.457)),
        ("script_identity", "TorchScript identity", 400, (24.788, 1.359), (26.178, 0.458)),
        ("operate", "python, 200 ops", 400, (42.541, 16.57), (38.443, 16.52)),
    )
    cases = []
    for function, title, megabytes, within, between in matrix:
        for link, paper in ((None, within), (UNSHAPED, between)):
            place = "" if link is None else "two hosts: "
            name = f"{'' if link is None else 'hosts-'}ten-{function}-{megabytes}m".replace(
                "_", "-"
            )
            large = megabytes > 4
            computes = function == "operate"
            cases.append(
                TenInFlight(
                    name,
                    f"{place}{title}, {megabytes} MB, 10 in flight",
                    function,
                    megabytes * 1_000_000,
                    link=link,
                    rounds=5 if large else 10,
                    paper=paper,
                    targets=() if computes else (Target(4 if link is None else 1.15),),
                    long=large and (computes or function != "identity" or link is not None),
                )
            )
    return cases


CASES = _cases()
