"""The benchmarks in real processes: the functions that they call give the right answers, however
the workers are started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import trees
from benchmarks.backends.interface import Place
from benchmarks.backends.limit import Limit
from benchmarks.cases import CASES
from benchmarks.group import Group
from benchmarks.results import CaseResult
from benchmarks.runner import Contender, Runner
from tests.support import netns

# Every case checks its answers. These have: no tensor, an inline tensor, a large one, one changed
# in place, many tensors, asynchronous calls, threads.
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


def test_answers_of_the_limit_stay_while_they_are_held(tmp_path: Path) -> None:
    caller, callee = Limit(), Limit()
    with contextlib.ExitStack() as stack:
        for rank, worker in enumerate((caller, callee)):
            worker.start(Place(rank, 2, str(tmp_path / "store")))
            stack.callback(worker.stop)
        values = [torch.full((20_000,), float(value)) for value in range(30)]
        pending = [caller.call_async(1, "identity", value) for value in values]
        first = caller.call(1, "operate", values[0])
        second = caller.call(1, "add", values[1], values[2])
        assert all(
            torch.equal(one.wait(), value) for one, value in zip(pending, values, strict=True)
        )
        assert torch.equal(first, torch.full_like(first, 2.0))
        assert torch.equal(second, values[3])
        # A caller that holds no results gets the same memory in every call.
        del first, second
        assert len({caller.call(1, "identity", values[0]).data_ptr() for _ in range(5)}) == 1


def test_grpc() -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed")
    check(run([Contender("grpc", "grpc")], *_CASES, "fan-in"))


def test_torch_backends_side_by_side() -> None:
    both = [Contender(name, name) for name in ("ucx", "tensorpipe")]
    check(run(both, "builtin-ops-4m", "rref", "autograd", "batches", "script-loop"))


def test_workers_of_another_tree() -> None:
    with trees.working() as tree:
        check(run([Contender("here", "ucx", tree)], "python"))


def test_workers_of_another_tree_on_two_hosts(
    hosts: tuple[netns.Host, netns.Host],
) -> None:
    with trees.working() as tree, Group("ucx", hosts=hosts, tree=tree) as group:
        before = group.cpu_seconds()
        group.run_on([0], "call_all")
        assert group.cpu_seconds() > before  # of the worker processes only
        places = {os.readlink(f"/proc/{worker.pid}/ns/net") for worker in group.workers}
    assert len(places) == 2 and os.readlink("/proc/self/ns/net") not in places
