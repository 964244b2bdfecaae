"""shard(): a module split over several workers computes what the local module computes."""

from __future__ import annotations

import copy
import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import checkpoint as dcp
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from tests.process import models as m
from tests.process.deaths import wait_until_stopped
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

THREE = ["worker1", "worker2", "worker3"]


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4) as group:
        yield group


def shard(*args: Any, **kwargs: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.shard(*args, **kwargs)


def test_a_sequential_with_a_hook_is_not_taken_apart() -> None:
    """Nobody would call it, and so its hook."""
    from torch_rpc_ext.sharding import cutting

    inner = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    model = nn.Sequential(inner, nn.Linear(1, 1))
    assert cutting.units(model) == ["0.0", "0.1", "1"]
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        hook = getattr(inner, f"register_{kind}_hook")(lambda *_: None)
        assert cutting.units(model) == ["0", "1"], kind
        hook.remove()
    assert cutting.units(model) == ["0.0", "0.1", "1"]


def parts(model: Any) -> list[list[str]]:
    return [handle.names for handle in model.stages]


def train_both(name: str, optimizer: Any, **options: Any) -> None:
    """Train the local and the sharded model for three steps, and compare them bit for bit."""
    local = getattr(m, name)()
    sharded = shard(local, THREE)
    x, y = m.batch_of(name)
    loss = m.loss_of(name)
    m.same(sharded(x), local(x).detach())
    ours = DistributedOptimizer(optimizer, sharded.remote_parameters(), **options)
    theirs = optimizer(local.parameters(), **options)
    for _ in range(3):
        expected = m.local_gradients(local, loss, x, y)
        theirs.step()
        with dist_autograd.context() as context:
            output = sharded(x)
            error = loss(output, y)
            dist_autograd.backward(context, [error])
            m.same((error.detach(), m.gradients(sharded, context)), expected)
            ours.step(context)
        m.same(dict(sharded.state_dict()), dict(local.state_dict()))


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_outputs_gradients_and_updates_are_the_local_ones(four: Group, name: str) -> None:
    four.run(train_both, name, torch.optim.SGD, lr=0.1, momentum=0.9)


def check_values_go_from_stage_to_stage() -> None:
    model = shard(nn.Sequential(Trace(), Trace(), Trace()), THREE)
    assert [text for text, _ in model([])] == THREE
    # Each stage has got its input from the worker before it, and not through the caller.
    assert model([])[-1][1] == ["worker1", "worker2"]


class Trace(nn.Module):
    def forward(self, seen: list[Any]) -> list[Any]:
        name = rpc.get_worker_info().name
        return [*seen, (name, [before for before, _ in seen])]


def test_values_go_from_stage_to_stage(four: Group) -> None:
    four.run(check_values_go_from_stage_to_stage)


def check_partitions() -> None:
    mlp = m.mlp()
    assert parts(shard(mlp, THREE, partition=[1, 3, 1])) == [["0"], ["1", "2", "3"], ["4"]]
    named = [["0", "1"], ["2"], ["3", "4"]]
    model = shard(mlp, ["worker0", "rank:2/cpu", "worker2/cpu"], partition=named)
    assert parts(model) == named
    assert [str(handle.place) for handle in model.stages] == ["worker0", "worker2", "worker2"]
    assert "worker2: 3, 4" in repr(model)
    x, _ = m.batch_of("mlp")
    m.same(model(x), mlp(x).detach())
    # Split by parameters: the one large layer gets its own worker.
    wide = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 400), nn.Flatten())
    assert parts(shard(wide, THREE)) in (
        [["0"], ["1", "2"], ["3", "4"]],
        [["0", "1"], ["2"], ["3", "4"]],
    )
    # Split by time: the one slow layer gets its own worker.
    slow = nn.Sequential(m.Sleep(0, 0), m.Sleep(0.03, 0.03), m.Sleep(0, 0), nn.Flatten())
    found = parts(shard(slow, THREE, balance="time", example=torch.ones(2, 2)))
    assert ["1"] in found, found
    # A nested nn.Sequential can be split, or named as a whole.
    nested = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 6))
    assert parts(shard(nested, THREE)) == [["0.0"], ["0.1"], ["1"]]
    model = shard(nested, THREE[:2], partition=[["0"], ["1"]])
    m.same(dict(model.state_dict()), dict(nested.state_dict()))


def test_partitions(four: Group) -> None:
    four.run(check_partitions)


def check_other_modules() -> None:
    chain = m.Chain()
    x, _ = m.batch_of("mlp")
    model = shard(chain, THREE, example=x)
    assert [name for part in parts(model) for name in part] == [
        "embed",
        "layers.0",
        "layers.1",
        "layers.2",
        "head",
    ]
    m.same(model(x), chain(x).detach())
    m.same(dict(model.state_dict()), dict(chain.state_dict()))
    assert chain.training
    with pytest.raises(ValueError, match="Chain is no nn.Sequential.*example="):
        shard(chain, THREE)
    with pytest.raises(ValueError, match="forward of Chain is not embed -> layers.0"):
        shard(m.Chain(shortcut=True), THREE, example=x)
    with pytest.raises(ValueError, match="one after another in training mode"):
        shard(m.Chain(between=0.5), THREE, example=x)
    # Neither random numbers nor the statistics of a norm are changed by the comparison; and one row
    # is no batch for a norm.
    with_norm = m.Chain(norm=True)
    before, state = torch.get_rng_state(), copy.deepcopy(with_norm.state_dict())
    for example in (x, x[:1]):
        shard(with_norm, THREE, example=example)
        m.same(dict(with_norm.state_dict()), dict(state))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_that_is_no_sequential(four: Group) -> None:
    four.run(check_other_modules)


def check_state_dict() -> None:
    local, other = m.normed(), m.normed()
    with torch.no_grad():
        for value in [*other.parameters(), *other.buffers()]:
            value.add_(1)
    model = shard(local, THREE)
    state = model.state_dict()
    assert list(state) == list(local.state_dict())
    m.same(dict(state), dict(local.state_dict()))
    assert state._metadata["1"] == local.state_dict()._metadata["1"]
    streamed = list(model.stream_state_dict())
    assert len(streamed) == 3 and sum(map(len, streamed)) == len(state)

    assert str(model.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    m.same(dict(model.state_dict()), dict(other.state_dict()))
    local.load_state_dict(model.state_dict())
    m.same(dict(local.state_dict()), dict(other.state_dict()))

    wrong = {**other.state_dict(), "more": torch.ones(1)}
    del wrong["0.bias"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(wrong)
    assert re.search(r'Missing key.*"0.bias"', str(caught.value))
    assert re.search(r'Unexpected key.*"more"', str(caught.value))
    result = model.load_state_dict(wrong, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias"], ["more"])
    with pytest.raises(RuntimeError, match=r"(?s)stage 0 on worker1.*size mismatch for 0.bias"):
        model.load_state_dict({**other.state_dict(), "0.bias": torch.ones(3)})
    # A sharded module can be a part of another module.
    outer = nn.ModuleDict({"first": nn.Linear(2, 6), "rest": model})
    whole = outer.state_dict()
    assert "rest.4.weight" in whole and "first.bias" in whole
    whole["rest.4.weight"] = torch.zeros_like(whole["rest.4.weight"])
    outer.load_state_dict(whole)
    assert not model.state_dict()["4.weight"].any()


def test_state_dict_round_trip(four: Group) -> None:
    four.run(check_state_dict)


def check_checkpoint(folder: str) -> None:
    local = m.normed()
    shard(local, THREE).save_checkpoint(f"{folder}/one")
    files = sorted(path.name for path in Path(folder, "one").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]

    def blank() -> nn.Sequential:
        other = m.normed()
        with torch.no_grad():
            for value in [*other.parameters(), *other.buffers()]:
                value.zero_()
        return other

    # Load the checkpoint into another partition, and into the local model by dcp itself.
    model = shard(blank(), ["worker3", "worker0"])
    model.load_checkpoint(f"{folder}/one")
    m.same(dict(model.state_dict()), dict(local.state_dict()))
    plain = blank()
    dcp.load(plain.state_dict(), checkpoint_id=f"{folder}/one", no_dist=True)
    m.same(dict(plain.state_dict()), dict(local.state_dict()))
    # Load a checkpoint of the local model.
    dcp.save(local.state_dict(), checkpoint_id=f"{folder}/two", no_dist=True)
    model = shard(blank(), THREE)
    model.load_checkpoint(Path(folder, "two"))
    m.same(dict(model.state_dict()), dict(local.state_dict()))

    with pytest.raises(FileExistsError, match=f"in {folder}/one already.*overwrite=True"):
        model.save_checkpoint(f"{folder}/one")
    model.save_checkpoint(f"{folder}/one", overwrite=True)
    with pytest.raises(RuntimeError, match=r"stage \d on worker\d.*(No such file|metadata)"):
        model.load_checkpoint(f"{folder}/none")
    with pytest.raises(RuntimeError, match="stage 0 on worker1 raised ValueError: Size mismatch"):
        shard(m.mlp(), THREE).load_checkpoint(f"{folder}/one")
    other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(RuntimeError, match="stage 2 on worker3.*Missing key.*2.weight"):
        shard(other, THREE).load_checkpoint(f"{folder}/one")
    # One worker does not share the folder: there, the relative path "apart" is elsewhere.
    os.chdir(folder)
    back = rpc.rpc_sync("worker2", os.getcwd)
    for worker in ("worker1", "worker3"):
        rpc.rpc_sync(worker, os.chdir, args=(folder,))
    elsewhere = Path(folder, "elsewhere")
    elsewhere.mkdir()
    rpc.rpc_sync("worker2", os.chdir, args=(str(elsewhere),))
    with pytest.raises(ValueError, match="stage 1 on worker2 has written __1_0.distcp.*share"):
        model.save_checkpoint("apart")
    assert not Path(folder, "apart", ".metadata").exists()
    for worker in ("worker0", *THREE):
        rpc.rpc_sync(worker, os.chdir, args=(back,))


def test_checkpoint_round_trip(four: Group, tmp_path: Path) -> None:
    four.run(check_checkpoint, str(tmp_path))


def check_train_and_eval() -> None:
    local = m.normed()
    model = shard(local, THREE)
    x, _ = m.batch_of("normed")

    def everywhere() -> set[bool]:
        return {
            mode
            for handle in model.stages
            for mode in rpc.rpc_sync(handle.place.worker, m.modes, args=(handle.rref,))
        }

    assert everywhere() == {True} and model.training
    assert (model(x) != model(x)).any()  # dropout is active
    local(x), local(x)
    m.same(model.state_dict()["1.running_var"], local.state_dict()["1.running_var"])
    assert model.eval() is model and everywhere() == {False} and not model.training
    m.same(model(x), local.eval()(x).detach())
    model.train()
    assert everywhere() == {True} and model.training


def test_train_and_eval(four: Group) -> None:
    four.run(check_train_and_eval)


def check_the_rest_of_nn_module() -> None:
    local = m.mlp()
    model = shard(local, THREE)
    x, y = m.batch_of("mlp")
    assert model.to(torch.float64) is model
    m.same(model(x.double()), local.double()(x.double()).detach())
    with pytest.raises(RuntimeError, match="use to"):
        model.half()
    with pytest.raises(RuntimeError, match=r"call apply\(\) on the module before shard"):
        model.apply(nn.Module.eval)
    with pytest.raises(RuntimeError, match="remote_parameters"):
        torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="keep_vars"):
        model.state_dict(keep_vars=True)
    # Outside of an autograd context nothing is recorded; inside, no_grad() has its effect.
    assert not model(x.double()).requires_grad
    with dist_autograd.context():
        assert model(x.double()).requires_grad
        with torch.no_grad():
            assert not model(x.double()).requires_grad
    model.requires_grad_(False)
    with dist_autograd.context():
        assert not model(x.double()).requires_grad
    model.zero_grad()
    # Gradients flow through the sharded module to what precedes it.
    model.requires_grad_().to(torch.float32)
    first = nn.Linear(6, 6)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [nn.functional.mse_loss(model(first(x)), y)])
        found = dist_autograd.get_gradients(context)[first.weight]
    nn.functional.mse_loss(local.float()(first(x)), y).backward()
    m.same(found, first.weight.grad)


def test_the_rest_of_nn_module(four: Group) -> None:
    four.run(check_the_rest_of_nn_module)


TIED = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
TIED[2].weight = TIED[0].weight


def tied_by_memory() -> nn.Sequential:
    """An autoencoder whose decoder uses the weight of the encoder."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))
    model[2].weight.data = model[0].weight.data.t()
    return model


def in_one_buffer(columns: bool) -> nn.Sequential:
    """Two layers whose weights are in one tensor: side by side, or one after the other."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    weights = torch.randn(4, 8) if columns else torch.randn(8, 4)
    for layer, weight in zip((model[0], model[2]), weights.chunk(2, int(columns)), strict=True):
        layer.weight.data = weight
    return model


BAD: list[tuple[str, Any, dict[str, Any]]] = [
    ("workers[1] is 'worker9'.*worker0, worker1", THREE[:1] + ["worker9"], {}),
    ("workers[0] is 'rank:9'", ["rank:9"], {}),
    ("workers[0] is 'worker1/tpu:x'", ["worker1/tpu:x"], {}),
    ("workers is empty", [], {}),
    ("6 workers for 5 layers", THREE * 2, {}),
    ("partition has 2 parts for 3 workers", THREE, {"partition": [2, 3]}),
    ("partition [2, 2, 2] does not cover the 5", THREE, {"partition": [2, 2, 2]}),
    (
        "does not cover the module: 4.weight, 4.bias",
        THREE,
        {"partition": [["0", "1"], ["2"], ["3"]]},
    ),
    ("does not cover the module: 3", THREE, {"partition": [["0", "1"], ["2"], ["4"]]}),
    (
        "overlaps: '2' in partition[1] and '2' in",
        THREE,
        {"partition": [["0", "1"], ["2"], ["2", "3", "4"]]},
    ),
    ("partition[2] names '7'", THREE, {"partition": [["0", "1"], ["2"], ["7"]]}),
    ("partition[1] is []", THREE, {"partition": [["0", "1"], [], ["2", "3", "4"]]}),
    ("order of the layers: 0, 2, 1", THREE, {"partition": [["0"], ["2", "1"], ["3", "4"]]}),
    ("balance must be 'parameters' or 'time', got 'size'", THREE, {"balance": "size"}),
    ("balance='time' needs example=", THREE, {"balance": "time"}),
    ("timeout must be 0 s or more, got -1", THREE, {"timeout": -1}),
    ("timeout must be 0 s or more, got nan", THREE, {"timeout": math.nan}),
]


def cutting_of(model: nn.Module) -> Any:
    from torch_rpc_ext.sharding import cutting

    return cutting.cut(model, 3, [1, 1, 1], "parameters", None)


def check_bad_input() -> None:
    for text, places, options in BAD:
        # Brackets in the texts are literal; ".*" is a pattern.
        pattern = re.escape(text).replace(r"\.\*", ".*")
        with pytest.raises(ValueError, match=pattern):
            shard(m.mlp(), places, **options)
    with pytest.raises(TypeError, match="workers must be a list"):
        shard(m.mlp(), "worker1")
    with pytest.raises(ValueError, match="0.weight and 2.weight are one tensor.*stages 0 and 1"):
        shard(TIED, THREE[:2], partition=[2, 1])
    with pytest.raises(ValueError, match="(0|2).weight and (0|2).weight share memory.*stages"):
        shard(tied_by_memory(), THREE[:2], partition=[2, 1])
    shard(tied_by_memory(), ["worker1"])
    for model in (in_one_buffer(columns=True), in_one_buffer(columns=False)):
        m.same(dict(shard(model, THREE[:2]).state_dict()), dict(model.state_dict()))
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4, device="meta"), nn.Linear(0, 4))
    cutting_of(lazy)
    with dist_autograd.context(), pytest.raises(RuntimeError, match="outside"):
        shard(m.mlp(), THREE)
    assert shard(TIED, ["worker1"]).state_dict().keys() == TIED.state_dict().keys()


def test_bad_input(four: Group) -> None:
    four.run(check_bad_input)


def check_a_stage_that_raises(file: Path) -> None:
    from torch_rpc_ext.sharding import StageError

    x, _ = m.batch_of("mlp")
    model = shard(nn.Sequential(nn.ReLU(), m.Boom("forward", 1), nn.ReLU()), THREE)
    model(x)
    with pytest.raises(StageError, match="stage 1 on worker2 raised ValueError: boom") as caught:
        model(x)
    assert (caught.value.stage, caught.value.worker) == (1, "worker2")
    assert isinstance(caught.value.__cause__, ValueError)
    model(x)
    with pytest.raises(StageError, match="stage 0 on worker1 raised RuntimeError: .*mat1"):
        shard(m.mlp(), THREE)(x[:, :2])
    hangs = nn.Sequential(nn.ReLU(), m.Hang(file), nn.ReLU())
    with pytest.raises(StageError, match="stage 1 on worker2 gave no result"):
        shard(hangs, THREE, timeout=3)(x)
    file.touch()
    if not torch.cuda.is_available():
        with pytest.raises(StageError, match="stage 1 could not be put on worker2/cuda:0.*CUDA"):
            shard(m.mlp(), ["worker1", "worker2/cuda:0"])


def test_a_stage_that_raises(four: Group, tmp_path: Path) -> None:
    four.run(check_a_stage_that_raises, tmp_path / "go on")


def check_after_a_death() -> None:
    from torch_rpc_ext.sharding import StageError

    x, _ = m.batch_of("mlp")
    model = KEPT[0]
    with pytest.raises(StageError, match="stage 1 on worker2 gave no result") as caught:
        model(x)
    assert caught.value.stage == 1
    with pytest.raises(StageError, match="stage 1 on worker2 gave no result"):
        model.state_dict()
    # The other workers live on.
    m.same(shard(m.mlp(), ["worker1", "worker3"])(x), m.mlp()(x).detach())


KEPT: list[Any] = []


def keep_one(timeout: float | None = None) -> None:
    x, _ = m.batch_of("mlp")
    KEPT.append(shard(m.mlp(), THREE))
    KEPT[0](x)
    if timeout is not None:
        KEPT[0]._timeout = timeout  # only now: the first batch opens connections


@needs_ucx("hands an RRef of a dead worker on, and its receiver waits")
def test_a_worker_that_has_died() -> None:
    with Group(4) as group:
        group.run(keep_one)
        group[2].kill()
        group.run(check_after_a_death)


def check_beside_a_stopped_worker(index: int) -> None:
    from torch_rpc_ext.sharding import StageError

    x, _ = m.batch_of("mlp")
    with pytest.raises(StageError, match=f"stage {index} on {THREE[index]} gave no result"):
        KEPT[0](x)


@needs_ucx("names a stage that waits, after the time-out")
@pytest.mark.parametrize("index", range(3))
def test_a_worker_that_is_stopped_is_named(index: int) -> None:
    with Group(4) as group:
        group.run(keep_one, 5.0)
        group[1 + index].signal(signal.SIGSTOP)
        try:
            wait_until_stopped(group[1 + index].child.pid)
            group.run(check_beside_a_stopped_worker, index)
        finally:
            group[1 + index].signal(signal.SIGCONT)


@workers(2, options={"num_worker_threads": 4})
def test_with_few_threads() -> None:
    x, _ = m.batch_of("mlp")
    local = m.mlp()
    m.same(shard(local, ["worker1", "worker0", "worker1"])(x), local(x).detach())


ALLOWED = [
    *(
        f"torch_rpc_ext.sharding.{name}"
        for name in (
            *("autocast", "failures", "job", "placement"),
            *("runner", "schedule", "stage", "stage_optimizer"),
        )
    ),
    *(
        f"torch.distributed.checkpoint.{name}"
        for name in (
            *("planner", "metadata", "storage"),
            *("filesystem._StorageInfo", "filesystem._StoragePrefix"),
        )
    ),
    *(f"torch.nn.{name}" for name in ("Module", "Linear", "ReLU", "Tanh", "functional.mse_loss")),
    "torch.optim.AdamW",
]


@needs_ucx("has no allow_list")
@workers(3, options={"allow_list": ALLOWED})
def test_with_an_allow_list(tmp_path: Path) -> None:
    from torch_rpc_ext import sharding

    local = m.mlp()
    x, y = m.batch_of("mlp")
    model = shard(local, ["worker1", "worker2"])
    pipeline = sharding.Pipeline(model, 2, nn.functional.mse_loss)
    with dist_autograd.context():
        m.same(
            pipeline.forward_backward(x, y),
            m.local_gradients(local, nn.functional.mse_loss, x, y, 2)[0],
        )
    model.save_checkpoint(tmp_path / "model")
    optimizer = sharding.ShardedOptimizer(torch.optim.AdamW, model)
    with torch.autocast("cpu", torch.bfloat16):
        m.same(pipeline.forward(x), m.local_outputs(local, x, 2))
        pipeline.forward_backward(x, y)
    model.clip_grad_norm_(1.0)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "random": model.get_rng_state()}
    sharding.save_checkpoint(state, tmp_path / "all")
    sharding.load_checkpoint(state, tmp_path / "all")
    model.set_rng_state(state["random"])
    model.load_checkpoint(tmp_path / "model")
    m.same(dict(model.state_dict()), dict(local.state_dict()))
