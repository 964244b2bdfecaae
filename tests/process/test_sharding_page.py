"""The example of docs/sharding.md does what the page says."""

from __future__ import annotations

import re
from typing import Any

from tests.process.group import Group
from tests.support.backend import ROOT, needs_ucx
from tests.support.ports import free_port


def run_example(code: str) -> list[float]:
    """Run the example; return the losses that it has seen, which only rank 0 has."""
    names: dict[str, Any] = {}
    exec(code, names)
    losses: list[float] = names["losses"]
    return losses


@needs_ucx("is not what the example names")
def test_the_example() -> None:
    page = (ROOT / "docs" / "sharding.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    env = [{**place, "RANK": str(rank)} for rank in range(4)]
    with Group(4, init=False, env=env) as group:
        losses = group.run_all(run_example, code)[0]
        printed = group[0].child.output()
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    assert "(1) worker2: " in printed
    accuracy = re.search(r"accuracy ([\d.]+)", printed)
    assert accuracy and float(accuracy[1]) > 0.9
