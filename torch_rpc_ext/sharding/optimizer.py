"""An optimizer of a sharded module: a torch.optim.Optimizer whose parameters are on the stages."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import autograd as _untyped_autograd
from torch.distributed import rpc as _untyped_rpc
from torch.utils import _pytree as pytree

from torch_rpc_ext.sharding import gradients, stage_optimizer
from torch_rpc_ext.sharding.exact import exact
from torch_rpc_ext.sharding.failures import Failure
from torch_rpc_ext.sharding.handles import Handle, Handles
from torch_rpc_ext.sharding.module import ShardedModule
from torch_rpc_ext.sharding.saving import SavedByStages
from torch_rpc_ext.sharding.stage_optimizer import Options, only_options

__all__ = ["ShardedOptimizer"]

logger = logging.getLogger(__name__)
# Upstream's functions have no types.
rpc: Any = _untyped_rpc
dist_autograd: Any = _untyped_autograd


class ShardedOptimizer(torch.optim.Optimizer, SavedByStages):
    """An optimizer of a sharded module; each stage has an optimizer of its own parameters.

    ::

        optimizer = sharding.ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        for x, y in batches:
            optimizer.zero_grad()
            pipeline.forward_backward(x, y)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
        sharding.save_checkpoint({"model": model, "optimizer": optimizer}, folder)

    The caller has the options: ``param_groups`` are those of the local optimizer, except that
    ``params`` are stand-ins of the right shape without values. What the caller changes in the
    groups, a learning rate for example, goes to the stages at the next step(). What an optimizer
    itself writes to its groups, as Schedule-Free counts its steps there, stays on the stages;
    state_dict() gets it into ``param_groups``, where all stages have the same. Methods that call
    the stages raise StageError when a stage raises or its worker is lost.

    Thread Safety: one thread at a time.

    Args:
        optimizer_class: of torch.optim, or another class that takes parameter groups and options.
        model: from shard().
        param_groups: parameter groups as torch.optim takes them, except that "params" are names of
            parameters, those of the local model's named_parameters(); None for all parameters.
        **options: for ``optimizer_class``.

    Raises:
        ValueError: a name that the model does not have or that is named twice, an option out of
            range, or a class whose step() needs a closure (LBFGS).
        TypeError: `model` is something else, such as its parameters.
        StageError: the optimizer of a stage could not be made.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        model: ShardedModule,
        *,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        if _needs_closure(optimizer_class):
            raise ValueError(
                f"step() of {optimizer_class.__name__} needs a closure, which the stages cannot "
                "call: choose another optimizer."
            )
        if not isinstance(model, ShardedModule):
            raise TypeError(
                "ShardedOptimizer takes the model that shard() has returned, not its parameters; "
                f"got {type(model).__name__}"
            )
        described = model.stages.each("describe_parameters")
        by_stage = [[name for name, _, _ in part] for part in described]
        known = {
            name: nn.Parameter(torch.zeros((), dtype=dtype).expand(shape), requires_grad=False)
            for name, shape, dtype in itertools.chain(*described)
        }
        if param_groups is None:
            param_groups = [{"params": sorted(known, key=model.order.index)}]
        self._names = _names(param_groups, known)
        # The class itself checks the options and adds those that are not given.
        local = optimizer_class(
            [
                {**group, "params": [known[name] for name in names]}
                for group, names in zip(param_groups, self._names, strict=True)
            ],
            **options,
        )
        self._complete = False
        self._stages_have: list[Options] = []  # of the options that the caller has set
        super().__init__(local.param_groups, local.defaults)
        self._complete = True
        self.model = model
        self._placeholders = known
        self._by_stage = by_stage
        self._parts = self._create(optimizer_class, options)
        self._stages_have_all()

    def step(self, context_id: int | None = None) -> None:  # type: ignore[override]
        """Update the parameters of all stages by their gradients.

        Args:
            context_id: of the distributed autograd context that has the gradients, as
                DistributedOptimizer.step() takes it. None for the context in which this is called;
                outside of a context for the .grad of the parameters.

        Raises:
            RuntimeError: there is no such context.
            StageError: a stage raised, or its worker is lost; others may have been updated.
            TypeError: `context_id` is a closure.
        """
        if callable(context_id):
            raise TypeError(
                "step() takes no closure, which the stages cannot call: run forward and backward "
                "before step(), and call step() without arguments"
            )
        self._parts.each("step", _source(context_id), self._changed())
        self._stages_have_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the .grad of the parameters.

        Gradients in a distributed autograd context end with the context.
        """
        self._parts.each("zero_grad", set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return what the local optimizer's state_dict() would, tensors on the CPU.

        The caller then holds the state of all stages; save_checkpoint() does without.
        """
        parts = self._parts.each("state", self._changed())
        self._take_over([options for _, options in parts])
        states = dict(itertools.chain(*(part.items() for part, _ in parts)))
        self.state.update(
            (self._placeholders[name], states[name])
            for name in itertools.chain(*self._names)
            if name in states
        )
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state that state_dict() has returned, also for another partition of the model, or
        the state_dict() of the local optimizer."""
        super().load_state_dict(state_dict)
        try:
            names: dict[Any, str] = {one: name for name, one in self._placeholders.items()}
            states = {names[one]: state for one, state in self.state.items()}
            own = [
                ({name: states[name] for name in part if name in states},)
                for part in self._by_stage
            ]
            self._parts.each_own("load_state", own)
        finally:
            self.state.clear()
            self._stages_have = [{} for _ in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error, except within the constructor.

        Raises:
            RuntimeError: always.
        """
        if self._complete:
            raise RuntimeError("give all parameter groups to the constructor, as param_groups=")
        super().add_param_group(param_group)

    def unscale(self, factor: float) -> bool:
        """Multiply all gradients by a number in place; return whether all were finite before.

        ShardedGradScaler calls this.
        """
        return all(self._parts.each("unscale", gradients.context_id(), factor))

    def checkpoint_handles(self) -> Handles[Handle]:
        """Return the parts of the stages."""
        return self._parts

    def checkpoint_arguments(self) -> tuple[Any, ...]:
        """Return what the stages' plan_checkpoint() takes besides path and key."""
        return (self._changed(),)

    def checkpoint_read(self, read: Sequence[Any]) -> None:
        """Set the options of the parameter groups to those of a checkpoint, where all stages have
        the same.

        Args:
            read: what read_checkpoint() has returned on each stage.

        Raises:
            ValueError: parameters of one group on one stage have different options in the
                checkpoint.
        """
        parts = []
        for part in read:
            first: dict[int, tuple[str, Options]] = {}
            for index, name, options in part:
                other, expected = first.setdefault(index, (name, options))
                if not _same(options, expected):
                    raise ValueError(
                        f"{other} and {name} are in one parameter group, but in the checkpoint "
                        "they have different options"
                    )
            parts.append({index: options for index, (_, options) in first.items()})
        self._take_over(parts)

    def _changed(self) -> list[Options]:
        """Return the options that the caller has changed, for each group."""
        return [
            {
                name: value
                for name, value in only_options(group).items()
                if name not in had or not _same(value, had[name])
            }
            for group, had in zip(self.param_groups, self._stages_have, strict=True)
        ]

    def _stages_have_all(self) -> None:
        """Note that the stages have all options as they are here."""
        # Copies, because a scheduler changes a learning rate that is a tensor in place.
        self._stages_have = copy.deepcopy([only_options(group) for group in self.param_groups])

    def _take_over(self, parts: Sequence[Mapping[int, Options]]) -> None:
        """Take over the options about which all stages agree.

        Args:
            parts: of each stage, the options of its groups, by index.
        """
        for index, group in enumerate(self.param_groups):
            first, *others = [part[index] for part in parts if index in part] or [{}]
            for name, value in first.items():
                if not all(name in other and _same(value, other[name]) for other in others):
                    logger.warning(
                        "parameter group %d: the stages have different values of %r, which the "
                        "optimizer itself writes: state_dict() does not have them, as a "
                        "checkpoint by save_checkpoint() has",
                        index,
                        name,
                    )
                elif not (name in group and _same(value, group[name])):
                    group[name] = value
        self._stages_have_all()

    def _create(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        options: dict[str, Any],
    ) -> Handles[Handle]:
        given = [only_options(group) for group in self.param_groups]
        made = []
        for handle, own in zip(self.model.stages, self._by_stage, strict=True):
            groups = [
                stage_optimizer.Group(index, kept, given[index])
                for index, names in enumerate(self._names)
                if (kept := [name for name in names if name in set(own)])
            ]
            arguments = (handle.rref, optimizer_class, groups, options)
            try:
                with exact():
                    rref = rpc.rpc_sync(handle.place.worker, stage_optimizer.create, args=arguments)
            except Exception as error:
                raise handle.lost(error) from error
            if isinstance(rref, Failure):
                raise rref.error()
            made.append(Handle(handle.index, handle.place, rref))
        return Handles(made, self.model.timeout)


def _needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    parameters = inspect.signature(optimizer_class.step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


def _source(context_id: int | None) -> int | None:
    if context_id is None:
        return gradients.context_id()
    dist_autograd.get_gradients(context_id)  # raises where there is no such context
    return context_id


def _same(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, also where they hold tensors."""
    one, of_one = pytree.tree_flatten(one)
    other, of_other = pytree.tree_flatten(other)
    return bool(of_one == of_other) and all(map(_equal, one, other))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def _names(groups: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of the parameters of each group."""
    found: list[list[str]] = []
    seen: set[str] = set()
    for index, group in enumerate(groups):
        names = group["params"]
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if not isinstance(name, str) or name not in known:
                raise ValueError(
                    f"param_groups[{index}] names {name!r}, which is no parameter of the model: "
                    f"give names as in {', '.join(list(known)[:3])}"
                )
            if name in seen:
                raise ValueError(f"param_groups[{index}] names {name!r}, which is named before")
            seen.add(name)
        found.append(names)
    return found
