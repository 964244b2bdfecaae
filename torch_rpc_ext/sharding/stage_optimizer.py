"""The part of an optimizer that one stage has. This code runs on the worker of the stage."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext.sharding import checkpoint, gradients, tensors
from torch_rpc_ext.sharding.failures import Failure
from torch_rpc_ext.sharding.stage import Saved, Stage, own_value

__all__ = ["Group", "StageOptimizer", "create"]

rpc: Any = _untyped_rpc  # upstream's functions have no types

#: Options of a parameter group, without its parameters.
Options = dict[str, Any]
_NO_OPTIONS = ("params", "param_names")  # of a parameter group


@dataclass(frozen=True)
class Group:
    """A stage's part of a parameter group.

    Attributes:
        index: of the group in the whole optimizer.
        names: of the parameters of this stage, in the whole module.
        options: of the group.
    """

    index: int
    names: Sequence[str]
    options: Options


class StageOptimizer(Saved):
    """An optimizer of the parameters of one stage.

    Thread Safety: any thread; one call at a time.

    Raises:
        TypeError: `optimizer_class` is another class, or something else that can be called.
    """

    remote = Saved.remote | {"load_state", "state", "step", "unscale", "zero_grad"}

    def __init__(
        self,
        stage: Stage,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Group],
        options: Options,
    ) -> None:
        super().__init__()
        if not isinstance(optimizer_class, type) or not issubclass(
            optimizer_class, torch.optim.Optimizer
        ):
            raise TypeError(
                "optimizer_class must be a class of torch.optim.Optimizer, "
                f"got {optimizer_class!r:.200}"
            )
        self.index, self.place = stage.index, stage.place
        self._stage, self._groups = stage, groups
        self._lock = threading.Lock()
        known = dict(stage.module.named_parameters())
        self._named = {name: known[name] for group in groups for name in group.names}
        # Without parameters there is nothing to do, and torch refuses to make an optimizer.
        self._optimizer = (
            optimizer_class(
                [
                    {**group.options, "params": [known[name] for name in group.names]}
                    for group in groups
                ],
                **options,
            )
            if groups
            else None
        )

    def step(self, context: int | None, options: Sequence[Options]) -> None:
        """Update the parameters.

        Args:
            context: id of the distributed autograd context that has the gradients; None for .grad.
            options: for each group of the whole optimizer, those that the caller has changed.
        """
        if self._optimizer is None:
            return
        with self._lock:
            self._take(options)
            if context is None:
                self._optimizer.step()
                return
            parameters = list(self._named.values())
            found = gradients.find(parameters, context)
            with self._stage.grads, gradients.collected_in(found, parameters):
                self._optimizer.step()

    def zero_grad(self, set_to_none: bool) -> None:
        """As torch.optim.Optimizer.zero_grad."""
        if self._optimizer is not None:
            with self._lock:
                self._optimizer.zero_grad(set_to_none)

    def unscale(self, context: int | None, factor: float) -> bool:
        """Multiply the gradients by a number in place; return whether all were finite."""
        with self._lock, torch.no_grad():
            return gradients.unscale(gradients.find(list(self._named.values()), context), factor)

    def state(self, options: Sequence[Options]) -> tuple[dict[str, Any], dict[int, Options]]:
        """Return the state of each parameter that has one, by name; and the options of each group
        that this stage has, by index. All tensors are on the CPU.

        Args:
            options: as for step().
        """
        with self._lock:
            self._take(options)
            states = {name: tensors.for_the_wire(state) for name, state in self._states().items()}
            kept = {
                group.index: tensors.for_the_wire(only_options(own))
                for own, group in self._own_groups()
            }
            return states, kept

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Take the state of each parameter, by name; parameters that are not named have none."""
        if self._optimizer is None:
            return
        with self._lock:
            packed = self._optimizer.state_dict()
            order = [name for group in self._groups for name in group.names]
            packed["state"] = {
                index: states[name] for index, name in enumerate(order) if name in states
            }
            self._optimizer.load_state_dict(packed)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the state under the names that torch.distributed.checkpoint's state_dict functions
        give an optimizer with flatten_optimizer_state_dict=True."""
        with self._lock:
            found = {
                f"state.{name}.{path}": value
                for name, state in self._states().items()
                for path, value in checkpoint.flat(state).items()
            }
            for own, group in self._own_groups():
                for name in group.names:
                    for option, value in only_options(own).items():
                        found[f"param_groups.{name}.{option}"] = value
            return found

    def plan_checkpoint(self, path: str, key: str, options: Sequence[Options] = ()) -> Any:
        """As Saved.plan_checkpoint(), with options as for step()."""
        with self._lock:
            self._take(options)
        return super().plan_checkpoint(path, key)

    def read_checkpoint(self, path: str, key: str) -> list[tuple[int, str, Options]]:
        """Load the stage's state from a checkpoint; return the options of each parameter: index of
        its group, its name, and the options.

        Raises:
            KeyError: the checkpoint has no parameter of this name in an optimizer's state.
        """
        before = f"{key}." if key else ""
        reader = self._reader(path)
        states, options = f"{before}state.", f"{before}param_groups."
        # A name may be the beginning of another one, so names are looked for with their dots.
        own = [
            entry
            for entry in reader.names()
            for name in self._named
            if entry.startswith((f"{states}{name}.", f"{options}{name}."))
        ]
        found = reader.read_named(own)
        missing = [
            name
            for name in self._named
            if not any(entry.startswith(f"{options}{name}.") for entry in own)
        ]
        if missing:
            raise KeyError(
                f"the checkpoint has no state of an optimizer of {', '.join(missing)} under "
                f"{key or 'the names that save_checkpoint() gives'!r}"
            )
        loaded = {name: _nested(found, f"{states}{name}.") for name in self._named}
        self.load_state({name: state for name, state in loaded.items() if state})
        with self._lock:
            for kept, group in self._own_groups():
                kept.update(_nested(found, f"{options}{group.names[0]}."))
        return [
            (group.index, name, _nested(found, f"{options}{name}."))
            for group in self._groups
            for name in group.names
        ]

    def _take(self, options: Sequence[Options]) -> None:
        for own, group in self._own_groups():
            own.update(options[group.index])

    def _own_groups(self) -> list[tuple[Options, Group]]:
        """Return the groups of the stage's optimizer, each with what it is made from."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return list(zip(groups, self._groups, strict=True))

    def _states(self) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        known = self._optimizer.state
        return {name: known[one] for name, one in self._named.items() if known.get(one)}


def only_options(group: Mapping[str, Any]) -> Options:
    """Return a parameter group without its parameters."""
    return {name: value for name, value in group.items() if name not in _NO_OPTIONS}


def create(
    stage: Any,
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Group],
    options: Options,
) -> Any:
    """Make a stage's part of an optimizer; return an RRef of it, or a Failure.

    Args:
        stage: RRef of the stage, owned by this worker.
        optimizer_class: of the optimizer.
        groups: the stage's parts of the parameter groups.
        options: for `optimizer_class`.

    Raises:
        TypeError: `stage` is something else.
    """
    own = own_value(stage, Stage)
    try:
        return rpc.RRef(StageOptimizer(own, optimizer_class, groups, options))
    except Exception as error:  # noqa: BLE001  the caller raises it
        return Failure.of(own.index, own.place.worker, "raised", error)


def _nested(found: Mapping[str, Any], before: str) -> dict[str, Any]:
    """Undo checkpoint.flat() for the entries whose names begin with `before`."""
    nested: dict[str, Any] = {}
    for name, value in found.items():
        if name.startswith(before):
            *path, last = name.removeprefix(before).split(".")
            at = nested
            for step in path:
                at = at.setdefault(step, {})
            at[last] = value
    return nested
