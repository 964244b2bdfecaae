"""The benchmarks in real processes: what they call answers rightly, wherever workers come from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import trees
from benchmarks.cases import CASES
from benchmarks.results import CaseResult
from benchmarks.runner import Contender, Runner

# Each checks its answers; empty, inline, large and changed in place, many, asynchronous, threads.
_CASES = ["empty", "builtin", "python-4m", "python-ops-4m", "many-tensors", "flood-builtin"]


def run(contenders: Sequence[Contender], *names: str) -> list[CaseResult]:
    with Runner(contenders) as runner:
        return list(runner.run([(CASES[name], 1) for name in names]))


def check(results: Sequence[CaseResult]) -> None:
    for result in results:
        assert not result.failures, result.case.name
        for backend, rounds in result.rounds.items():
            assert len(rounds) == 1, (result.case.name, backend)
            assert all(value > 0 for values in rounds[0].figures.values() for value in values)
            assert rounds[0].cpu is None or 0 < rounds[0].cpu < 10


def test_the_limit() -> None:
    check(run([Contender("limit", "limit")], *_CASES, "threads-8"))


def test_grpc() -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed")
    check(run([Contender("grpc", "grpc")], *_CASES, "fan-in"))


def test_torch_backends_side_by_side() -> None:
    both = [Contender(name, name) for name in ("ucx", "tensorpipe")]
    check(run(both, "builtin-ops-4m", "rref", "autograd", "batches", "script-loop"))


def test_workers_of_another_tree() -> None:
    with trees.working() as tree:
        check(run([Contender("here", "ucx", tree)], "python"))
