"""The pages that are made from the code are what the code says, and tests that pages name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.backend import ROOT

#: tests/process/test_x.py, or test_x.py::test_y; also ::test_y of the file named before it.
_NAMED = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)?(?:::(test_\w+))?`")


def test_generated_pages_are_up_to_date() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr


def named_tests(page: Path) -> Iterator[tuple[str, str]]:
    """(file, test or '') of each test that a page names."""
    file = ""
    for path, test in _NAMED.findall(page.read_text(encoding="utf-8")):
        file = path or file
        if path or test:
            yield file, test


def exists(file: str, test: str) -> bool:
    pattern = file if "/" in file else f"tests/*/{file}"
    found = [path.read_text(encoding="utf-8") for path in ROOT.glob(pattern)]
    return any(f"def {test}(" in text if test else True for text in found)


def test_the_tests_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "csrc" / "README.md"]
    named = [(page, *names) for page in pages for names in named_tests(page)]
    missing = [
        f"{page.relative_to(ROOT)}: {file}::{test}"
        for page, file, test in named
        if not exists(file, test)
    ]
    assert not missing, "\n".join(missing)
    assert len(named) > 100


def test_the_rule_would_notice() -> None:
    assert exists("tests/rules/test_docs.py", "test_the_rule_would_notice")
    assert exists("test_docs.py", "")
    assert not exists("test_docs.py", "test_that_is_not_there")
    assert not exists("test_no_such_file.py", "")
