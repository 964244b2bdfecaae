"""Which files a worker of the group can make a stage write, where the stage's worker has an
allow-list that names what sharding needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import checkpoint

from tests.process.group import Group
from tests.process.test_allow_list_attacks import SERVICE, sync
from tests.process.test_sharding import ALLOWED
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("has no allow-list")


def write_with(prefixes: Sequence[Any], folder: str) -> list[bool]:
    """Have a stage write its part of a checkpoint under other prefixes of the file's name than the
    caller's code gives; return for each whether the stage did."""
    from torch_rpc_ext.sharding import stage
    from torch_rpc_ext.sharding.creation import shard

    rref = shard(nn.Sequential(nn.Linear(2, 2)), ["worker1"]).stages[0].rref
    results = []
    for prefix in prefixes:
        plan = sync(stage.call, rref, "plan_checkpoint", folder, "")
        prefix_of_peer = checkpoint.filesystem._StoragePrefix(prefix)
        plan = dataclasses.replace(plan, storage_data=prefix_of_peer)
        results.append(type(sync(stage.call, rref, "write_checkpoint", plan)) is list)
    return results


def written(prefixes: Sequence[Any], top: Path) -> tuple[list[bool], list[Path]]:
    """Let a checkpoint be written into a folder in ``top``; return for each prefix whether the
    stage wrote, and the files that are in ``top`` then, below it too."""
    with Group(2, options=[{}, {"allow_list": [*ALLOWED, SERVICE]}]) as group:
        results = group.run(write_with, prefixes, str(top / "checkpoint"))
    return results, [path for path in top.rglob("*") if path.is_file()]


def test_a_stage_writes_no_file_but_its_own(tmp_path: Path) -> None:
    cut_off = str(tmp_path / "cut.txt\0")  # to C the name ends here
    elsewhere = ["../x", str(tmp_path / "x"), "above/../../x.txt", cut_off]
    prefixes = ["__0_", ".metadata", 7, "", "__0_/", *elsewhere]
    results, files = written(prefixes, tmp_path)
    assert results == [True, *[False] * (len(prefixes) - 1)]
    assert files == [tmp_path / "checkpoint" / "__0_0.distcp"]
