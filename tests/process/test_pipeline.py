"""Pipelines give the gradients of the local model with every schedule; and how much memory they
hold."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from tests.process import models as m
from tests.process.deaths import wait_for_file
from tests.process.group import Group, workers

THREE = ["worker1", "worker2", "worker3"]
SCHEDULES = ["gpipe", "1f1b"]
mse = nn.functional.mse_loss


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4) as group:
        yield group


def shard(*args: Any, **kwargs: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.shard(*args, **kwargs)


def pipeline(model: Any, loss_fn: Any = None, **kwargs: Any) -> Any:
    from torch_rpc_ext import sharding

    return sharding.Pipeline(model, loss_fn=loss_fn, **{"n_microbatches": 4, **kwargs})


def run(pipe: Any, model: Any, x: Any, y: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a batch; return the loss and the gradients."""
    with dist_autograd.context() as context:
        loss = pipe.forward_backward(x, y)
        return loss, m.gradients(model, context)


def train_both(name: str, schedule: str) -> None:
    """Train the local model and the pipeline for three steps, and compare them bit for bit."""
    local, whole = getattr(m, name)(), getattr(m, name)()
    model = shard(local, THREE)
    x, y = m.batch_of(name, 13)  # micro-batches of 4, 3, 3, 3
    loss = m.loss_of(name)
    pipe = pipeline(model, loss, schedule=schedule, reduction="mean")
    ours = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    torch.testing.assert_close(run(pipe, model, x, y), m.local_gradients(whole, loss, x, y))
    for _ in range(3):
        expected = m.local_gradients(local, loss, x, y, 4)
        theirs.step()
        with dist_autograd.context() as context:
            error = pipe.forward_backward(x, y)
            m.same((error, m.gradients(model, context)), expected)
            ours.step(context)
        m.same(dict(model.state_dict()), dict(local.state_dict()))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_gradients_and_updates_are_the_local_ones(four: Group, name: str, schedule: str) -> None:
    four.run(train_both, name, schedule)


def check_what_is_held() -> None:
    model = shard(m.mlp(), THREE)
    x, y = m.batch_of("mlp")
    peaks = {}
    for schedule in SCHEDULES:
        pipe = pipeline(model, mse, schedule=schedule, n_microbatches=6)
        run(pipe, model, x, y)
        peaks[schedule] = [stats.peak_micro_batches for stats in pipe.stats]
        assert [(stats.stage, stats.worker) for stats in pipe.stats] == list(enumerate(THREE))
    assert peaks == {"gpipe": [6, 6, 6], "1f1b": [3, 2, 1]}


def test_micro_batches_held(four: Group) -> None:
    four.run(check_what_is_held)


def check_stages_work_at_once(schedule: str) -> None:
    sleeps = nn.Sequential(nn.Linear(2, 2), *[m.Sleep(0.02, 0.02) for _ in range(3)])
    model = shard(sleeps, THREE, partition=[2, 1, 1])
    pipe = pipeline(model, mse, n_microbatches=6, schedule=schedule)
    run(pipe, model, torch.ones(6, 2), torch.ones(6, 2))  # opens connections and starts threads
    m.run_until_slept_at_once(THREE, lambda: run(pipe, model, torch.ones(6, 2), torch.ones(6, 2)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_work_at_once(four: Group, schedule: str) -> None:
    four.run(check_stages_work_at_once, schedule)


def check_other_shapes() -> None:
    # Dicts as inputs, as outputs and between stages; two stages run on the caller's worker, which
    # is busy with others too.
    torch.manual_seed(6)
    local = nn.Sequential(m.Pair(), m.Pair(), m.Join())
    model = shard(local, ["worker0", "worker0", "worker1"])
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    for schedule in SCHEDULES:
        pipe = pipeline(model, mse, schedule=schedule)
        m.same(run(pipe, model, x, y), m.local_gradients(local, mse, x, y, 4))
    both = {"a": x, "b": torch.randn(8, 6)}
    run(pipe, model, both, y)
    # With a sum instead of a mean, the losses of micro-batches simply add up.
    pipe = pipeline(model, squares, reduction="sum", n_microbatches=3)
    local.zero_grad()
    total = squares(local(x), y)
    total.backward()
    loss, found = run(pipe, model, x, y)
    torch.testing.assert_close(loss, total.detach())
    torch.testing.assert_close(found["0.linear.weight"], local[0].linear.weight.grad)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def test_other_values_and_places(four: Group) -> None:
    four.run(check_other_shapes)


def check_frozen_and_in_place() -> None:
    # A stage without parameters, whose first layer works in place.
    local = m.mlp()
    x, y = m.batch_of("mlp")
    model = shard(local, THREE, partition=[1, 1, 3])
    expected = m.local_gradients(local, mse, x, y, 4)
    m.same(run(pipeline(model, mse), model, x, y), expected)
    # A frozen first stage: no gradient flows back into it.
    model = shard(local, THREE, partition=[2, 1, 2])
    rpc.rpc_sync("worker1", freeze, args=(model.stages[0].rref,))
    loss, found = run(pipeline(model, mse), model, x, y)
    m.same(loss, expected[0])
    m.same(found, {name: g for name, g in expected[1].items() if not name.startswith("0.")})
    # The gradients of two batches in one context add up.
    model.requires_grad_()
    pipe = pipeline(model, mse)
    with dist_autograd.context() as context:
        pipe.forward_backward(x, y)
        pipe.forward_backward(x, y)
        m.same(m.gradients(model, context), {name: 2 * g for name, g in expected[1].items()})


def freeze(stage: Any) -> None:
    stage.local_value().requires_grad_(False)


def test_frozen_and_in_place(four: Group) -> None:
    four.run(check_frozen_and_in_place)


def check_layers_with_a_state(schedule: str) -> None:
    local = m.normed()
    x, y = m.batch_of("normed")
    model = shard(local, THREE, partition=[2, 2, 1])
    pipe = pipeline(model, mse, schedule=schedule)
    # Dropout uses the random numbers of its stage, one micro-batch after another.
    model.manual_seed(6)
    torch.manual_seed(7)  # of stage 1
    expected = m.local_gradients(local, mse, x, y, 4)
    m.same(run(pipe, model, x, y), expected)
    # BatchNorm has processed the micro-batches one after another.
    m.same(dict(model.state_dict()), dict(local.state_dict()))
    assert model.state_dict()["1.num_batches_tracked"] == 4
    model.eval()
    local.eval()
    m.same(run(pipe, model, x, y), m.local_gradients(local, mse, x, y, 4))
    m.same(dict(model.state_dict()), dict(local.state_dict()))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batch_norm_and_dropout(four: Group, schedule: str) -> None:
    four.run(check_layers_with_a_state, schedule)


def check_bad_input() -> None:
    model = shard(m.mlp(), THREE)
    x, y = m.batch_of("mlp")
    for options, text in [
        ({"n_microbatches": 0}, "n_microbatches must be at least 1, got 0"),
        ({"schedule": "zb"}, "schedule must be one of gpipe, 1f1b, got 'zb'"),
        ({"timeout": -1}, "timeout must be 0 s or more, got -1"),
        ({"timeout": math.nan}, "timeout must be 0 s or more, got nan"),
    ]:
        with pytest.raises(ValueError, match=text):
            pipeline(model, mse, **options)
    with pytest.raises(ValueError, match="loss_fn .*lambda.* cannot be sent"):
        pipeline(model, lambda output, target: output.sum())
    with pytest.raises(ValueError, match="loss_fn must be callable"):
        pipeline(model, "mse")
    pipe = pipeline(model, mse)
    with dist_autograd.context():
        with pytest.raises(ValueError, match="batch of 3 cannot be cut into 4 micro-batches"):
            pipe.forward_backward(x[:3], y[:3])
        with pytest.raises(ValueError, match="batch of 12 and target one of 8"):
            pipe.forward_backward(x, y[:8])
        with pytest.raises(ValueError, match="different batch sizes: \\[8, 12\\]"):
            pipe.forward_backward((x, x[:8]), y)
        with pytest.raises(ValueError, match="inputs must hold tensors"):
            pipe.forward_backward("x", y)
        with pytest.raises(ValueError, match="inputs require gradients"):
            pipe.forward_backward(x.clone().requires_grad_(), y)
    m.same(run(pipe, model, x, y), m.local_gradients(m.mlp(), mse, x, y, 4))


def test_bad_input(four: Group) -> None:
    four.run(check_bad_input)


def check_a_stage_that_raises(where: str, schedule: str) -> None:
    from torch_rpc_ext.sharding import StageError

    local = nn.Sequential(nn.Linear(6, 3), m.Boom(where, at=2), nn.Linear(3, 3))
    x, y = m.batch_of("mlp")
    model = shard(local, THREE)
    # Without a time-out, so that only the caller can end the waits of the other stages.
    pipe = pipeline(model, mse, schedule=schedule, timeout=0)
    begin = time.monotonic()
    with pytest.raises(StageError, match="stage 1 on worker2 raised ValueError: boom") as caught:
        run(pipe, model, x, y)
    assert (caught.value.stage, caught.value.worker) == (1, "worker2")
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("models.py" in note for note in caught.value.__notes__)
    assert time.monotonic() - begin < 20
    # The next batch works as if nothing had failed.
    local[1] = nn.Identity()
    m.same(run(pipe, model, x, y), m.local_gradients(local, mse, x, y, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stage_that_raises(four: Group, where: str, schedule: str) -> None:
    four.run(check_a_stage_that_raises, where, schedule)


def check_a_bad_loss() -> None:
    from torch_rpc_ext.sharding import StageError

    model = shard(m.mlp(), THREE)
    x, y = m.batch_of("mlp")
    with pytest.raises(StageError, match=r"stage 2 on worker3.*one number.*returned \(3, 3\)"):
        run(pipeline(model, torch.sub, reduction="mean"), model, x, y)
    with pytest.raises(StageError, match="stage 2 on worker3.*one number.*returned list"):
        run(pipeline(model, as_list, reduction="mean"), model, x, y)


def as_list(output: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    return [output, target]


def test_a_loss_that_is_no_number(four: Group) -> None:
    four.run(check_a_bad_loss)


def wait_until_told_to_stop(name: str, batch: int) -> None:
    from torch_rpc_ext.sharding import runner

    found = runner.find(name)
    assert found is not None
    end = time.monotonic() + 30
    while found.mailbox.stopped(batch) is None:
        assert time.monotonic() < end
        time.sleep(0.01)


def hanging_pipeline(file: Path, **options: Any) -> tuple[Any, Any]:
    """A pipeline whose stage 1 hangs until the file is there. The time of a batch begins when it
    hangs."""
    begun = file.with_suffix(".begun")
    model = shard(nn.Sequential(nn.Linear(6, 3), m.Hang(file, begun), nn.Linear(3, 3)), THREE)
    pipe = pipeline(model, mse, timeout=1, **options)
    collect = pipe._collect

    def collect_later(*args: Any) -> Any:
        wait_for_file(begun)
        return collect(*args)

    pipe._collect = collect_later
    return model, pipe


def check_slow_stage(folder: Path, patch: pytest.MonkeyPatch) -> None:
    from torch_rpc_ext.sharding import StageError, runner
    from torch_rpc_ext.sharding import pipeline as pipelines

    x, y = m.batch_of("mlp")
    # When the time is over, its first forward goes on, and all other stages wait for it.
    patch.setattr(pipelines, "_GRACE", 60.0)
    slow, pipe = hanging_pipeline(folder / "slow", n_microbatches=2)
    stop = pipe._stop

    def stop_and_let_it_go_on(reason: str) -> None:
        stop(reason)
        told = (runner.runner_name(pipe.name, 1), pipe._batch)
        rpc.rpc_sync("worker2", wait_until_told_to_stop, args=told)
        (folder / "slow").touch()

    pipe._stop = stop_and_let_it_go_on
    with pytest.raises(StageError, match="stage 1 on worker2.*did not end within 1 s.*forward"):
        run(pipe, slow, x, y)
    # A stage that hangs is named too, for as long as it hangs.
    patch.setattr(pipelines, "_GRACE", 5.0)
    stuck, pipe = hanging_pipeline(folder / "stuck")
    with pytest.raises(StageError, match="stage 1 on worker2 gave no result"):
        run(pipe, stuck, x, y)
    with pytest.raises(StageError, match="stage 1 on worker2 raised.*still busy"):
        run(pipe, stuck, x, y)
    (folder / "stuck").touch()


def check_slow_stages(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check_slow_stage(folder, patch)


def test_a_stage_that_takes_too_long(four: Group, tmp_path: Path) -> None:
    four.run(check_slow_stages, tmp_path)


WATCHED: list[Any] = []


def watch(stage: Any, pipe: str) -> None:
    from torch_rpc_ext.sharding import runner

    own = stage.local_value()
    found = runner.find(runner.runner_name(pipe, own.index))
    assert found is not None
    WATCHED.extend([weakref.ref(own), weakref.ref(found)])


def alive() -> int:
    """How many of the watched stages and runners on this worker still exist."""
    gc.collect()
    return sum(one() is not None for one in WATCHED)


def check_nothing_stays() -> None:
    model = shard(m.mlp(), THREE)
    x, y = m.batch_of("mlp")
    pipe = pipeline(model, mse)
    for handle in model.stages:
        rpc.rpc_sync(handle.place.worker, watch, args=(handle.rref, pipe.name))
    run(pipe, model, x, y)
    assert [rpc.rpc_sync(worker, alive) for worker in THREE] == [2, 2, 2]
    del pipe, model, handle
    gc.collect()
    deadline = time.monotonic() + 30
    while any(rpc.rpc_sync(worker, alive) for worker in THREE):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_stays(four: Group) -> None:
    four.run(check_nothing_stays)


KEPT: list[Any] = []


def begin_a_long_batch() -> None:
    slow = nn.Sequential(nn.Linear(6, 3), m.Sleep(0.2, 0.2), nn.Linear(3, 3))
    model = shard(slow, THREE)
    KEPT.extend([model, pipeline(model, mse, n_microbatches=12, timeout=30)])


def check_a_death() -> tuple[int | None, str | None, float]:
    from torch_rpc_ext.sharding import StageError

    model, pipe = KEPT
    x, y = m.batch_of("mlp")
    begin = time.monotonic()
    with pytest.raises(StageError, match="stage 1 on worker2 gave no result") as caught:
        run(pipe, model, x, y)
    elapsed = time.monotonic() - begin
    with pytest.raises(StageError, match="stage 1 on worker2"):
        run(pipe, model, x, y)
    # The surviving workers can serve another pipeline.
    other = shard(m.mlp(), ["worker1", "worker3"])
    expected = m.local_gradients(m.mlp(), mse, x, y, 4)
    m.same(run(pipeline(other, mse), other, x, y), expected)
    return caught.value.stage, caught.value.worker, elapsed


def test_a_worker_that_dies_in_the_middle() -> None:
    with Group(4) as group:
        group.run(begin_a_long_batch)
        call = group[0].start(check_a_death)
        time.sleep(1)
        group[2].kill()
        stage, worker, elapsed = call.result()
        assert (stage, worker) == (1, "worker2")
        assert elapsed < 20  # the death is noticed; no time-out has to pass


@workers(2, options={"num_worker_threads": 1})
def test_one_thread_is_enough() -> None:
    local = m.mlp()
    x, y = m.batch_of("mlp")
    model = shard(local, ["worker1"] * 3)
    m.same(run(pipeline(model, mse), model, x, y), m.local_gradients(local, mse, x, y, 4))
