"""Finds the code blocks in Markdown pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"# (\S+\.py)(?:; run it with: (.+))?\n")


@dataclass(frozen=True)
class Program:
    """A code block that is a whole file.

    Attributes:
        page: path in the repository.
        name: of the file.
        command: the command that runs the file; empty if another block of the page runs it.
        code: the file's text.
        prints: the text block that follows, which is what the program prints; empty if there is
            none.
    """

    page: str
    name: str
    command: str
    code: str
    prints: str

    def write(self, folder: Path) -> Path:
        """Write the program to its file in a folder."""
        path = folder / self.name
        path.write_text(self.code)
        return path


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each block of a page."""
    return _FENCE.findall((ROOT / page).read_text())


def programs(page: str) -> list[Program]:
    """The Python blocks that begin with the name of their file."""
    found = blocks(page)
    following = [*found[1:], ("", "")]
    return [
        Program(page, title[1], title[2] or "", code, after if next_language == "text" else "")
        for (language, code), (next_language, after) in zip(found, following, strict=True)
        if language == "python" and (title := _TITLE.match(code))
    ]


def fragments(page: str) -> list[str]:
    """All other Python blocks."""
    return [
        code for language, code in blocks(page) if language == "python" and not _TITLE.match(code)
    ]
