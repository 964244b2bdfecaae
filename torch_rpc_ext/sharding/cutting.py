"""Cutting a module into units, which run one after another, and distributing these over stages."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_rpc_ext.sharding import tensors

__all__ = ["Balance", "Partition", "cut", "is_chain", "run_chain", "split", "units"]

Balance = Literal["parameters", "time"]
#: Names of submodules per stage, or a number of units per stage.
Partition = Sequence[Sequence[str]] | Sequence[int]

_REPEATS = 3  # the shortest time counts, because other programs share the machine


def is_chain(module: nn.Module) -> bool:
    """Return whether a module's forward is nn.Sequential's: its children one after another."""
    return type(module).forward is nn.Sequential.forward


def units(module: nn.Module) -> list[str]:
    """Return the dotted names of the smallest parts that a module may be cut into, in their order.

    These are the children; a child that is a plain nn.Sequential without hooks, or an
    nn.ModuleList, is replaced by its own children.
    """
    names = []
    for name, child in _children(module):
        if type(child) is nn.ModuleList or (type(child) is nn.Sequential and not _has_hooks(child)):
            names += [f"{name}.{inner}" for inner in units(child)]
        else:
            names.append(name)
    return names


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward()."""
    return any(
        getattr(module, f"_{kind}_hooks", None)
        for kind in ("forward", "forward_pre", "backward", "backward_pre")
    )


def run_chain(module: nn.Module, names: Sequence[str], value: Any) -> Any:
    """Run the named submodules on the value, one after another; return the result."""
    for name in names:
        value = module.get_submodule(name)(value)
    return value


def cut(
    module: nn.Module,
    stages: int,
    partition: Partition | None,
    balance: Balance,
    example: Any,
) -> list[list[str]]:
    """Return the names of the submodules of each stage.

    Args:
        module: the whole module.
        stages: number of stages.
        partition: as given by the user; None for a balanced partition.
        balance: what to balance in that case.
        example: an input of the module, or None.

    Raises:
        ValueError: the module cannot be cut like this; the text names the part that is wrong.
    """
    if stages < 1:
        raise ValueError("workers is empty: name at least one")
    if partition is None:
        found = units(module)
        if len(found) < stages:
            raise ValueError(
                f"{stages} workers for {len(found)} layers ({', '.join(found) or 'none'}): "
                "name at most as many workers as there are layers"
            )
        parts = _slices(found, split(_costs(module, found, balance, example), stages))
    else:
        parts = _given(module, stages, partition)
    _check_state_is_covered(module, parts)
    _check_nothing_is_tied(module, parts)
    if is_chain(module):
        _check_order(module, parts)
    else:
        _check_is_chain(module, parts, example)
    return parts


def split(costs: Sequence[float], parts: int) -> list[int]:
    """Return the sizes of consecutive parts whose most expensive one is as cheap as possible.

    By dynamic programming over the ends of the parts; len(costs)^2 * parts steps.

    Args:
        costs: of each unit, 0 or more.
        parts: at most len(costs); no part is empty.
    """
    count = len(costs)
    until = list(itertools.accumulate(costs, initial=0.0))
    # worst[end]: the cost of the most expensive part when the first `end` units are cut best.
    worst = until[:]
    begins = []
    for part in range(2, parts + 1):
        before, worst = worst, [float("inf")] * (count + 1)
        begin_of = [0] * (count + 1)
        for end in range(part, count + 1):
            worst[end], begin_of[end] = min(
                (max(before[begin], until[end] - until[begin]), begin)
                for begin in range(part - 1, end)
            )
        begins.append(begin_of)
    sizes = []
    end = count
    for begin_of in reversed(begins):
        sizes.append(end - begin_of[end])
        end = begin_of[end]
    return [end, *reversed(sizes)]


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # Not named_children(), which leaves out the second place of a child that is used twice.
    found = module.named_modules(remove_duplicate=False)
    return [(name, child) for name, child in found if name and "." not in name]


def _slices(names: list[str], sizes: Sequence[int]) -> list[list[str]]:
    ends = list(itertools.accumulate(sizes))
    return [names[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _given(module: nn.Module, stages: int, partition: Sequence[Any]) -> list[list[str]]:
    if len(partition) != stages:
        raise ValueError(f"partition has {len(partition)} parts for {stages} workers")
    sizes = [part for part in partition if isinstance(part, int)]
    if len(sizes) == stages:
        found = units(module)
        if min(sizes) < 1 or sum(sizes) != len(found):
            raise ValueError(
                f"partition {sizes} does not cover the {len(found)} layers "
                f"({', '.join(found)}): give each part at least 1, and {len(found)} in all"
            )
        return _slices(found, sizes)
    parts = []
    for index, part in enumerate(partition):
        if isinstance(part, (int, str)) or not part:
            raise ValueError(
                f"partition[{index}] is {part!r}: name at least one submodule, as in ['0', '1']"
            )
        parts.append(list(part))
    _check_names(module, parts)
    return parts


def _check_names(module: nn.Module, parts: list[list[str]]) -> None:
    seen: dict[str, int] = {}
    for index, part in enumerate(parts):
        for name in part:
            try:
                module.get_submodule(name)
            except AttributeError:
                known = ", ".join(units(module))
                raise ValueError(
                    f"partition[{index}] names {name!r}, which the module does not have; "
                    f"it has: {known}"
                ) from None
            for other, place in seen.items():
                if _is_within(name, other) or _is_within(other, name):
                    raise ValueError(
                        f"partition overlaps: {other!r} in partition[{place}] and {name!r} in "
                        f"partition[{index}]"
                    )
            seen[name] = index


def _is_within(name: str, part: str) -> bool:
    return name == part or part == "" or name.startswith(part + ".")


def _stage_of(name: str, parts: list[list[str]]) -> int | None:
    for index, part in enumerate(parts):
        if any(_is_within(name, one) for one in part):
            return index
    return None


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _check_state_is_covered(module: nn.Module, parts: list[list[str]]) -> None:
    left = [name for name, _ in _named_tensors(module) if _stage_of(name, parts) is None]
    if left:
        raise ValueError(
            f"partition does not cover the module: {', '.join(left)} would be on no stage"
        )


def _check_nothing_is_tied(module: nn.Module, parts: list[list[str]]) -> None:
    first: dict[int, str] = {}
    for name, tensor in _named_tensors(module):
        other = first.setdefault(id(tensor), name)
        if _stage_of(other, parts) != _stage_of(name, parts):
            raise ValueError(
                f"{other} and {name} are one tensor and would be on stages "
                f"{_stage_of(other, parts)} and {_stage_of(name, parts)}: put both on one stage"
            )
    _check_no_memory_is_shared(module, parts)


def _check_no_memory_is_shared(module: nn.Module, parts: list[list[str]]) -> None:
    # `decoder.weight.data = encoder.weight.data.t()` ties two tensors as well: an optimizer that
    # changes one changes the other. On two stages each would be a copy.
    found = sorted(
        ((tensors.byte_range(tensor), name, tensor) for name, tensor in _named_tensors(module)),
        key=lambda one: one[0],
    )
    before: list[tuple[int, str, torch.Tensor]] = []  # those that may reach to the next one
    for (begin, end), name, tensor in found:
        before = [one for one in before if one[0] > begin]
        for _, other, beside in before:
            places = _stage_of(other, parts), _stage_of(name, parts)
            if places[0] != places[1] and tensors.share_memory(beside, tensor):
                raise ValueError(
                    f"{other} and {name} share memory and would be on stages {places[0]} and "
                    f"{places[1]}, which would each have a copy: put both on one stage, or give "
                    "one of them a clone() of its values"
                )
        before.append((end, name, tensor))


def _check_order(module: nn.Module, parts: list[list[str]]) -> None:
    expected = units(module)
    given = [
        unit
        for name in itertools.chain(*parts)
        for unit in (
            [f"{name}.{inner}" for inner in units(module.get_submodule(name))]
            if name not in expected
            else [name]
        )
    ]
    if given == expected:
        return
    left = [name for name in expected if name not in given]
    if left:
        raise ValueError(f"partition does not cover the module: {', '.join(left)} is on no stage")
    raise ValueError(
        f"partition changes the order of the layers: {', '.join(given)} for {', '.join(expected)}"
    )


def _check_is_chain(module: nn.Module, parts: list[list[str]], example: Any) -> None:
    if example is None:
        raise ValueError(
            f"{type(module).__name__} is no nn.Sequential, so nothing says that its forward is its "
            "parts one after another: pass example=, an input to compare both on"
        )
    names = list(itertools.chain(*parts))
    for training in (False, True):
        try:
            expected = _result(module, training, lambda: module(copy.deepcopy(example)))
        except Exception:
            if training:
                return  # an example of one row, for nn.BatchNorm1d: there is nothing to compare
            raise
        try:
            found = _result(
                module, training, lambda: run_chain(module, names, copy.deepcopy(example))
            )
            torch.testing.assert_close(found, expected, equal_nan=True)
        except Exception as problem:
            mode = " in training mode" if training else ""
            raise ValueError(
                f"the forward of {type(module).__name__} is not {' -> '.join(names)}, one after "
                f"another{mode}: give another partition, or write it as nn.Sequential ({problem})"
            ) from problem


def _result(module: nn.Module, training: bool, run: Callable[[], Any]) -> Any:
    """Run the module in evaluation or training mode. Two runs draw the same random numbers, because
    this changes neither the module nor the state of the generators."""
    devices = sorted({each.device.index for each in module.parameters() if each.is_cuda})
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with _in_mode(module, training), torch.no_grad(), torch.random.fork_rng(devices):
        try:
            return run()
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


@contextlib.contextmanager
def _in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _costs(module: nn.Module, names: list[str], balance: Balance, example: Any) -> list[float]:
    if balance == "parameters":
        return [
            float(sum(p.numel() for p in module.get_submodule(name).parameters())) for name in names
        ]
    if balance == "time":
        if example is None:
            raise ValueError("balance='time' needs example=, an input to measure with")
        return _seconds(module, names, example)
    raise ValueError(f"balance must be 'parameters' or 'time', got {balance!r}")


def _seconds(module: nn.Module, names: list[str], example: Any) -> list[float]:
    """Time of forward and backward of each unit here, s."""
    seconds = []
    value = pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), example)
    # Copies and a forked generator, so that measuring changes neither buffers nor random numbers.
    with torch.random.fork_rng(devices=[]):
        for name in names:
            unit = copy.deepcopy(module.get_submodule(name))
            times = []
            for _ in range(_REPEATS):
                given = pytree.tree_map_only(torch.Tensor, _fresh, value)
                devices = _devices(unit, given)
                _wait_for(devices)
                begin = time.perf_counter()
                made = unit(given)
                _backward(made)
                _wait_for(devices | _devices(unit, made))
                times.append(time.perf_counter() - begin)
            seconds.append(min(times))
            value = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)
    return seconds


def _devices(unit: nn.Module, value: Any) -> set[torch.device]:
    """Return the devices on which a unit may still be at work."""
    known = [*unit.parameters(), *unit.buffers(), *pytree.tree_leaves(value)]
    found = {one.device for one in known if isinstance(one, torch.Tensor)}
    return {device for device in found if device.type not in ("cpu", "meta")}


def _wait_for(devices: set[torch.device]) -> None:
    # A device works on after the call that has given it the work; the clock would not see that.
    for device in devices:
        torch.get_device_module(device).synchronize(device)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    # Not a leaf, so that a layer may change it in place.
    return tensor.detach().clone().requires_grad_().clone()


def _backward(made: Any) -> None:
    outputs = [
        leaf
        for leaf in pytree.tree_leaves(made)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
