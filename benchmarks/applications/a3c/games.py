"""The games of A3C, by gymnasium: CartPole, and Atari games as A3C's authors show them to a
network."""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

_SIDE = 84  # of a picture, pixels
_PICTURES = 4  # that the network sees at once
FRAMES_A_STEP = 4  # an action is held for so many frames of an Atari game


class Game(Protocol):
    """What an actor plays."""

    actions: int

    def reset(self) -> Tensor:
        """Begin an episode; returns what is seen."""

    def step(self, action: int) -> tuple[Tensor, float, bool, bool]:
        """Act; returns what is seen, the reward, whether the episode has ended, and whether only
        because its time is over."""


def make(name: str, seed: int) -> Game:
    """Return a game by its name in gymnasium."""
    return Atari(name, seed) if name.startswith("ALE/") else Vector(name, seed)


def is_atari(name: str) -> bool:
    return name.startswith("ALE/")


class Vector:
    """A game that shows a few numbers."""

    def __init__(self, name: str, seed: int) -> None:
        gymnasium: Any = importlib.import_module("gymnasium")
        self.game = gymnasium.make(name)
        self.actions = int(self.game.action_space.n)
        self.game.reset(seed=seed)

    def reset(self) -> Tensor:
        return _numbers(self.game.reset()[0])

    def step(self, action: int) -> tuple[Tensor, float, bool, bool]:
        seen, reward, failed, late, _ = self.game.step(action)
        return _numbers(seen), float(reward), bool(failed or late), bool(late and not failed)


class Atari:
    """A game of the Atari 2600: the last four pictures, grey, 84 by 84, bytes."""

    def __init__(self, name: str, seed: int) -> None:
        gymnasium: Any = importlib.import_module("gymnasium")
        ale_py: Any = importlib.import_module("ale_py")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # or it greets
        gymnasium.register_envs(ale_py)
        self.game = gymnasium.make(name, obs_type="grayscale", frameskip=FRAMES_A_STEP)
        self.actions = int(self.game.action_space.n)
        self.pictures: deque[Tensor] = deque(maxlen=_PICTURES)
        self.game.reset(seed=seed)

    def reset(self) -> Tensor:
        first = _picture(self.game.reset()[0])
        self.pictures.extend([first] * _PICTURES)
        return torch.stack(list(self.pictures))

    def step(self, action: int) -> tuple[Tensor, float, bool, bool]:
        seen, reward, failed, late, _ = self.game.step(action)
        self.pictures.append(_picture(seen))
        # Rewards are cut to -1, 0 and 1: so one learning rate does for all games.
        cut = float(reward > 0) - float(reward < 0)
        pictures = torch.stack(list(self.pictures))
        return pictures, cut, bool(failed or late), bool(late and not failed)


def _numbers(seen: Any) -> Tensor:
    return torch.as_tensor(seen, dtype=torch.float32)


def _picture(seen: Any) -> Tensor:
    grey = torch.from_numpy(seen)[None, None].float()
    return functional.interpolate(grey, (_SIDE, _SIDE), mode="area")[0, 0].byte()
