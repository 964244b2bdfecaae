"""The notebooks in tutorials/ run with small sizes; the outputs that they keep from large runs are
complete."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

from tests.support.backend import ROOT, needs_ucx

sys.path += [str(ROOT / "tutorials"), str(ROOT / "docs")]

import execute  # noqa: E402
import figures  # noqa: E402

SOURCES = execute.sources()
SECTIONS = ["What you will learn", "smallest version", "What can go wrong", "What it costs"]
#: Executed by make test; the others, by make test-all.
EACH_TIME = ("01_getting_started", "04_parameter_server", "07_pipeline")
by_name = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@pytest.mark.notebook
@pytest.mark.timeout(900)  # a minute and a half on an idle machine of two cores
@needs_ucx("the notebooks choose their back ends themselves")
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(one, id=one.stem, marks=[] if one.stem in EACH_TIME else [pytest.mark.rare])
        for one in SOURCES
    ],
)
def test_runs_with_small_sizes(source: Path) -> None:
    assert source.read_text().count(execute.LARGE) == 1
    check_outputs(execute.execute(source, small=True))


@pytest.mark.notebook
def test_kernel_needs_no_port(tmp_path: Path) -> None:
    """The kernel must not need a port: one that was found free may be taken by the time the kernel
    uses it."""
    source = tmp_path / "ports.py"
    source.write_text("from ipykernel import connect\nprint(connect.get_connection_info())\n")
    connection = json.loads(execute.text_outputs(execute.execute(source)))
    assert connection["transport"] == "ipc"


@by_name
def test_kept_notebook_is_the_source_executed(source: Path) -> None:
    kept = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    now = jupytext.read(source)
    assert [cell.source for cell in kept.cells] == [cell.source for cell in now.cells], (
        "make tutorials"
    )
    counts = [cell.execution_count for cell in kept.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    check_outputs(kept)


@by_name
def test_pictures_are_there_and_speak_of_the_notebook(source: Path) -> None:
    text = source.read_text()
    shown = re.findall(r"\(pictures/(\w+)\.svg\)", text)
    assert shown == [name for name in figures.PICTURES if name.startswith(source.stem[:2])]
    for name in shown:
        for _, _, message in figures.PICTURES[name].messages():
            assert re.search(rf"\b{message}\b", text), f"{name}: {message}"


@by_name
def test_has_all_sections(source: Path) -> None:
    text = source.read_text()
    assert not [section for section in [*SECTIONS, "Exercises"] if section not in text]


def check_outputs(notebook: Any) -> None:
    """Check that the outputs contain no warnings, and nothing about the machine on which they were
    made."""
    text = execute.text_outputs(notebook)
    assert "Warning" not in text and "deprecated" not in text
    assert not re.search(r"/(home|root|work|tmp)/", text), text
