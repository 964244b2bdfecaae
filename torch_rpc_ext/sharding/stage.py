"""A stage, the part of a module that one worker has. This code runs on that worker."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext._group import sessions
from torch_rpc_ext.sharding import autocast, checkpoint, cutting, device_maps, gradients, tensors
from torch_rpc_ext.sharding.failures import Failure
from torch_rpc_ext.sharding.placement import Place
from torch_rpc_ext.sharding.random_numbers import RandomNumbers

__all__ = [
    *("Request", "Resident", "Saved", "Spec", "Stage"),
    *("call", "create", "forward", "own_value", "part_of"),
]

rpc: Any = _untyped_rpc  # upstream's functions have no types

# What torch calls the result of a module's get_extra_state() in a state dict.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Spec:
    """The description from which a worker makes a stage.

    Attributes:
        index: of the stage, from 0.
        place: worker and device of the stage.
        module: holds the submodules of the stage under their names in the whole module.
        names: of these submodules, in the order in which they run.
        before: name of the worker of the stage before; None for the first.
        seed: of the stage's random numbers.
    """

    index: int
    place: Place
    module: nn.Module
    names: list[str]
    before: str | None
    seed: int


class Resident:
    """An object that never leaves its worker, where RRefs refer to it."""

    def __reduce__(self) -> Any:
        # Torch pickles the value of an RRef to find its tensors, and refuses those on devices that
        # the options do not name. So the pickle has none.
        return _refuse, (type(self).__name__,)

    def __setstate__(self, state: Any) -> None:
        # Without this, a worker that writes pickles by hand could make a Stage of any attributes.
        _refuse(type(self).__name__)


class Saved(Resident):
    """Something of a stage that has a part in checkpoints; see checkpoint.py.

    Attributes:
        remote: names of the methods that call() calls for other workers.
    """

    remote: ClassVar[frozenset[str]] = frozenset(
        {"plan_checkpoint", "read_checkpoint", "write_checkpoint"}
    )

    def __init__(self) -> None:
        self._writer: checkpoint.Writer | None = None
        session = sessions.current()
        # Kept, because a request of a peer may outlive the session.
        self._allowed = None if session is None else session.allowed

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what is saved, by its name in the checkpoint."""
        raise NotImplementedError

    def _reader(self, path: str) -> checkpoint.Reader:
        """Return the reader of a checkpoint whose path a peer has given."""
        return checkpoint.Reader(path, self._allowed)

    def plan_checkpoint(self, path: str, key: str) -> Any:
        """First half of saving: return the plan of what would be written.

        Args:
            path: of the checkpoint.
            key: that is put before the names, with a dot; empty for none.
        """
        self._writer = checkpoint.Writer(path)
        return self._writer.plan(_under(key, self.checkpoint_state()))

    def write_checkpoint(self, plan: Any) -> Any:
        """Second half of saving: write what the plan says; return DCP's results of writing."""
        assert self._writer is not None, "plan_checkpoint() comes first"
        writer, self._writer = self._writer, None
        return writer.write(plan)


class Stage(Saved):
    """The submodules of a stage on their device.

    Owns: the submodules. Thread Safety: any thread, as far as the submodules allow it; in training
    mode one thread at a time, together with the other stages of this worker.
    """

    remote = Saved.remote | {
        *("describe_parameters", "get_rng_state", "gradient_norms", "load_state_dict"),
        *("manual_seed", "parameters", "requires_grad_", "scale_gradients", "set_rng_state"),
        *("state_dict", "to", "train", "zero_grad"),
    }

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.index, self.place, self.names = spec.index, spec.place, spec.names
        self.device = spec.place.device
        self.module = spec.module.to(self.device)
        self._random = RandomNumbers(self.device, spec.seed)
        #: Held while other gradients are in .grad (gradients.collected_in()).
        self.grads = threading.Lock()
        self._is_checked = False

    @contextlib.contextmanager
    def turn(self, check: Callable[[], None] | None = None) -> Iterator[None]:
        """Compute within the block, forward or backward; in training mode with the stage's own
        random numbers.

        Args:
            check: called again and again while another stage of this worker computes; may raise.
        """
        if any(part.training for part in self.module.modules()):
            with self._random.turn(check):
                yield
        else:  # nothing is drawn, so that many threads can compute at once
            yield

    def forward(self, value: Any) -> Any:
        """Run the submodules on a value whose tensors may be on any device."""
        moved = tensors.moved(value, self.device)
        return cutting.run_chain(self.module, self.names, moved)

    def forward_for_autograd(self, value: Any) -> Any:
        """As forward(), for a backward of distributed autograd.

        Raises:
            RuntimeError: a layer computes its activations again in a way that loses gradients.
        """
        made = self.forward(value)
        # Walking the graph takes time, and layers do the same each time in one mode.
        if not self._is_checked and gradients.has_reentrant_checkpoint(tensors.leaves(made)):
            raise RuntimeError(
                "a layer calls torch.utils.checkpoint.checkpoint() with use_reentrant=True, whose "
                "gradients do not come to a distributed autograd context: pass "
                "use_reentrant=False, or use a Pipeline"
            )
        self._is_checked = True
        return made

    def parameters(self) -> list[Any]:
        """Return an RRef of each parameter."""
        return [rpc.RRef(parameter) for parameter in self.module.parameters()]

    def describe_parameters(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        """Return name, shape and dtype of each parameter."""
        return [(name, one.shape, one.dtype) for name, one in self.module.named_parameters()]

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state, with the names of the whole module, on the CPU."""
        state: Any = self.module.state_dict()
        for name, value in state.items():
            state[name] = tensors.for_the_wire(value)
        found: OrderedDict[str, Any] = state
        return found

    def load_state_dict(self, state: OrderedDict[str, Any], assign: bool) -> list[str]:
        """Load the stage's part of a state; return the names that are missing in it."""
        missing: list[str] = self.module.load_state_dict(
            state, strict=False, assign=assign
        ).missing_keys
        return missing

    def train(self, mode: bool) -> None:
        """As nn.Module.train."""
        self.module.train(mode)
        self._is_checked = False

    def zero_grad(self, set_to_none: bool) -> None:
        """As nn.Module.zero_grad."""
        self.module.zero_grad(set_to_none)

    def requires_grad_(self, requires_grad: bool) -> None:
        """As nn.Module.requires_grad_."""
        self.module.requires_grad_(requires_grad)

    def to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """As nn.Module.to; a device is a device of this worker. Returns the stage's device."""
        self.module.to(*args, **kwargs)
        self.device = str(torch.empty(0, device=self.device).to(*args, **kwargs).device)
        self._random.move(self.device)
        return self.device

    def gradient_norms(
        self, context: int | None, norm_type: float
    ) -> tuple[list[str], torch.Tensor]:
        """Return the names of the parameters that have a gradient, and the norm of each."""
        parameters = dict(self.module.named_parameters())
        found = gradients.find(list(parameters.values()), context)
        known = [name for name, one in zip(parameters, found, strict=True) if one is not None]
        return known, gradients.norms(found, norm_type)

    def scale_gradients(self, context: int | None, factor: torch.Tensor) -> None:
        """Multiply all gradients by a number, shape (), in place."""
        for gradient in gradients.find(list(self.module.parameters()), context):
            if gradient is not None:
                gradient.mul_(factor.to(gradient.device))

    def manual_seed(self, seed: int) -> None:
        """Begin the stage's random numbers anew."""
        self._random.manual_seed(seed)

    def get_rng_state(self) -> dict[str, torch.Tensor]:
        """Return the state of the stage's random numbers, by device type."""
        return self._random.get()

    def set_rng_state(self, states: dict[str, torch.Tensor]) -> None:
        """Take what get_rng_state() has returned."""
        self._random.set(states)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the state of the submodules."""
        return dict(self.module.state_dict())

    def read_checkpoint(self, path: str, key: str) -> None:
        """Load the stage's state from a checkpoint, without reading its other parts.

        Raises:
            KeyError: a module's get_extra_state() returns a dict without keys that it had when the
                checkpoint was written: DCP reads no others than those that the dict has.
        """
        state = self.module.state_dict()
        reader = self._reader(path)
        for name, value in state.items():
            if name.rpartition(".")[2] != _EXTRA_STATE:
                continue
            full = f"{key}.{name}" if key else name
            if unread := reader.unread(full, value):
                raise KeyError(
                    "what get_extra_state() returned when the checkpoint was written has "
                    f"{', '.join(unread)}, and what it returns now has no such keys: give the "
                    "module's state these keys before loading it"
                )
        reader.read(_under(key, state))
        self.module.load_state_dict(state)


def create(spec: Spec) -> Any:
    """Make a stage on this worker.

    Returns:
        An RRef of the stage, and the devices of the stage before whose tensors this worker can
        fetch without the CPU. Or a Failure.
    """
    try:
        own = rpc.RRef(Stage(spec))
        return own, device_maps.arriving(spec.before) if spec.before else []
    except Exception as error:  # noqa: BLE001  the caller raises it
        return Failure.of(spec.index, spec.place.worker, "raised", error)


ResidentT = TypeVar("ResidentT", bound=Resident)


def own_value(rref: Any, cls: type[ResidentT]) -> ResidentT:
    """Return the value of an RRef that this worker owns.

    Raises:
        TypeError: the argument is no RRef, or its value is of another class. An allow-list that
            names this module leaves the arguments to its functions, so these check them.
    """
    given = type(rref)
    if issubclass(given, rpc.PyRRef):
        value: Any = rref.local_value()
        if issubclass(type(value), cls):
            own: ResidentT = value
            return own
        given = type(value)
    raise TypeError(f"expected an RRef of a {cls.__name__}, got a {given.__qualname__}")


def call(target: Any, method: str, *args: Any) -> Any:
    """Return what a method of an object returns, or a Failure.

    Args:
        target: RRef of a Stage or of another Saved with `index` and `place`, owned by this worker.
        method: the name of one of the methods in the `remote` of its class.
        *args: for the method.

    Raises:
        TypeError: the object is of another class, or has no such method for other workers.
    """
    own: Any = own_value(target, Saved)
    if type(method) is not str or method not in own.remote:
        raise TypeError(f"a {type(own).__name__} has no method {method!r} for other workers")
    try:
        return getattr(own, method)(*args)
    except Exception as error:  # noqa: BLE001  the caller raises it
        return Failure.of(own.index, own.place.worker, "raised", error)


@dataclass(frozen=True)
class Request:
    """How a stage runs forward for the caller.

    Attributes:
        with_grad: whether the caller records gradients.
        autocast: the caller's.
        direct: devices whose tensors stay there, for the next stage.
        timeout: for fetching the value, s; 0 for none.
    """

    with_grad: bool
    autocast: tuple[autocast.Autocast, ...]
    direct: Sequence[str]
    timeout: float


def forward(stage: Any, given: Any, request: Request) -> Any:
    """Run the stage; for rpc.remote(), so that the next stage fetches the result from here.

    Args:
        stage: RRef of the stage, owned by this worker.
        given: the value, or an RRef of what the stage before has returned.
        request: how.

    Returns:
        What the submodules return, or a Failure.

    Raises:
        TypeError: `stage` is something else.
    """
    own = own_value(stage, Stage)
    if isinstance(given, rpc.PyRRef):
        try:
            given = given.to_here(request.timeout)
        except Exception as error:  # noqa: BLE001  the caller raises it
            return Failure.of(own.index - 1, given.owner_name(), "lost", error)
    if isinstance(given, Failure):
        return given
    try:
        with torch.set_grad_enabled(request.with_grad):
            with own.turn(), autocast.entered(request.autocast, own.device):
                made = own.forward_for_autograd(given) if request.with_grad else own.forward(given)
            return tensors.for_the_wire(made, {torch.device(one) for one in request.direct})
    except Exception as error:  # noqa: BLE001  the caller raises it
        return Failure.of(own.index, own.place.worker, "raised", error)


def part_of(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return a module that holds the named submodules, not copied, under the same names."""
    part = _container(module)
    for name in names:
        *path, last = name.split(".")
        at = part
        for step in path:
            if not hasattr(at, step):
                at.add_module(step, _container(module))
            at = at.get_submodule(step)
        at.add_module(last, module.get_submodule(name))
    return part


def _container(module: nn.Module) -> nn.Module:
    made = nn.Module()
    made.training = module.training  # or a part of a module in evaluation mode would seem to train
    return made


def _under(key: str, state: dict[str, Any]) -> dict[str, Any]:
    return {key: state} if key else state


def _refuse(name: str) -> Any:
    raise TypeError(f"a {name} stays on its worker; send its RRef")
