"""The random numbers of a stage.

Layers such as nn.Dropout draw from the generator of the process or the device, which all threads
share. Two stages of one worker would get other numbers each time, depending on which thread comes
first. So each stage has a state of its own, which is the state of the generators while the stage
computes, and stages of one worker compute one at a time. Other code of the worker that draws
meanwhile, in another thread, draws from the stage's numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

__all__ = ["RandomNumbers", "seed_of"]

# Held while the generators of this process have the state of a stage. Reentrant, because a layer
# may run another stage of this worker by a call to itself.
_TURN = threading.RLock()
_PATIENCE = 0.1  # time between two calls of `check` while a stage waits for its turn, s


class RandomNumbers:
    """The state of the random numbers of one stage: of the CPU, and of the stage's device.

    Thread Safety: any thread.
    """

    def __init__(self, device: str, seed: int) -> None:
        self._device = torch.device(device)
        self._seed = seed
        self._states: dict[str, torch.Tensor] = {}

    def manual_seed(self, seed: int) -> None:
        """Begin anew, as torch.manual_seed() does."""
        with _TURN:
            self._seed = seed
            self._states.clear()

    def move(self, device: str) -> None:
        """Use the generator of another device from now on."""
        with _TURN:
            self._device = torch.device(device)

    def get(self) -> dict[str, torch.Tensor]:
        """Return the state by device type, each as torch.get_rng_state() returns it."""
        with _TURN:
            return {kind: self._state(one).clone() for kind, one in self._generators().items()}

    def set(self, states: dict[str, torch.Tensor]) -> None:
        """Take what get() has returned; of devices that the stage is not on, too."""
        with _TURN:
            self._states.update({kind: state.cpu().clone() for kind, state in states.items()})

    @contextlib.contextmanager
    def turn(self, check: Callable[[], None] | None = None) -> Iterator[None]:
        """Draw from this state within the block.

        Args:
            check: called again and again while another stage of this worker computes; may raise.
        """
        while not _TURN.acquire(timeout=_PATIENCE):
            if check is not None:
                check()
        try:
            generators = self._generators()
            others = {kind: one.get_state() for kind, one in generators.items()}
            try:
                for one in generators.values():
                    one.set_state(self._state(one))
                yield
            finally:
                for kind, one in generators.items():
                    self._states[kind] = one.get_state()
                    one.set_state(others[kind])
        finally:
            _TURN.release()

    def _generators(self) -> dict[str, torch.Generator]:
        found = {"cpu": torch.default_generator}
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            index = module.current_device() if self._device.index is None else self._device.index
            known = getattr(module, "default_generators", ())
            if index < len(known):
                found[self._device.type] = known[index]
        return found

    def _state(self, generator: torch.Generator) -> torch.Tensor:
        kind = generator.device.type
        if kind not in self._states:
            fresh = torch.Generator(generator.device).manual_seed(self._seed)
            self._states[kind] = fresh.get_state()
        return self._states[kind]


def seed_of(seed: int, stage: int) -> int:
    """Return the seed of a stage, 0 the first, given that of the whole model."""
    return (seed + stage) % 2**63
