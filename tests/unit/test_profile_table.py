"""profiler/table.py: the table for people, and how it is folded."""

from __future__ import annotations

import pytest

from torch_rpc_ext.profiler import table

ROWS = [
    table.Row(f"module.function_{n}", f"worker{n}", 10, 0, 2000, 3000, *[n / 1000] * 10)
    for n in range(2)
]


def parts(width: int | None) -> list[list[str]]:
    return [part.splitlines() for part in table.text(ROWS, width).split("\n\n")]


def test_without_a_width_it_is_one_table() -> None:
    [lines] = parts(None)
    assert len(lines) == 3 and lines == parts(1000)[0]
    assert lines[2].startswith("module.function_1  worker1     10       0  2.0 kB  3.0 kB")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    found = parts(width)
    assert len(found) > 1
    for part in found:
        assert len(part) == 3 and all(len(line) <= width for line in part)
        assert part[0].startswith("function") and part[1].startswith("module.function_0  worker0")
        assert part[0].count("p50") == part[0].count("p99")
    whole = [word for part in found for word in part[1].split()[2:]]
    assert whole == parts(None)[0][1].split()[2:]


def test_a_terminal_that_is_narrower_than_anything() -> None:
    assert len(parts(1)) == 7  # a pair of columns each
