"""The driver of the benchmarks: arithmetic, choice, and what it makes of a stored run. No processes
but where a back end must fail in one."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
import tomllib
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from benchmarks import commands, page, plots, records, summary, table, trees
from benchmarks.__main__ import main
from benchmarks.backends import BACKENDS, cuda, flat
from benchmarks.backends.interface import Backend, Place
from benchmarks.cases import CASES
from benchmarks.cases.interface import Case, Metric, Round, Target
from benchmarks.functions import FUNCTIONS
from benchmarks.group import Group
from benchmarks.processes import WorkerFailed
from benchmarks.results import CaseResult, reaches
from benchmarks.runner import Contender, Runner
from tests.support import netns
from tests.support.gpu import NO_GPU

MACHINE = {
    "type": "machine",
    "time": "2026-01-02T03:04:05+00:00",
    "cpu": "a CPU",
    "cores": 2,
    "memory_bytes": 2**34,
    "torch": "2",
    "ucx": "1",
    "wake_up_us": 30.0,
    "memcpy_gb_per_s": 10.0,
    "revision": "abc",
    "subject": "ucx",
}


class Fixed(Case):
    """A case whose figures are given: by back end, a list of rounds."""

    alone = True

    def __init__(self, metric: Metric, figures: dict[str, list[list[float]]]) -> None:
        super().__init__("fixed", {"time": metric}, 3, frozenset())
        self.figures = {name: list(rounds) for name, rounds in figures.items()}

    def round(self, group: Group) -> Round:
        if not self.figures[group.backend]:
            raise WorkerFailed("no more")
        return Round({"time": self.figures[group.backend].pop(0)}, cpu=None)


def result(
    metric: Metric, ours: list[list[float]], theirs: list[list[float]], cpu: float = 1.0
) -> CaseResult:
    rounds = {
        "ucx": [Round({"time": one}, cpu) for one in ours],
        "tensorpipe": [Round({"time": one}, 4 * cpu) for one in theirs],
    }
    return CaseResult(Fixed(metric, {}), rounds)


def target_of(found: CaseResult) -> dict[str, Any]:
    (target,) = records.of_type(list(records.of_result(found, "ucx")), "target")
    return dict(target)


def test_ratios_are_taken_round_by_round() -> None:
    # The second round of both is disturbed: the ratio of medians of all samples would be 5.5.
    found = result(Metric("t"), [[1.0], [10.0], [1.0]], [[2.0], [20.0], [9.0]])
    assert found.ratios("time", "ucx", "tensorpipe") == [2.0, 2.0, 9.0]
    assert found.cpu_ratios("ucx", "tensorpipe") == [4.0, 4.0, 4.0]


def test_more_is_better_turns_the_ratio_round() -> None:
    found = result(Metric("t", "B/s", more_is_better=True), [[8.0]], [[2.0]])
    assert found.ratios("time", "ucx", "tensorpipe") == [4.0]


def test_a_tail_is_the_99th_percentile() -> None:
    ours, theirs = [1.0] * 98 + [100.0] * 2, [1.0] * 98 + [300.0] * 2
    found = result(Metric("t", tail=True), [ours], [theirs])
    (ratio,) = found.ratios("time", "ucx", "tensorpipe")
    assert ratio == pytest.approx(np.percentile(theirs, 99) / np.percentile(ours, 99))
    assert ratio > 2.5


@pytest.mark.parametrize(
    ("ours", "met", "aim_met"), [(0.4, True, True), (0.6, True, False), (1.1, False, False)]
)
@pytest.mark.parametrize("kind", ["ratio", "value"])
def test_targets(kind: Any, ours: float, met: bool, aim_met: bool) -> None:
    given = Target(1.0, 0.5, "value") if kind == "value" else Target(1.0, 2.0)
    target = target_of(result(Metric("t", targets=(given,)), [[ours]], [[1.0]]))
    assert (target["met"], target["aim_met"]) == (met, aim_met)


def test_a_share_must_be_large() -> None:
    share = Metric("t", "%", more_is_better=True)
    assert reaches(share, Target(0.95, kind="value"), 0.96, 0.95)
    assert not reaches(share, Target(0.95, kind="value"), 0.94, 0.95)


def test_the_target_of_cpu_time_is_of_cpu_time() -> None:
    metric = Metric("t", targets=(Target(3.9, 4.1, "cpu"),))
    target = target_of(result(metric, [[1.0]], [[1.0]]))
    assert (target["found"], target["met"], target["aim_met"]) == (4.0, True, False)


def test_a_target_whose_peer_is_missing_is_open() -> None:
    metric = Metric("t", targets=(Target(90, against="grpc"),))
    target = target_of(result(metric, [[1.0]], [[1.0]]))
    assert target["met"] is None
    assert table.target_rows([target])[0][-1] == "?"


def test_cases_are_chosen_by_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    parser = commands._parser("", "")
    chosen = [case.name for case in commands._choose(parser, ["flood*", "empty"], long=False)]
    assert chosen == ["empty", "flood-builtin", "flood-python"]
    assert not any(case.long for case in commands._choose(parser, [], long=False))
    on_gpu = commands._choose(parser, [], long=True, gpu=True)
    assert len(commands._choose(parser, [], long=True)) == len(CASES) - len(on_gpu)
    assert {case.name for case in on_gpu} == {n for n in CASES if n.startswith("gpu-")}
    with pytest.raises(SystemExit):
        commands._choose(parser, ["no-such"], long=False)
    assert "no case is named 'no-such'" in capsys.readouterr().err


def test_cases_need_what_some_back_end_has() -> None:
    for case in CASES.values():
        able = [one for one in BACKENDS.values() if not case.needs - one.functions - one.offers]
        wanted = {"ucx-cuda", "tensorpipe-cuda"} if case.gpu else {"ucx", "tensorpipe"}
        assert {one.name for one in able} >= wanted, case.name


def test_targets_are_against_back_ends_that_take_part() -> None:
    for case in CASES.values():
        for metric in case.metrics.values():
            for target in metric.targets:
                assert target.kind == "value" or BACKENDS[target.against].gpu == case.gpu, case.name


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["cuda", "--quick"]) == NO_GPU
    assert "nothing is measured: there is no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cuda", "--cases", "empty"])
    assert "no case is named 'empty'; there are gpu-64b" in capsys.readouterr().err


def test_device_maps_of_the_benchmarks() -> None:
    assert cuda.device_maps(Place(1, 3, "")) == {"worker0": {0: 0}, "worker2": {0: 0}}


class Absent(Backend):
    name = "absent"
    functions = frozenset(FUNCTIONS)
    peer = True

    @classmethod
    def why_not(cls) -> str:
        return "it is not installed"

    def start(self, place: Place) -> None: ...
    def stop(self) -> None: ...
    def call(self, to: int, function: str, *arguments: Any) -> Any: ...
    def call_async(self, to: int, function: str, *arguments: Any) -> Any: ...


def test_a_peer_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "absent", Absent)
    usable, skips = commands._usable(["absent", "tensorpipe"])
    assert usable == ["tensorpipe"]
    assert table.missing(skips) == ["absent is left out of everything: it is not installed"]


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Group, "__init__", lambda self, name, *_, **__: setattr(self, "backend", name)
    )
    monkeypatch.setattr(Group, "close", lambda self: None)
    monkeypatch.setattr(Group, "__enter__", lambda self: self)
    monkeypatch.setattr(Group, "__exit__", lambda *_: None)


@pytest.mark.usefixtures("no_processes")
def test_the_others_go_on_when_one_fails() -> None:
    case = Fixed(Metric("t"), {"ucx": [[1.0], [1.0], [1.0]], "tensorpipe": [[2.0]]})
    with Runner([Contender(name, name) for name in ("ucx", "tensorpipe")]) as runner:
        (found,) = runner.run([(case, 3)])
    assert found.failures == {"tensorpipe": "no more"}
    assert [len(rounds) for rounds in found.rounds.values()] == [3, 1]
    assert "fixed: tensorpipe failed: no more" in table.table(
        [MACHINE, *records.of_result(found, "ucx")]
    )


class Noted(Case):
    """A case that notes when it runs, and on which back end."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__(name, {"time": Metric("t")}, 3, frozenset())
        self.order = order

    def round(self, group: Group) -> Round:
        self.order.append(f"{self.name} {group.backend}")
        return Round({"time": [float(len(self.order))]}, cpu=None)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 10, 12, 20])
def test_the_rounds_of_a_case_are_spread_over_those_of_its_neighbours(rounds: int) -> None:
    order: list[str] = []
    cases = [(Noted(name, order), rounds) for name in "ab"]
    with Runner([Contender(name, name) for name in ("ucx", "limit")]) as runner:
        found = list(runner.run(cases))
    assert all(len(one) == rounds for result in found for one in result.rounds.values())
    names = [name for name, _ in itertools.groupby(entry[0] for entry in order)]
    passes = min(rounds, 10)
    assert names == ["a", "b"] * passes
    # The first round of each pass is not counted, and of the others each back end begins some.
    assert order.count("a ucx") == order.count("a limit") == rounds + passes
    begins = [
        min(result.rounds, key=lambda name: result.rounds[name][index].figures["time"])
        for result in found
        for index in range(rounds)
    ]
    assert len(set(begins)) == min(rounds, 2)


def passes(ratios: list[float], rounds: int) -> CaseResult:
    """Return a result in which each pass of some rounds has one ratio."""
    pairs = [(passing, ratio) for passing, ratio in enumerate(ratios) for _ in range(rounds)]
    ours = [Round({"time": [1.0]}, cpu=None, passing=passing) for passing, _ in pairs]
    theirs = [Round({"time": [ratio]}, cpu=None, passing=passing) for passing, ratio in pairs]
    case = Fixed(Metric("t"), {})
    return CaseResult(case, rounds={"new": ours, "old": theirs})


def test_the_ratio_of_two_revisions_lies_in_an_interval() -> None:
    # Of 10 samples, the second lowest and second highest; of 6, all; of 5, nothing can be said.
    ten = passes([1.0 + number / 10 for number in range(10)], rounds=4)
    assert ten.interval("time", "new", "old") == pytest.approx((1.1, 1.8))
    assert passes([1.0, 1.1, 1.2, 1.3, 1.4, 1.5], 9).interval("time", "new", "old") == (1.0, 1.5)
    assert passes([1.0] * 5, rounds=100).interval("time", "new", "old") is None
    found = list(records.of_result(ten, "new", revisions=True))
    assert "fixed (time): 1.45x, and with 95 % between 1.10x and 1.80x" in table.table(
        [MACHINE, *found]
    )
    assert not records.of_type(found, "target")


@pytest.mark.usefixtures("no_processes")
def test_two_revisions_have_new_processes_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(Group, "__enter__", lambda self: begun.append(self.backend) or self)
    cases = [(Noted(name, []), 6) for name in "ab"]
    both = [Contender("new", "ucx"), Contender("old", "limit")]
    with Runner(both, passes=3, renew=True) as runner:
        found = list(runner.run(cases))
    assert sorted(begun) == ["limit"] * 3 + ["ucx"] * 3
    for result in found:
        assert [one.passing for one in result.rounds["new"]] == [0, 0, 1, 1, 2, 2]


@pytest.mark.usefixtures("no_processes")
def test_cases_between_hosts_have_passes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a pass takes longer than receivers keep their buffers.
    monkeypatch.setattr(netns, "two_hosts", contextlib.nullcontext)
    monkeypatch.setattr(netns, "shape", lambda hosts, link: None)
    order: list[str] = []
    cases = [(Noted(name, order), 5) for name in "abcd"]
    for case, _ in cases[2:]:
        case.link = netns.Link()
    with Runner([Contender("ucx", "ucx")]) as runner:
        list(runner.run(cases))
    names = [name for name, _ in itertools.groupby(entry[0] for entry in order)]
    assert names == ["a", "b"] * 5 + ["c", "d"] * 5


class Hungry(Noted):
    """A case that needs more memory than another back end's workers have left."""

    def memory(self, backend: str) -> int:
        return psutil.virtual_memory().total * 2 // 3


@pytest.mark.usefixtures("no_processes")
def test_who_holds_the_memory_of_another_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: set[str] = set()
    monkeypatch.setattr(Group, "__enter__", lambda self: alive.add(self.backend) or self)
    monkeypatch.setattr(Group, "__exit__", lambda self, *_: alive.discard(self.backend))
    total = psutil.virtual_memory().total

    def memory() -> types.SimpleNamespace:
        return types.SimpleNamespace(total=total, available=total // (1 + 3 * len(alive)))

    monkeypatch.setattr(psutil, "virtual_memory", memory)
    order: list[str] = []
    with Runner([Contender(name, name) for name in ("ucx", "limit")]) as runner:
        (found,) = runner.run([(Hungry("a", order), 2)])
    assert alive == set()
    # All turns of one, then all of the other.
    assert order == ["a ucx"] * 3 + ["a limit"] * 3
    assert {name: len(rounds) for name, rounds in found.rounds.items()} == {"ucx": 2, "limit": 2}


@pytest.mark.usefixtures("no_processes")
def test_a_case_too_large_for_the_machine_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hungry, "memory", lambda self, _: psutil.virtual_memory().total)
    order: list[str] = []
    with Runner([Contender("ucx", "ucx")]) as runner:
        (found,) = runner.run([(Hungry("a", order), 2)])
    assert "GB of memory" in found.skips["ucx"] and not order


class Slow(Noted):
    """A case whose rounds take a back end so many seconds on the clock of the runner."""

    def __init__(self, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("slow", [])
        self.seconds, self.now = seconds, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def round(self, group: Group) -> Round:
        self.now += self.seconds[group.backend]
        return super().round(group)


@pytest.mark.usefixtures("no_processes")
def test_long_rounds_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Slow({"ucx": 0.1, "limit": 1.0, "tensorpipe": 6.0, "grpc": 18.0}, monkeypatch)
    with Runner([Contender(name, name) for name in case.seconds]) as runner:
        (found,) = runner.run([(case, 6)])
    # Quick ones begin each of six passes with one that is not counted, others the first.
    assert [len(turns) for turns in found.turns.values()] == [12, 7, 4, 2]
    assert [len(rounds) for rounds in found.rounds.values()] == [6, 6, 3, 1]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("passes", [10, 20])
def test_the_time_of_a_case_is_spread_over_all_passes(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All rounds would take seven times as long as they may: 15 s in 10 passes.
    case = Slow({"ucx": 0.5}, monkeypatch)
    with Runner([Contender("ucx", "ucx")], passes=passes, renew=True) as runner:
        (found,) = runner.run([(case, 20 * passes)])
    counted = Counter(one.passing for one in found.rounds["ucx"])
    assert sorted(counted) == list(range(passes)) and max(counted.values()) <= 3
    assert sum(found.turns["ucx"]) == pytest.approx(1.5 * passes, rel=0.1)


@pytest.mark.usefixtures("no_processes")
def test_who_has_waited_for_a_slow_one_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Slow({"ucx": 0.1, "grpc": 20.0}, monkeypatch)
    with Runner([Contender(name, name) for name in case.seconds], passes=1) as runner:
        (found,) = runner.run([(case, 1)])
    assert case.order == ["slow ucx", "slow grpc", "slow grpc", "slow ucx", "slow ucx"]
    assert [len(rounds) for rounds in found.rounds.values()] == [1, 1]


@pytest.mark.usefixtures("no_processes")
def test_who_lacks_what_a_case_needs_is_left_out() -> None:
    case = Fixed(Metric("t"), {"ucx": [[1.0]], "limit": [[2.0]]})
    case.needs = frozenset({"RRefs"})
    with Runner([Contender(name, name) for name in ("ucx", "limit")]) as runner:
        (found,) = runner.run([(case, 1)])
    assert found.skips == {"limit": "it has no RRefs"}
    assert not found.failures


def stored(tmp_path: Path) -> Path:
    metric = Metric("some call", targets=(Target(3, 5), Target(1e-6, kind="value")))
    found = result(metric, [[1e-3] * 100], [[4e-3] * 100], cpu=1e-3)
    path = tmp_path / "run.jsonl"
    records.write(path, [MACHINE, *records.of_result(found, "ucx")])
    return path


def test_a_case_is_measured_again(tmp_path: Path) -> None:
    metric = Metric("some call", targets=(Target(3, 5),))
    other = result(Metric("other call"), [[7e-3]], [[7e-3]])
    other.case.name = "other"
    first, again = result(metric, [[1e-3]], [[2e-3]]), result(metric, [[1e-3]], [[4e-3]])
    records.write(
        tmp_path / "all.jsonl",
        [MACHINE, *records.of_result(first, "ucx"), *records.of_result(other, "ucx")],
    )
    later = {**MACHINE, "time": "2026-01-03T00:00:00+00:00", "revision": "abc"}
    records.write(tmp_path / "again.jsonl", [later, *records.of_result(again, "ucx")])
    docs = tmp_path / "docs"
    docs.mkdir()
    files = [str(tmp_path / name) for name in ("all.jsonl", "again.jsonl")]
    assert commands.report([*files, "--docs", str(docs)]) == 0
    text = (docs / "benchmarks.md").read_text()
    assert "| some call | against tensorpipe | 4.00x | 3.00x | 5.00x | met |" in text
    assert "2.00x" not in text and "| other call | ucx | 7.00 ms |" in text
    assert "a run of their own, 2026-01-03, revision `abc`: `fixed`." in text


def test_the_page_is_made_from_a_stored_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path)
    docs = tmp_path / "docs"
    docs.mkdir()
    monkeypatch.setitem(plots._PLOTS, "small.png", ("Small", ("fixed",)))
    assert commands.report([str(path), "--docs", str(docs)]) == 0
    text = (docs / "benchmarks.md").read_text()
    assert "| some call | ucx | 1.00 ms | 1.00 ms | 1.00 ms | 1.00 ms |" in text
    assert "| some call | against tensorpipe | 4.00x | 3.00x | 5.00x | met |" in text
    assert "Not reached: some call, itself: 1.00 ms of 1.00 us." in text
    for picture in (docs / "benchmarks").iterdir():
        assert f"(benchmarks/{picture.name})" in text
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert {one.name for one in (docs / "benchmarks").iterdir()} == {"small.png", "better.png"}
    assert records.read(docs / "benchmarks.jsonl") == records.read(path)


@pytest.mark.parametrize("text", ["", "{", '{"type": "result"}\n', "3\n"])
def test_another_file_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit):
        commands.report([str(path)])
    assert "other.jsonl" in capsys.readouterr().err


def test_the_page_of_the_project_is_that_of_its_figures() -> None:
    made = page.DOCS / "benchmarks.jsonl"
    if not made.exists():
        pytest.skip("no run was published yet")
    run = records.read(made)
    text = (page.DOCS / "benchmarks.md").read_text()
    pictures = dict(_pictures(text))
    assert page.page(run, pictures) == text
    assert all((page.DOCS / "benchmarks" / name).exists() for name in pictures)
    assert made.stat().st_size < 500_000
    assert all(json.dumps(record) for record in run)


def test_the_readme_has_the_figures_of_that_run() -> None:
    run = records.read(page.DOCS / "benchmarks.jsonl")
    text = (page.DOCS.parent / "README.md").read_text()
    assert summary.with_figures(text, run) == text
    row = "| a Python function, 4 bytes there and back | "
    assert row in text
    assert row in summary.with_figures(text.replace(row, "| something else | "), run)


def test_a_readme_stays_as_it_is_without_marks_or_figures(tmp_path: Path) -> None:
    text = (page.DOCS.parent / "README.md").read_text()
    assert summary.with_figures(text, records.read(stored(tmp_path))) == text
    run = records.read(page.DOCS / "benchmarks.jsonl")
    assert summary.with_figures("no marks", run) == "no marks"


def _pictures(text: str) -> list[tuple[str, str]]:
    return [(name, shows) for shows, name in re.findall(r"!\[(.*?)\]\(benchmarks/(.*?)\)", text)]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (torch.arange(5.0),),
        (torch.ones(1), torch.zeros(3)),
        ([torch.ones(2), torch.ones(1)],),
        ([torch.full((1 + size,), float(size)) for size in range(20)],),
        ([torch.full((5000,), float(size)) for size in range(20)],),
    ],
)
def test_flat_calls_arrive(arguments: tuple[Any, ...]) -> None:
    function, arrived = flat.unpack(b"".join(flat.pack("add", arguments)))
    assert function == "add"
    assert len(arrived) == len(arguments)
    for one, other in zip(arrived, arguments, strict=True):
        pairs = zip(one, other, strict=True) if isinstance(other, list) else [(one, other)]
        assert all(torch.equal(here, there) for here, there in pairs)


@pytest.mark.parametrize("function", ["operate", "script_operate", "builtin_operate"])
def test_the_operations_are_the_same_in_all_kinds(function: str) -> None:
    given = torch.tensor([0.0, 2.0, -5.0])
    wanted = given.clone()
    for _ in range(100):
        wanted = wanted * 0.5 + 1.0
    assert torch.equal(FUNCTIONS[function](given), wanted)


def test_another_revision_brings_its_own_packages(tmp_path: Path) -> None:
    """One package of the working tree, imported by one of the other revision, may not fit."""
    configured = tomllib.loads((trees.ROOT / "pyproject.toml").read_text())
    packages = set(configured["tool"]["importlinter"]["root_packages"])
    with trees._linked(tmp_path) as folder:
        brought = {link.name for link in folder.iterdir() if link.readlink().parent == tmp_path}
    assert brought == packages
