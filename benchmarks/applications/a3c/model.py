"""A3C (Mnih et al., 2016), the computation: the same for every way to communicate.

An actor plays some steps with a copy of the global network, computes gradients, and sends them to
the learner, which owns the global network and its optimizer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from benchmarks.applications.a3c import games
from benchmarks.applications.interface import Figures, Job

_EPISODES = 100  # a game is solved by the mean reward of so many


@dataclass(frozen=True, kw_only=True)
class A3cJob(Job):
    """What a run of A3C does.

    Attributes:
        game: its name in gymnasium.
        actors: how many; the learner is one process more.
        updates: of all actors together; then the run ends.
        seconds: the run ends after so many as well.
        solved: mean reward of the last 100 episodes with which the run ends.
        steps: that an actor plays for an update.
        rate: of learning; it falls to zero over the updates, as in A3C's paper.
        wait: s that an actor waits instead of playing, once it has played for its first update.
    """

    game: str = "CartPole-v1"
    actors: int = 1
    updates: int = 1_000_000
    seconds: float = 60.0
    solved: float = float("inf")
    steps: int = 5
    rate: float = 1e-4
    wait: float = 0.0


_Result = TypeVar("_Result")
Fetch = Callable[[], Sequence[Tensor]]
Update = Callable[[list[Tensor], list[float]], bool]


class Network(nn.Module):
    """Policy and value; for pictures, the one of A3C's paper without LSTM."""

    def __init__(self, game: str, seen: Tensor, actions: int) -> None:
        super().__init__()
        body: list[nn.Module] = [nn.Linear(seen.numel(), 128), nn.Tanh()]
        width = 128
        if games.is_atari(game):
            body = [nn.Conv2d(len(seen), 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU()]
            body += [nn.Flatten(), nn.Linear(32 * 9 * 9, 256), nn.ReLU()]
            width = 256
        self.body = nn.Sequential(*body)
        self.policy, self.value = nn.Linear(width, actions), nn.Linear(width, 1)
        nn.init.zeros_(self.policy.weight)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [batch, actions] and values [batch]."""
        scale = 255.0 if seen.dtype == torch.uint8 else 1.0
        hidden = self.body(seen.float() / scale)
        return self.policy(hidden), self.value(hidden).squeeze(1)


def shapes(job: A3cJob) -> list[torch.Size]:
    """Return the shapes of the global network's parameters."""
    game = games.make(job.game, job.seed)
    network = Network(job.game, game.reset(), game.actions)
    return [parameter.shape for parameter in network.parameters()]


class Learner:
    """The global network.

    Thread: calls come from several at once; updates take turns.
    """

    def __init__(self, job: A3cJob) -> None:
        game = games.make(job.game, job.seed)
        torch.manual_seed(job.seed)
        self.job, self.lock = job, threading.Lock()
        self.network = Network(job.game, game.reset(), game.actions)
        self.parameters = list(self.network.parameters())
        # RMSprop is the paper's; CartPole is learned in fewer steps with Adam.
        optimizers = torch.optim.RMSprop if games.is_atari(job.game) else torch.optim.Adam
        self.optimizer = optimizers(self.parameters, lr=job.rate)
        self.rewards: deque[float] = deque(maxlen=_EPISODES)
        self.updates, self.start, self.end = 0, float("inf"), 0.0
        self.spent: dict[str, list[float]] = {"lock": [], "step": []}

    def fetch(self) -> list[Tensor]:
        """Return the parameters as they are: an update may be half done, as in A3C."""
        return [parameter.detach() for parameter in self.parameters]

    def update(self, gradients: list[Tensor], rewards: list[float]) -> bool:
        """Apply an actor's gradients; returns whether it shall go on.

        Args:
            rewards: of the episodes that the actor has ended.
        """
        called = time.perf_counter()
        with self.lock:
            begin = time.perf_counter()
            if self._over():
                self.end = self.end or time.monotonic()
                return False
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            for group in self.optimizer.param_groups:
                group["lr"] = self.job.rate * (1 - self.updates / self.job.updates)
            self.optimizer.step()
            self.updates += 1
            if self.updates == self._uncounted():
                self.start = time.monotonic()
            self.rewards.extend(rewards)
            self.spent["lock"].append(begin - called)
            self.spent["step"].append(time.perf_counter() - begin)
            return True

    def _uncounted(self) -> int:
        # So that no actor is still on its way to its first update when the clock starts.
        return 2 * self.job.actors

    def reward(self) -> float:
        """Return the mean of the last episodes; not a number before there is one."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else float("nan")

    def _over(self) -> bool:
        is_solved = len(self.rewards) == _EPISODES and self.reward() >= self.job.solved
        late = time.monotonic() - self.start >= self.job.seconds
        return self.updates >= self.job.updates or is_solved or late

    def figures(self, reports: Sequence[Mapping[str, Sequence[float]]]) -> Figures:
        """Return what the run gave, with what the actors have measured."""
        steps = self.updates * self.job.steps
        seconds = self.end - self.start
        rate = (steps - self._uncounted() * self.job.steps) / seconds
        found: Figures = {
            key: [value for report in reports for value in report[key]]
            for key in ("fetch", "update", "cpu")
        }
        checksum = sum(float(parameter.detach().double().sum()) for parameter in self.parameters)
        frames = games.FRAMES_A_STEP if games.is_atari(self.job.game) else 1
        # Means, for those add up. What is left is the way there and back, and waiting for a thread.
        mean = {key: fmean(values) for key, values in {**found, **self.spent}.items()}
        return {
            **found,
            **self.spent,
            "wait": [
                sum(both)
                for report in reports
                for both in zip(report["fetch"], report["update"], strict=True)
            ],
            "way": [mean["update"] - mean["lock"] - mean["step"]],
            "frames": [frames * rate],
            "bytes": [float(sum(one.numel() * one.itemsize for one in self.parameters))],
            "steps": [float(steps)],
            "seconds": [seconds],
            "speed": [steps / seconds],
            "reward": [self.reward()],
            "checksum": [checksum],
        }


class Actor:
    """Plays with a copy of the global network."""

    def __init__(self, job: A3cJob, number: int) -> None:
        self.job, self.game = job, games.make(job.game, 1000 * job.seed + number)
        torch.manual_seed(1000 * job.seed + number)
        self.seen, self.total = self.game.reset(), 0.0
        self.network = Network(job.game, self.seen, self.game.actions)
        self.parameters = list(self.network.parameters())

    def gradients(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
        """Play some steps with these weights; returns gradients, and rewards of ended episodes."""
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)
        seen, actions, rewards, ended, totals = [], [], [], [], []
        for _ in range(self.job.steps):
            with torch.no_grad():
                logits, _ = self.network(self.seen[None])
            action = int(Categorical(logits=logits).sample())
            seen.append(self.seen)
            actions.append(action)
            self.seen, reward, end, late = self.game.step(action)
            self.total += reward
            if late:  # the episode would have gone on
                reward += _GAMMA * self._value()
            rewards.append(reward)
            ended.append(end)
            if end:
                totals.append(self.total)
                self.seen, self.total = self.game.reset(), 0.0
        returns, following = [], self._value()
        for reward, end in zip(reversed(rewards), reversed(ended), strict=True):
            following = reward + (0.0 if end else _GAMMA * following)
            returns.append(following)
        loss = self._loss(torch.stack(seen), torch.tensor(actions), torch.tensor(returns[::-1]))
        found = torch.autograd.grad(loss, self.parameters)
        norm = torch.stack([gradient.norm() for gradient in found]).norm()
        return [gradient * (_NORM / norm.clamp(min=_NORM)) for gradient in found], totals

    def _value(self) -> float:
        with torch.no_grad():
            return float(self.network(self.seen[None])[1])

    def _loss(self, seen: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        logits, values = self.network(seen)
        policy = Categorical(logits=logits)
        advantages = returns - values.detach()
        gained = policy.log_prob(actions) * advantages + _ENTROPY * policy.entropy()
        return _VALUE * functional.mse_loss(values, returns) - gained.mean()


_GAMMA, _ENTROPY, _VALUE, _NORM = 0.99, 0.01, 0.5, 0.5


def play(fetch: Fetch, update: Update, job: A3cJob, number: int) -> dict[str, list[float]]:
    """Be an actor until the learner says that it is enough.

    Args:
        fetch: returns the global network's parameters.
        update: Learner.update, wherever the learner is.
        number: of the actor, 0 the first.

    Returns:
        How long each fetch and each update took, s; without the first, which connects. And "cpu",
        the CPU time of this process for each second of the run.
    """
    actor, goes_on = Actor(job, number), True
    begin, begin_cpu = time.perf_counter(), time.process_time()
    times: dict[str, list[float]] = {"fetch": [], "update": []}
    made: tuple[list[Tensor], list[float]] | None = None
    while goes_on:
        weights = _timed(times["fetch"], fetch)
        if made is None or not job.wait:
            made = actor.gradients(weights)
        else:
            time.sleep(job.wait)
        gradients, rewards = made
        goes_on = _timed(times["update"], lambda g=gradients, r=rewards: update(g, r))
    cpu = (time.process_time() - begin_cpu) / (time.perf_counter() - begin)
    return {**{key: values[1:] or values for key, values in times.items()}, "cpu": [cpu]}


def _timed(times: list[float], call: Callable[[], _Result]) -> _Result:
    start = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - start)
    return result
