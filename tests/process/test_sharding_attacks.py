"""Attacks by a worker of the group on a worker whose allow-list names what sharding needs."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint, rpc

from tests.process import service
from tests.process.group import Group
from tests.process.test_allow_list_attacks import (
    SERVICE,
    Reduced,
    attack,
    call_with,
    command,
    named,
    refused,
    send,
    sync,
    text,
)
from tests.process.test_sharding import ALLOWED
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("has no allow-list")

LISTED = [*ALLOWED, SERVICE]


def by_attributes(path: str) -> None:
    """From any object over its class, a function and that function's module to eval()."""
    from torch_rpc_ext.sharding import stage
    from torch_rpc_ext.sharding.creation import shard

    # A stage, and any other object.
    held = shard(nn.Sequential(nn.Linear(2, 2)), ["worker1"]).stages[0].rref
    other = rpc.remote("worker1", stage.Request, args=(True, (), (), 0.0))
    assert set(sync(stage.call, held, "state_dict")) == {"0.weight", "0.bias"}
    no_method, no_stage = "a Stage has no method", "expected an RRef of a Saved"
    for step in (
        ("__getattribute__", "__init__"),
        ("__getattribute__", "__globals__"),
        ("__getitem__", "__builtins__"),
        ("__getitem__", "eval"),
        ("__call__", command(path)),
    ):
        refused(lambda s=step, h=held: sync(stage.call, h, *s), no_method, kind=TypeError)
        refused(lambda s=step, o=other: sync(stage.call, o, *s), no_stage, kind=TypeError)
        # The next step goes on from what this step should have returned.
        held = rpc.remote("worker1", stage.call, args=(held, *step))
        other = rpc.remote("worker1", stage.call, args=(other, *step))


def test_a_call_of_any_attribute(tmp_path: Path) -> None:
    attack(by_attributes, tmp_path, LISTED)


def by_other_objects(path: str) -> None:
    """RRefs of other classes than the functions expect, and other methods of the right class."""
    from torch_rpc_ext.sharding import job, runner, stage, stage_optimizer
    from torch_rpc_ext.sharding.creation import shard

    handle = shard(nn.Sequential(nn.Linear(2, 2)), ["worker1"]).stages[0]
    journal = rpc.remote("worker1", service.Journal, args=(path,))
    journal.to_here()
    request = stage.Request(False, (), (), 0.0)
    route = job.Route("name", ["worker1"], None, 1.0)
    for call, words in (
        (lambda: sync(stage.call, journal, "append", 1), "an RRef of a Saved"),
        (lambda: sync(stage.call, service.Journal(path), "append", 1), "Journal"),
        (lambda: sync(stage.call, handle.rref, "__class__"), "'__class__'"),
        (lambda: sync(stage.call, handle.rref, "turn"), "'turn'"),
        (lambda: sync(stage.forward, journal, 1, request), "an RRef of a Stage"),
        (lambda: sync(runner.create, journal, route), "an RRef of a Stage"),
        (lambda: sync(runner.run, journal, None), "an RRef of a StageRunner"),
        (lambda: sync(runner.run, handle.rref, None), "an RRef of a StageRunner"),
        (
            lambda: sync(stage_optimizer.create, journal, torch.optim.AdamW, [], {}),
            "an RRef of a Stage",
        ),
    ):
        refused(call, words, kind=TypeError)
    group = stage_optimizer.Group(0, ["0.weight"], {})
    failure = sync(stage_optimizer.create, handle.rref, service.Journal, [group], {})
    assert "optimizer_class must be a class of torch.optim.Optimizer" in failure.what, failure


def test_objects_of_other_classes(tmp_path: Path) -> None:
    attack(by_other_objects, tmp_path, LISTED)


def by_a_forged_stage(_: str) -> None:
    # Opcodes: make an instance without arguments, then give it {"index": 1}.
    forged = named("torch_rpc_ext.sharding.stage", "Stage") + b")\x81}" + text("index") + b"K\x01sb"
    refused(lambda: send(call_with(forged)), "a Stage stays on its worker", kind=RuntimeError)


def test_a_forged_stage(tmp_path: Path) -> None:
    attack(by_a_forged_stage, tmp_path, LISTED)


def by_files(path: str) -> None:
    """What checkpoints of the stages need removes and renames no files."""
    filesystem = checkpoint.filesystem
    for function in (filesystem.FileSystem.rm_file, filesystem.FileSystem.mkdir):
        refused(lambda f=function: sync(f, path))
    refused(lambda: sync(filesystem.FileSystemWriter, path))
    refused(lambda: sync(filesystem.FileSystemReader, path))


def test_files(tmp_path: Path) -> None:
    attack(by_files, tmp_path, LISTED)


def by_checkpoints(path: str) -> None:
    """What a peer leaves in files is unpickled by the allow-list, as what a peer sends."""
    from torch_rpc_ext.sharding import StageError
    from torch_rpc_ext.sharding.creation import shard

    model = shard(nn.Sequential(nn.Linear(2, 2)), ["worker1"])
    evil = Reduced(eval, command(path))
    # In the metadata.
    folder = Path(f"{path}.metadata")
    model.save_checkpoint(folder)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(lambda: model.load_checkpoint(folder), "builtins.eval", kind=StageError)
    # As an entry that is no tensor.
    folder = Path(f"{path}.entry")
    state = {**model.state_dict(), "0.weight": evil}
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    refused(lambda: model.load_checkpoint(folder), "eval", kind=StageError)


def test_checkpoints(tmp_path: Path) -> None:
    attack(by_checkpoints, tmp_path, LISTED)


def leave_a_checkpoint(path: str) -> None:
    from torch_rpc_ext.sharding.creation import shard

    model = shard(nn.Sequential(nn.Linear(2, 2)), ["worker1"])
    model.save_checkpoint(path)
    file = Path(path) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Reduced(eval, command(f"{path}.evil"))
    file.write_bytes(pickle.dumps(metadata))
    KEPT.append(model)


def keep_the_stage() -> None:
    from torch_rpc_ext.sharding.stage import Stage

    KEPT.extend(one for one in gc.get_objects() if type(one) is Stage)


def read_after_the_session(path: str) -> None:
    from torch_rpc_ext.errors import RefusedError

    rpc.shutdown(graceful=False)
    (stage,) = KEPT
    with pytest.raises(RefusedError, match="eval"):
        stage.read_checkpoint(path, "")


KEPT: list[Any] = []


def test_a_checkpoint_that_is_read_when_the_session_is_over(tmp_path: Path) -> None:
    """A request that begins before rpc.shutdown() may read its files afterwards."""
    path = str(tmp_path / "checkpoint")
    with Group(2, options={"allow_list": LISTED}) as group:
        group.run(leave_a_checkpoint, path)
        group[1].run(keep_the_stage)
        group[1].run(read_after_the_session, path)
        assert not Path(f"{path}.evil").exists(), "the attack ran"
        group.run(rpc.shutdown, graceful=False)
