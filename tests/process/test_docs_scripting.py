"""The examples of docs/scripting.md run and print what the page shows."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from pathlib import Path

from tests.process.group import Group
from tests.support.backend import ROOT

PAGE = ROOT / "docs" / "scripting.md"
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    found = [text for language, text in BLOCK.findall(PAGE.read_text()) if language == kind]
    assert found, f"{PAGE} has no block of {kind}"
    return found


def load_service(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    importlib.import_module("service")


def run_examples(text: str) -> tuple[int, int]:
    """Run the examples; return how many failed and how many there are. The output shows the
    failures."""
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    results = doctest.DocTestRunner(verbose=False).run(examples, out=sys.stderr.write)
    return results.failed, results.attempted


def test_examples(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text("\n".join(blocks("python")))
    with Group(4) as group:
        group.run_all(load_service, tmp_path)
        failed, attempted = group[0].run(run_examples, "\n".join(blocks("pycon")))
        assert attempted > 15
        assert failed == 0, group.output()
