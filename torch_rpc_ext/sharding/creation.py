"""shard(): puts the parts of a module on workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext.sharding import cutting, stage
from torch_rpc_ext.sharding.exact import exact
from torch_rpc_ext.sharding.failures import Failure, StageError
from torch_rpc_ext.sharding.gradients import context_id
from torch_rpc_ext.sharding.handles import Handles, StageHandle
from torch_rpc_ext.sharding.module import ShardedModule
from torch_rpc_ext.sharding.placement import places
from torch_rpc_ext.sharding.random_numbers import seed_of

__all__ = ["shard"]

rpc: Any = _untyped_rpc  # upstream's functions have no types


def shard(
    module: nn.Module,
    workers: Sequence[str],
    *,
    partition: cutting.Partition | None = None,
    balance: cutting.Balance = "parameters",
    example: Any = None,
    timeout: float | None = None,
    seed: int | None = None,
) -> ShardedModule:
    """Copy the parts of a module to workers and return a module that runs them there.

    The module must be a chain: its forward takes one value and passes it from submodule to
    submodule. An nn.Sequential is a chain; another module is checked with ``example``. The parts
    are copies; the module itself is not changed. Hooks of the submodules are copied, hooks of the
    module itself are not.

    Args:
        module: what to split.
        workers: one per stage, as RemoteModule writes them: "worker1", "worker1/cuda:0",
            "rank:1/cpu". A worker may have several stages.
        partition: names of submodules per stage, [["0", "1"], ["2"]], or the number of layers per
            stage, [2, 1]. None for a balanced one. Layers are the children; plain nn.Sequentials
            and nn.ModuleLists among them count as their own children.
        balance: what is balanced: "parameters", their number, or "time", of forward and backward,
            measured here on ``example``.
        example: an input of the module, for the two uses above.
        timeout: of each call to a stage, s; 0 for none, None for the options' rpc_timeout.
        seed: for manual_seed() of the sharded module; None for that of torch.manual_seed() here.

    Returns:
        The sharded module.

    Raises:
        ValueError: a worker that is not in the group, more workers than layers, a partition that
            does not cover the module or overlaps, tensors of two stages that are one tensor or
            share memory, a module that is no chain, a time-out that is negative or NaN.
        StageError: a part could not be put on its worker.
        RuntimeError: within a distributed autograd context.
    """
    if context_id() is not None:
        raise RuntimeError("call shard() outside of distributed autograd contexts")
    where = places(workers)
    names = cutting.cut(module, len(where), partition, balance, example)
    seconds = float(rpc.get_rpc_timeout()) if timeout is None else timeout
    if not seconds >= 0:
        raise ValueError(f"timeout must be 0 s or more, got {timeout!r}")
    seed = torch.initial_seed() if seed is None else seed
    before = [None, *(place.worker for place in where)]  # of each stage
    specs = [
        stage.Spec(
            index, place, stage.part_of(module, part), part, before[index], seed_of(seed, index)
        )
        for index, (place, part) in enumerate(zip(where, names, strict=True))
    ]
    made = [_create(spec, seconds) for spec in specs]
    # What a stage may leave on its device is what the next one can fetch; the caller fetches CPU
    # tensors.
    direct = [*(arriving for _, arriving in made[1:]), []]
    handles = [
        StageHandle(
            spec.index, spec.place, rref, spec.names, list(spec.module.state_dict()), devices
        )
        for spec, (rref, _), devices in zip(specs, made, direct, strict=True)
    ]
    order = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    sharded = ShardedModule(Handles(handles, seconds), seconds, order)
    sharded.training = module.training
    return sharded


def _create(spec: stage.Spec, timeout: float) -> Any:
    """Return what stage.create() has returned."""
    try:
        with exact():
            made = rpc.rpc_sync(spec.place.worker, stage.create, args=(spec,), timeout=timeout)
    except Exception as error:  # noqa: BLE001  raised below
        made = Failure.of(spec.index, spec.place.worker, "lost", error)
    if isinstance(made, Failure):
        raise StageError(
            f"stage {spec.index} could not be put on {spec.place}: {made.what}",
            stage=spec.index,
            worker=spec.place.worker,
        ) from made.cause
    return made
