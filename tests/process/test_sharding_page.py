"""The programs of docs/sharding.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.process.group import Group
from tests.support.backend import ROOT, needs_ucx
from tests.support.ports import free_port


def run_example(code: str, checkpoint: str) -> tuple[list[float], bool]:
    """Run the example, and the lines about checkpoints before its shutdown; return the losses that
    it has seen, which only rank 0 has, and whether the checkpoint brought back what was saved."""
    names: dict[str, Any] = {"step": 20}
    before, after = code.split("rpc.shutdown()")
    exec(before, names)
    if names["rank"] == 0:
        names["scheduler"].last_epoch = 7
        saved, loaded = checkpoint.split("sharding.load_checkpoint")
        exec(saved, names)
        names["scheduler"].last_epoch = 0
        exec(f"state['step'] = 0\nsharding.load_checkpoint{loaded}", names)
    is_back = names["rank"] == 0 and names["scheduler"].last_epoch == 7
    is_back = is_back and names["state"]["step"] == 20
    exec(f"rpc.shutdown(){after}", names)
    losses: list[float] = names["losses"]
    return losses, is_back


@needs_ucx("is not what the example names")
def test_the_example(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sharding.md").read_text().replace("/shared", str(tmp_path))
    code, checkpoint = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    env = [{**place, "RANK": str(rank)} for rank in range(4)]
    with Group(4, init=False, env=env) as group:
        losses, is_back = group.run_all(run_example, code, checkpoint)[0]
        printed = group[0].child.output()
    assert is_back
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    assert "(1) worker2: " in printed
    accuracy = re.search(r"accuracy ([\d.]+)", printed)
    assert accuracy and float(accuracy[1]) > 0.9
