"""Training that is saved in the middle and resumed, in any partition, has the same losses to the
last bit; and the checkpoint is one of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.optim import lr_scheduler

from tests.process import models as m
from tests.process.group import Group

THREE = ["worker1", "worker2", "worker3"]
mse = nn.functional.mse_loss


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4) as group:
        yield group


OWN = {1: [{}], "empty": {}, "pair": (2, None)}  # as in the states of some schedulers


class Trainer:
    """A sharded model with all that belongs to its training."""

    def __init__(self, workers: list[str], make: Any = m.mlp, lr: float = 0.01) -> None:
        from torch_rpc_ext import sharding

        self.sharding = sharding
        self.model = sharding.shard(make(), workers, seed=11)
        self.pipeline = sharding.Pipeline(self.model, 4, mse)
        self.optimizer = sharding.ShardedOptimizer(torch.optim.Adam, self.model, lr=lr)
        self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=20)
        self.scaler = sharding.ShardedGradScaler(growth_interval=3)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            torch.manual_seed(100 + self.step)
            x, y = torch.randn(12, 6), torch.randn(12, 3)
            self.optimizer.zero_grad()
            losses.append(self.pipeline.forward_backward(x, y, scaler=self.scaler).item())
            self.scaler.unscale_(self.optimizer)
            self.model.clip_grad_norm_(0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.step += 1
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "random": self.model.get_rng_state(),
            "step": self.step,
            "own": OWN,
            "tensor": torch.arange(3.0),
        }

    def save(self, path: str, **options: Any) -> None:
        self.sharding.save_checkpoint(self.state(), path, **options)

    def load(self, path: str) -> dict[str, Any]:
        state = self.state()
        self.sharding.load_checkpoint(state, path)
        self.step = state["step"]
        return state


def check_resumed(folder: str) -> None:
    whole = Trainer(THREE)
    whole.train(5)
    whole.save(folder)
    groups = whole.optimizer.state_dict()["param_groups"]
    files = sorted(path.name for path in Path(folder).iterdir())
    # Each stage has written its layers and its moments, the caller what it has itself.
    assert files == [".metadata", *(f"__{index}_0.distcp" for index in range(7))]
    rest = whole.train(5)
    for places in (THREE, ["worker2", "worker0"], ["worker3"]):
        again = Trainer(places, lr=0.5)
        again.train(2)  # has a state of its own, which goes
        read = again.load(folder)
        assert read["own"] == OWN and read["tensor"].tolist() == [0, 1, 2]
        assert again.step == 5 and again.scaler.get_scale() == 2.0**17
        assert again.optimizer.state_dict()["param_groups"] == groups
        assert again.train(5) == rest
        m.same(dict(again.model.state_dict()), dict(whole.model.state_dict()))
        m.same(again.optimizer.state_dict(), whole.optimizer.state_dict())


def test_resumed_in_any_partition(four: Group, tmp_path: Path) -> None:
    four.run(check_resumed, str(tmp_path / "one"))


def check_random_numbers(folder: str) -> None:
    whole = Trainer(THREE, m.normed)
    whole.train(3)
    whole.save(folder)
    rest = whole.train(3)
    again = Trainer(THREE, m.normed)
    again.model.set_rng_state(again.load(folder)["random"])
    assert again.train(3) == rest
    again.load(folder)
    again.model.manual_seed(12)
    assert again.train(3) != rest
    with pytest.raises(ValueError, match="3 states of random numbers for 2 stages.*manual_seed"):
        other = Trainer(THREE[:2], m.normed)
        other.model.set_rng_state(other.load(folder)["random"])


def test_dropout_is_resumed(four: Group, tmp_path: Path) -> None:
    four.run(check_random_numbers, str(tmp_path / "one"))


def check_upstream_reads(folder: str) -> None:
    """Upstream's functions read the checkpoint into a local model and its optimizer, and write one
    that the stages read."""
    ours = Trainer(THREE)
    ours.train(3)
    ours.save(f"{folder}/ours")
    local = m.mlp()
    theirs = torch.optim.Adam(local.parameters(), lr=0.5)
    lr_scheduler.OneCycleLR(theirs, max_lr=0.5, total_steps=20)
    flat = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)

    def state() -> dict[str, Any]:
        return {
            "model": local.state_dict(),
            "optimizer": dcp_state.get_optimizer_state_dict(local, theirs, options=flat),
            "scheduler": None,
            "step": 0,
        }

    read = state()
    dcp.load(read, checkpoint_id=f"{folder}/ours", no_dist=True)
    dcp_state.set_optimizer_state_dict(local, theirs, read["optimizer"], options=flat)
    m.same(dict(local.state_dict()), dict(ours.model.state_dict()))
    m.same(theirs.state_dict()["state"], ours.optimizer.state_dict()["state"])
    assert theirs.param_groups[0]["lr"] == ours.optimizer.param_groups[0]["lr"] != 0.5
    assert read["step"] == 3 and read["scheduler"]["last_epoch"] == 3
    dcp.save(state(), checkpoint_id=f"{folder}/theirs", no_dist=True)
    again = Trainer(["worker3", "worker1"])
    again.sharding.load_checkpoint(
        {"model": again.model, "optimizer": again.optimizer}, f"{folder}/theirs"
    )
    m.same(dict(again.model.state_dict()), dict(local.state_dict()))
    m.same(again.optimizer.state_dict()["state"], theirs.state_dict()["state"])


def test_upstream_reads_and_writes_it(four: Group, tmp_path: Path) -> None:
    four.run(check_upstream_reads, str(tmp_path))


def check_errors(folder: str) -> None:
    from torch_rpc_ext.sharding import StageError, load_checkpoint, save_checkpoint

    trainer = Trainer(THREE)
    trainer.train(1)
    trainer.save(f"{folder}/one")
    with pytest.raises(FileExistsError, match=f"in {folder}/one already.*overwrite=True"):
        trainer.save(f"{folder}/one")
    trainer.save(f"{folder}/one", overwrite=True)
    with pytest.raises(StageError, match="no state of an optimizer of 0.weight.* under 'other'"):
        load_checkpoint({"other": trainer.optimizer}, f"{folder}/one")
    with pytest.raises(RuntimeError, match="Missing key.*epoch"):
        load_checkpoint({"epoch": 0}, f"{folder}/one")
    with pytest.raises(StageError, match=r"stage \d on worker\d.*(No such file|metadata)"):
        trainer.load(f"{folder}/none")
    # Parameters of one group that had different options.
    groups = [{"params": ["0.weight"], "lr": 0.5}, {"params": ["0.bias"]}]
    optimizer = trainer.sharding.ShardedOptimizer(
        torch.optim.SGD, trainer.model, param_groups=groups, momentum=0.9
    )
    save_checkpoint({"optimizer": optimizer}, f"{folder}/two")
    one_group = [{"params": ["0.weight", "0.bias"]}]
    other = trainer.sharding.ShardedOptimizer(
        torch.optim.SGD, trainer.model, param_groups=one_group
    )
    with pytest.raises(ValueError, match="0.weight and 0.bias are in one parameter group"):
        load_checkpoint({"optimizer": other}, f"{folder}/two")


def test_errors(four: Group, tmp_path: Path) -> None:
    four.run(check_errors, str(tmp_path))


class Counting(nn.Linear):
    """Has state that is no tensor."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def check_extra_state(folder: str) -> None:
    from torch_rpc_ext import sharding

    saved = {"steps": 7, "more": {"a": [1, 2]}}
    layers = nn.Sequential(Counting(saved), Counting(5), Counting({}))
    model = sharding.shard(layers, ["worker1", "worker2"])
    sharding.save_checkpoint({"model": model}, folder)
    fresh: Any
    for fresh in ({"steps": 0, "more": {"a": None}}, {"steps": 0, "more": {"a": [3]}}):
        loaded = nn.Sequential(Counting(fresh), Counting(0), Counting({}))
        again = sharding.shard(loaded, ["worker3"])
        sharding.load_checkpoint({"model": again}, folder)
        m.same(dict(again.state_dict()), layers.state_dict())
    for fresh, lost in (
        ({}, "model.0._extra_state.more.a, model.0._extra_state.steps"),
        ({"steps": 0, "more": {}}, "model.0._extra_state.more.a"),
    ):
        loaded = nn.Sequential(Counting(fresh), Counting(0), Counting({}))
        again = sharding.shard(loaded, ["worker3"])
        with pytest.raises(sharding.StageError, match="has no such keys") as error:
            sharding.load_checkpoint({"model": again}, folder)
        assert all(name in str(error.value) for name in lost.split(", "))


def test_state_that_is_no_tensor(four: Group, tmp_path: Path) -> None:
    four.run(check_extra_state, str(tmp_path))


def check_what_cannot_be_saved(folder: str) -> None:
    from torch_rpc_ext import sharding

    model = sharding.shard(m.mlp(), THREE)
    sharding.save_checkpoint({"model": model, "step": 1}, folder)
    for state, error, text in (
        ({}, ValueError, "nothing to save"),
        ({"model": model, 5: 1}, TypeError, "keys of state must be strings, got 5"),
        ({"model": model, "f": lambda: 1}, TypeError, r"state\['f'\] cannot be saved: .*pickle"),
    ):
        with pytest.raises(error, match=text):
            sharding.save_checkpoint(state, folder, overwrite=True)
    state = {"model": model, "step": 0}
    sharding.load_checkpoint(state, folder)  # the checkpoint is still there
    assert state["step"] == 1


def test_what_cannot_be_saved_changes_nothing(four: Group, tmp_path: Path) -> None:
    four.run(check_what_cannot_be_saved, str(tmp_path / "one"))
