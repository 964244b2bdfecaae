"""What shard() returns: a module whose parts are on several workers."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext import errors
from torch_rpc_ext.sharding import autocast, stage, tensors
from torch_rpc_ext.sharding.failures import Failure, StageError
from torch_rpc_ext.sharding.gradients import context_id
from torch_rpc_ext.sharding.handles import Handles, StageHandle
from torch_rpc_ext.sharding.random_numbers import seed_of
from torch_rpc_ext.sharding.saving import SavedByStages, write

__all__ = ["ShardedModule"]

rpc: Any = _untyped_rpc  # upstream's functions have no types

# How much longer a stage waits than the stage before it, s; see _patience().
_STEP = 0.5


class ShardedModule(nn.Module, SavedByStages):
    """A module whose parts are on several workers; made by shard().

    ::

        model = sharding.shard(local, ["worker1", "worker2"])  # a ShardedModule
        optimizer = sharding.ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [model(x).sum()])
            optimizer.step()

    forward() records gradients in the distributed autograd context of the caller; outside of a
    context it records none. Values go from stage to stage, not through the caller: as they are
    where the later worker's device map names the device, else as CPU tensors, and each stage moves
    them to its device. The stages compute under the caller's autocast.

    Methods that call the stages raise StageError when a stage raises or its worker is lost;
    load_state_dict() raises a RuntimeError that says so.

    Thread Safety: forward() from any number of threads, as far as the submodules allow it.
    """

    def __init__(self, stages: Handles[StageHandle], timeout: float, order: list[str]) -> None:
        super().__init__()
        self._stages, self._timeout, self._order = stages, timeout, order
        self._devices = [handle.place.device for handle in stages]

    @property
    def stages(self) -> Handles[StageHandle]:
        """The stages, in their order."""
        return self._stages

    @property
    def timeout(self) -> float:
        """Of each call to a stage, s; 0 for none."""
        return self._timeout

    @property
    def order(self) -> list[str]:
        """The names of the parameters, in the order of the local module's named_parameters()."""
        return self._order

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
        cast = autocast.current(self.device_types())
        given = tensors.for_the_wire(value)
        made: list[Any] = []  # kept until the end: when an RRef goes, its value goes too
        for handle in self._stages:
            request = stage.Request(with_grad, cast, handle.direct, self._patience(handle.index))
            try:
                # No time-out here, but one for fetching: an RRef whose creation has timed out is
                # never deleted, and shutdown() would wait for it.
                given = rpc.remote(
                    handle.place.worker,
                    stage.forward,
                    args=(handle.rref, given, request),
                    timeout=0,
                )
            except Exception as error:
                raise handle.lost(error) from error
            made.append(given)
        try:
            result = made[-1].to_here(self._patience(len(made)))
        except Exception as error:
            raise self._waited_for(made, error).lost(error) from error
        if isinstance(result, Failure):
            if result.kind == "lost" and isinstance(result.cause, errors.CallTimeoutError):
                raise self._waited_for(made[: result.stage + 1], result.cause).lost(result.cause)
            raise result.error()
        return result

    def remote_parameters(self) -> list[Any]:
        """Return an RRef of each parameter, stage by stage, for DistributedOptimizer."""
        return [rref for part in self._stages.each("parameters") for rref in part]

    def device_types(self) -> set[str]:
        """Return the types of the devices of all stages: "cpu", "cuda"."""
        return {torch.device(device).type for device in self._devices}

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all stages by their norm, as of one vector, in place.

        As torch.nn.utils.clip_grad_norm_() does with the parameters of the local model. The
        gradients are those of the distributed autograd context in which this is called, outside of
        a context the .grad of the parameters.

        Args:
            max_norm: the norm that the gradients have at most, afterwards.
            norm_type: of the norm; may be math.inf.
            error_if_nonfinite: whether a norm that is NaN or infinite is an error.

        Returns:
            The norm before, shape (), on the CPU.

        Raises:
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
            StageError: a stage raised, or its worker is lost.
        """
        context = context_id()
        found: dict[str, torch.Tensor] = {}
        for names, norms in self._stages.each("gradient_norms", context, float(norm_type)):
            found.update(zip(names, norms, strict=True))
        if not found:
            return torch.tensor(0.0)
        # In the order of the local model's parameters: the norm is the same to the last bit.
        ordered = torch.stack([found[name] for name in self._order if name in found])
        total: torch.Tensor = torch.linalg.vector_norm(ordered, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients of all stages is non-finite, "
                "so it cannot be clipped. To scale the gradients by it anyway, set "
                "error_if_nonfinite=False"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._stages.each("scale_gradients", context, factor)
        return total

    def manual_seed(self, seed: int) -> None:
        """Begin the random numbers of all stages anew.

        In training mode a stage draws from a state of its own: dropout on stage i gets the numbers
        that torch.manual_seed(seed + i) gives, whatever else its worker computes.
        """
        own = [(seed_of(seed, handle.index),) for handle in self._stages]
        self._stages.each_own("manual_seed", own)

    def get_rng_state(self) -> list[dict[str, torch.Tensor]]:
        """Return the state of each stage's random numbers, by device type, as
        torch.get_rng_state() does."""
        return self._stages.each("get_rng_state")

    def set_rng_state(self, states: Sequence[dict[str, torch.Tensor]]) -> None:
        """Take what get_rng_state() has returned, with as many stages.

        Raises:
            ValueError: `states` are those of another number of stages.
        """
        if len(states) != len(self._stages):
            raise ValueError(
                f"{len(states)} states of random numbers for {len(self._stages)} stages: with "
                "another partition use manual_seed()"
            )
        self._stages.each_own("set_rng_state", [(state,) for state in states])

    def stream_state_dict(self) -> Iterator[OrderedDict[str, Any]]:
        """Yield the state of one stage after the other, with the names of the whole module."""
        for handle in self._stages:
            yield self._stages.one(handle, "state_dict")

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
        """Write a checkpoint of the model alone; sharding.save_checkpoint() takes an optimizer too.

        The checkpoint is one of torch.distributed.checkpoint with the names of the whole module,
        and dcp.load() reads it. Each stage writes its own part. No process group is needed.

        Args:
            path: a folder that all workers and the caller share.
            overwrite: whether to replace a checkpoint that is there. The old one is gone then, even
                if writing fails.

        Raises:
            FileExistsError: there is a checkpoint already.
            StageError: a stage could not write.
            ValueError: a stage has written where the caller does not see it.
        """
        write({"": self}, {}, path, overwrite)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Take the state from a checkpoint; each stage reads its own part.

        Args:
            path: of save_checkpoint(), with any partition, or of dcp.save() of a state dict of the
                whole module.

        Raises:
            StageError: there is no checkpoint, a name is missing in it, or a size differs. Other
                stages may have been loaded.
        """
        self._stages.each("read_checkpoint", os.fspath(path), "")

    def checkpoint_handles(self) -> Handles[StageHandle]:
        """Return the stages."""
        return self._stages

    def train(self, mode: bool = True) -> ShardedModule:
        """Set all stages to training or evaluation."""
        super().train(mode)
        self._stages.each("train", mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> ShardedModule:
        """As nn.Module.to, on all stages; a device is the one of that name on each worker."""
        self._devices = self._stages.each("to", args, kwargs)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the .grad of all parameters.

        Gradients in a distributed autograd context end with the context.
        """
        self._stages.each("zero_grad", set_to_none)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedModule:
        """Set whether the parameters of all stages get gradients."""
        self._stages.each("requires_grad_", requires_grad)
        return self

    def apply(self, fn: Any) -> NoReturn:
        """Raise an error: the submodules are elsewhere, and the function would not reach them.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the submodules are on other workers: call apply() on the module before shard()"
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: the parameters are elsewhere, and an optimizer here would have none.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the parameters are on other workers: use ShardedOptimizer(torch.optim.Adam, model), "
            "or DistributedOptimizer with remote_parameters()"
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

    def _waited_for(self, made: list[Any], error: Exception) -> StageHandle:
        """Return the stage that an error is about.

        After a time-out it is the first stage that has not returned. A stage whose input is on a
        stopped worker cannot name that worker: the stage does not begin, because torch first asks
        the owner of an RRef about each new holder.

        Args:
            made: RRefs of what the stages return, up to the stage that gave no result.
            error: what came in place of its result.
        """
        if isinstance(error, errors.CallTimeoutError):
            for handle, result in zip(self._stages, made, strict=False):
                if not result._get_future().done():
                    return handle
        return self._stages[len(made) - 1]

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
                missing = self._stages.one(handle, "load_state_dict", part, assign)
            except StageError as error:
                error_msgs.append(str(error))
            else:
                missing_keys += [prefix + key for key in missing]
        if strict:
            given = {key for key in state_dict if key.startswith(prefix)}
            unexpected_keys += sorted(given - expected)
