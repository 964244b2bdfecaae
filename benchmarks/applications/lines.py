"""Counts lines of communication: ``python -m benchmarks.applications lines``.

Whatever communicates stands in with_rpc.py, in with_grpc.py and the .proto, or in
with_pipelining.py, and nothing else stands there. A line counts unless it is blank, a comment, or
part of a docstring; imports, names of functions and closing brackets count. All files are in the
project's format, 100 characters wide.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from benchmarks.applications.stubs import generate

_HERE = Path(__file__).resolve().parent
_ORDER = ("rpc", "grpc", "pipelining")


def of_application(name: str) -> dict[str, int]:
    """Return the lines of an application: communication by way, computation, what protoc makes."""
    folder = _HERE / name
    proto = folder / f"{name}.proto"
    ways = {file.stem.removeprefix("with_"): file for file in sorted(folder.glob("with_*.py"))}
    communication = {way: of_python(ways[way]) for way in sorted(ways, key=_ORDER.index)}
    others = ("application.py", "__init__.py", *(file.name for file in ways.values()))
    computation = [file for file in folder.glob("*.py") if file.name not in others]
    found = {**communication, "computation": sum(map(of_python, computation))}
    if "grpc" not in ways:
        return found
    found["grpc"] += of_proto(proto)
    try:
        generated = generate(name)
    except ImportError:
        return found  # without grpcio-tools nobody knows
    return {**found, "grpc, generated": sum(map(of_python, generated))}


def of_python(file: Path) -> int:
    """Return the number of lines that are code."""
    text = file.read_text(encoding="utf-8")
    left = {
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                left -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(left)


def of_proto(file: Path) -> int:
    """Return the number of lines that are no comment and not blank."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return sum(1 for line in lines if line and not line.startswith("//"))


def rows(found: Mapping[str, int], paper: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Return a row for each kind: what, here, in the paper."""
    kinds = [*found, *(kind for kind in paper if kind not in found)]
    return [(kind, str(found.get(kind, "")), str(paper.get(kind, ""))) for kind in kinds]


def text(found: Mapping[str, int], paper: Mapping[str, int]) -> str:
    """Return the rows as lines, under a head."""
    table = [("lines of code", "here", "the paper"), *rows(found, paper)]
    return "\n".join(f"  {kind:<20}{here:>8}{there:>14}" for kind, here, there in table)
