"""shard() and what it returns: a module whose parts are on several workers."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import autograd as _untyped_autograd
from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext.sharding import checkpoint, cutting, stage, tensors
from torch_rpc_ext.sharding.failures import Failure, StageError
from torch_rpc_ext.sharding.placement import Place, places

__all__ = ["ShardedModule", "StageHandle", "context_id", "shard"]

# Upstream's functions have no types.
rpc: Any = _untyped_rpc
dist_autograd: Any = _untyped_autograd

# How much longer a stage waits than the stage before it, s; see _patience().
_STEP = 0.5


def shard(
    module: nn.Module,
    workers: Sequence[str],
    *,
    partition: cutting.Partition | None = None,
    balance: cutting.Balance = "parameters",
    example: Any = None,
    timeout: float | None = None,
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

    Returns:
        The sharded module.

    Raises:
        ValueError: a worker that is not in the group, more workers than layers, a partition that
            does not cover the module or overlaps, a tensor that two stages would share, a module
            that is no chain.
        StageError: a part could not be put on its worker.
        RuntimeError: within a distributed autograd context.
    """
    if context_id() is not None:
        raise RuntimeError("call shard() outside of distributed autograd contexts")
    where = places(workers)
    names = cutting.cut(module, len(where), partition, balance, example)
    seconds = float(rpc.get_rpc_timeout()) if timeout is None else timeout
    return ShardedModule(
        [
            _create(stage.Spec(index, place, stage.part_of(module, part), part), seconds)
            for index, (place, part) in enumerate(zip(where, names, strict=True))
        ],
        seconds,
    )


@dataclass(frozen=True)
class StageHandle:
    """A stage as the caller knows it.

    Attributes:
        index: of the stage, from 0.
        place: worker and device.
        names: of the submodules.
        keys: of the state.
        rref: RRef of the stage.Stage.
    """

    index: int
    place: Place
    names: list[str]
    keys: list[str]
    rref: Any

    def start(self, method: str, *args: Any, timeout: float) -> Any:
        """Return a future of what a method of the stage returns, for result()."""
        try:
            return rpc.rpc_async(
                self.place.worker, stage.call, args=(self.rref, method, *args), timeout=timeout
            )
        except Exception as error:
            raise self.lost(error) from error

    def result(self, future: Any) -> Any:
        """Return the result of a method that start() has started.

        Raises:
            StageError: the stage raised, or its worker is lost.
        """
        try:
            result = future.wait()
        except Exception as error:
            raise self.lost(error) from error
        if isinstance(result, Failure):
            raise result.error()
        return result

    def lost(self, error: Exception) -> StageError:
        """Return the error to raise when a call to the stage's worker has failed."""
        return Failure.of(self.index, self.place.worker, "lost", error).error()


class ShardedModule(nn.Module):
    """A module whose parts are on several workers; made by shard().

    ::

        model = sharding.shard(local, ["worker1", "worker2"])  # a ShardedModule
        optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.1)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [model(x).sum()])
            optimizer.step(context)

    forward() records gradients in the distributed autograd context of the caller; outside of a
    context it records none. Values go from stage to stage, not through the caller. They travel as
    CPU tensors, and each stage moves them to its device.

    Thread Safety: forward() from any number of threads, as far as the submodules allow it.
    """

    def __init__(self, stages: list[StageHandle], timeout: float) -> None:
        super().__init__()
        self._stages = stages
        self._timeout = timeout

    @property
    def stages(self) -> list[StageHandle]:
        """The stages, in their order."""
        return list(self._stages)

    def forward(self, value: Any) -> Any:
        """Run all stages.

        Args:
            value: as the module takes it: a tensor, or tuples, lists and dicts of them.

        Returns:
            What the module returns, tensors on the CPU.

        Raises:
            StageError: a stage raised, or its worker is lost.
        """
        with_grad = torch.is_grad_enabled() and context_id() is not None
        given = tensors.for_the_wire(value)
        made: list[Any] = []  # kept until the end: when an RRef goes, its value goes too
        for handle in self._stages:
            try:
                # No time-out here, but one for fetching: an RRef whose creation has timed out is
                # never deleted, and shutdown() would wait for it.
                given = rpc.remote(
                    handle.place.worker,
                    stage.forward,
                    args=(handle.rref, given, with_grad, self._patience(handle.index)),
                    timeout=0,
                )
            except Exception as error:
                raise handle.lost(error) from error
            made.append(given)
        try:
            result = made[-1].to_here(self._patience(len(made)))
        except Exception as error:
            raise self._stages[-1].lost(error) from error
        if isinstance(result, Failure):
            raise result.error()
        return result

    def remote_parameters(self) -> list[Any]:
        """Return an RRef of each parameter, stage by stage, for DistributedOptimizer."""
        return [rref for part in self._each("parameters") for rref in part]

    def stream_state_dict(self) -> Iterator[OrderedDict[str, Any]]:
        """Yield the state of one stage after the other, with the names of the whole module."""
        for handle in self._stages:
            yield self._one(handle, "state_dict")

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the state of the whole module, with its names, on the CPU.

        Args:
            destination: a dict to add to; for a module that this one is a part of.
            prefix: of the names.
            keep_vars: must be False, the parameters themselves are elsewhere.
        """
        if keep_vars:
            raise ValueError("keep_vars=True: the parameters are on other workers")
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        for part in self.stream_state_dict():
            for name, value in part.items():
                destination[prefix + name] = value
            # Versions of the layers' formats, which load_state_dict() reads.
            for name, versions in getattr(part, "_metadata", {}).items():
                destination._metadata[(prefix + name).rstrip(".")] = versions
        return destination

    def save_checkpoint(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a checkpoint of torch.distributed.checkpoint; each stage writes its own part.

        It has the names of the whole module, and dcp.load() reads it. No process group is needed.

        Args:
            path: a folder that all workers and the caller share.
            overwrite: whether a checkpoint that is there may be replaced; it is gone then, also if
                writing fails.

        Raises:
            StageError: a stage could not write, or there is a checkpoint already.
            ValueError: a stage has written where the caller does not see it.
        """
        text = os.fspath(path)
        coordinator = checkpoint.Coordinator(text, overwrite)
        plans = coordinator.plan(self._each("plan_checkpoint", text))
        results = self._each_own("write_checkpoint", [(plan,) for plan in plans])
        for handle, result in zip(self._stages, results, strict=True):
            missing = coordinator.missing_files(result)
            if missing:
                raise ValueError(
                    f"stage {handle.index} on {handle.place.worker} has written "
                    f"{', '.join(missing)} into a {text} that is not the one here: "
                    "the folder must be on storage that all workers share"
                )
        coordinator.finish(results)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Take the state from a checkpoint; each stage reads its own part.

        Args:
            path: of save_checkpoint(), with any partition, or of dcp.save() of a state dict of the
                whole module.

        Raises:
            StageError: there is none, or a name is missing, or a size differs. Other stages may
                have been loaded.
        """
        self._each("read_checkpoint", os.fspath(path))

    def train(self, mode: bool = True) -> ShardedModule:
        """Set all stages to training or evaluation."""
        super().train(mode)
        self._each("train", mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> ShardedModule:
        """As nn.Module.to, on all stages; a device is the one of that name on each worker."""
        self._each("to", args, kwargs)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the .grad of all parameters.

        Gradients of forward() and of a Pipeline are in the distributed autograd context and end
        with it. A .grad is left only by a DistributedOptimizer of an optimizer that upstream cannot
        script.
        """
        self._each("zero_grad", set_to_none)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedModule:
        """Set whether the parameters of all stages get gradients."""
        self._each("requires_grad_", requires_grad)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: the parameters are elsewhere, and an optimizer here would have none.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the parameters are on other workers: give remote_parameters() to DistributedOptimizer"
        )

    def extra_repr(self) -> str:
        """One line per stage."""
        return "\n".join(
            f"({handle.index}) {handle.place}: {', '.join(handle.names)}" for handle in self._stages
        )

    def _patience(self, stages_before: int) -> float:
        """Return how long to wait for the result of the last of so many stages, s; 0 for ever.

        A later stage waits longer, so that the first error comes from the direct successor of the
        stage that hangs, which names that stage.
        """
        return self._timeout + stages_before * _STEP if self._timeout > 0 else 0.0

    def _one(self, handle: StageHandle, method: str, *args: Any) -> Any:
        return handle.result(handle.start(method, *args, timeout=self._timeout))

    def _each(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all stages at once."""
        return self._each_own(method, [args] * len(self._stages))

    def _each_own(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        futures = [
            handle.start(method, *args, timeout=self._timeout)
            for handle, args in zip(self._stages, arguments, strict=True)
        ]
        return [handle.result(future) for handle, future in zip(self._stages, futures, strict=True)]

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise RuntimeError("the parameters are on other workers: use to()")

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # nn.Module.load_state_dict() calls this, for this module or for one that contains it, and
        # reports what is missing, unexpected or wrong.
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        expected: set[str] = set()
        for handle in self._stages:
            expected.update(prefix + key for key in handle.keys)
            part = OrderedDict(
                (key, tensors.detached(state_dict[prefix + key]))
                for key in handle.keys
                if prefix + key in state_dict
            )
            if not prefix:
                part._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
            try:
                missing = self._one(handle, "load_state_dict", part, assign)
            except StageError as error:
                error_msgs.append(str(error))
            else:
                missing_keys += [prefix + key for key in missing]
        if strict:
            given = {key for key in state_dict if key.startswith(prefix)}
            unexpected_keys += sorted(given - expected)


def context_id() -> int | None:
    """Return the id of the distributed autograd context of this thread, None outside of one."""
    try:
        return int(dist_autograd._current_context()._context_id())
    except RuntimeError:
        return None


def _create(spec: stage.Spec, timeout: float) -> StageHandle:
    try:
        made = rpc.rpc_sync(spec.place.worker, stage.create, args=(spec,), timeout=timeout)
    except Exception as error:  # noqa: BLE001  raised below
        made = Failure.of(spec.index, spec.place.worker, "lost", error)
    if isinstance(made, Failure):
        raise StageError(
            f"stage {spec.index} could not be put on {spec.place}: {made.what}",
            stage=spec.index,
            worker=spec.place.worker,
        ) from made.cause
    return StageHandle(spec.index, spec.place, spec.names, list(spec.module.state_dict()), made)
