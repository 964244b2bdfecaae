"""docs/troubleshooting.md quotes texts that the source has, in the order of the alphabet."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.backend import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
#: Its last part: what others say.
OTHERS = "## Limits of the system"
#: Between the pieces of a text; stands in none of them.
GAP = "\0"


def quoted() -> list[list[str]]:
    """The code spans of the first column of each table, line by line."""
    text = PAGE.read_text(encoding="utf-8").partition(OTHERS)[0]
    tables: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("| text |"):
            tables.append([])
        elif line.startswith("| `"):
            tables[-1].append(line.split(" | ")[0].removeprefix("| "))
    return tables


def spans(cell: str) -> list[str]:
    return re.findall(r"`(.+?)`", cell)


def texts_of_python(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def texts_of_cpp(path: Path) -> Iterator[str]:
    # Literals that follow each other are one; what is between two that `+` joins is a gap.
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    for joined in re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', text):
        parts = re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
        yield "".join(parts).replace('\\"', '"')


@functools.cache
def all_texts() -> str:
    """Whatever the package may say."""
    python = [ROOT / "setup.py", *(ROOT / "torch_rpc_ext").rglob("*.py")]
    cpp = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    found = [text for path in python for text in texts_of_python(path)]
    found += [text for path in cpp for text in texts_of_cpp(path)]
    return GAP.join(found)


def missing(span: str) -> list[str]:
    """The pieces of a quotation, between its `...`, that no text has."""
    pieces = (piece.strip(" ,") for piece in span.split("..."))
    return [piece for piece in pieces if piece and piece not in all_texts()]


def test_what_is_quoted_is_what_is_said() -> None:
    cells = [cell for table in quoted() for cell in table]
    assert len(cells) > 40
    wrong = [piece for cell in cells for span in spans(cell) for piece in missing(span)]
    assert not wrong


def test_each_part_is_in_the_order_of_the_alphabet() -> None:
    for table in quoted():
        words = [re.sub(r"^[`. ]+", "", cell).lower() for cell in table]
        assert words == sorted(words)


def test_the_rule_would_notice() -> None:
    assert missing("init_rpc timed out after ... s: no such words") == ["s: no such words"]
    assert not missing("init_rpc timed out after ...")
