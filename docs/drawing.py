"""Draws message sequences and rows of boxes as SVG, the same bytes each time.

Own code, because what draws sequences from text either needs a browser (mermaid) or is no longer
maintained (seqdiag), and these figures must render offline, on GitHub too. Figures are narrow, so
that they can be read on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 520
_MARGIN = 12
_HEAD = 44  # the names of the workers
_MESSAGE = 44
_LINE = 16
_ROW = 34

_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
  .mono { font: 600 12px ui-monospace, monospace; }
  .remark { font-size: 12px; fill: #57606a; }
  .box { fill: #f6f8fa; stroke: #8c959f; }
  .strong { fill: #ddf4ff; stroke: #0969da; }
  .note { fill: #fff8c5; stroke: #d4a72c; }
  .life { stroke: #8c959f; stroke-dasharray: 4 4; }
  .arrow { stroke: #0969da; stroke-width: 1.6; fill: none; }
  .tip { fill: #0969da; }
"""


@dataclass(frozen=True)
class Message:
    """An arrow from one worker to another: the name that the code gives it, and a remark."""

    source: str
    target: str
    name: str
    remark: str = ""


@dataclass(frozen=True)
class Note:
    """What a worker does between two messages; each line is a string."""

    worker: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Diagram:
    """Workers (id -> caption), and what happens from top to bottom."""

    title: str
    workers: dict[str, str]
    steps: tuple[Message | Note, ...]

    def messages(self) -> list[tuple[str, str, str]]:
        """Return (from, to, name) of each message."""
        return [(s.source, s.target, s.name) for s in self.steps if isinstance(s, Message)]

    def svg(self) -> str:
        """Return the picture."""
        places = {
            worker: round(WIDTH * (2 * index + 1) / (2 * len(self.workers)))
            for index, worker in enumerate(self.workers)
        }
        head = min(140, WIDTH / len(self.workers) - 8)
        drawn: list[str] = []
        y = _HEAD + 8
        for step in self.steps:
            if isinstance(step, Message):
                drawn += _arrow(places[step.source], places[step.target], y, step)
                y += _MESSAGE
            else:
                drawn += _note(places[step.worker], y, step.lines)
                y += _LINE * len(step.lines) + 18
        lines = [
            f'<line class="life" x1="{x}" x2="{x}" y1="{_HEAD}" y2="{y}"/>' for x in places.values()
        ]
        heads = [
            part
            for worker, caption in self.workers.items()
            for part in _box(places[worker] - head / 2, 8, head, _HEAD - 8, caption, "box")
        ]
        return _picture(self.title, y + 8, [*lines, *heads, *drawn])


@dataclass(frozen=True)
class Cell:
    """A box of a row; ``share`` of its width, in parts of all of them."""

    text: str
    share: float = 1.0
    strong: bool = False


@dataclass(frozen=True)
class Boxes:
    """Rows of boxes, each row under its caption."""

    title: str
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]

    def svg(self) -> str:
        """Return the picture."""
        drawn: list[str] = []
        y = 8
        for caption, cells in self.rows:
            if caption:
                drawn.append(_text(WIDTH / 2, y + 14, caption, "remark"))
                y += 22
            drawn += _row(cells, y)
            y += _ROW + 8
        return _picture(self.title, y, drawn)


def _row(cells: Sequence[Cell], y: float) -> list[str]:
    shares = sum(cell.share for cell in cells)
    drawn: list[str] = []
    x = float(_MARGIN)
    for cell in cells:
        width = (WIDTH - 2 * _MARGIN) * cell.share / shares
        drawn += _box(x, y, width, _ROW, cell.text, "strong" if cell.strong else "box")
        x += width
    return drawn


def _arrow(x1: int, x2: int, y: int, message: Message) -> list[str]:
    line = y + 20
    tip = -8 if x2 > x1 else 8
    parts = [
        _text((x1 + x2) / 2, y + 14, message.name, "mono"),
        f'<path class="arrow" d="M{x1} {line}H{x2 + tip}"/>',
        f'<path class="tip" d="M{x2} {line}l{tip} -5v10z"/>',
    ]
    if message.remark:
        parts.append(_text((x1 + x2) / 2, line + 15, message.remark, "remark"))
    return parts


def _note(x: int, y: int, lines: Sequence[str]) -> list[str]:
    width = max(len(line) for line in lines) * 6.9 + 16
    left = min(max(x - width / 2, 2), WIDTH - width - 2)
    height = _LINE * len(lines) + 8
    drawn = [
        f'<rect class="note" x="{left:.0f}" y="{y + 2}" width="{width:.0f}" height="{height}"/>'
    ]
    for number, line in enumerate(lines):
        drawn.append(_text(left + width / 2, y + 17 + _LINE * number, line, ""))
    return drawn


def _box(x: float, y: float, width: float, height: float, text: str, kind: str) -> list[str]:
    return [
        f'<rect class="{kind}" x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="3"/>',
        _text(x + width / 2, y + height / 2 + 4.5, text, ""),
    ]


def _text(x: float, y: float, text: str, kind: str) -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text{mark} x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _picture(title: str, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<rect width="100%" height="100%" rx="6" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )
