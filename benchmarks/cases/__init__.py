"""The cases, by name, in the order of the table."""

from __future__ import annotations

from benchmarks.cases import calls, floods, mixed, startup
from benchmarks.cases.interface import Case

CASES: dict[str, Case] = {
    case.name: case for case in (*calls.CASES, *floods.CASES, *mixed.CASES, *startup.CASES)
}
