"""A3C among the applications: what is run, and the paper's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.applications.a3c.model import A3cJob
from benchmarks.applications.interface import SOCKETS_ONLY, Application, Job, Metric, Plot

_CARTPOLE = "CartPole-v1"
_SOLVED = 475.0  # as gymnasium says
_ATARI = "ALE/Pong-v5"
# By number of actors, with gRPC, with CPU RPC; ms.
_PAPER = {
    "fetch": {1: ("38 to 47 ms", "8 to 9 ms"), 15: ("89 ms", "33 ms")},
    "update": {1: ("84 to 92 ms", "53 to 55 ms"), 15: ("1025 ms", "1638 ms")},
}
_ACTORS = (1, 3, 7, 11, 15)
_SECONDS_OF_PLAY = 0.05  # so that the learner alone never is what all wait for


_REMARKS = """\
Each actor, a process of its own, fetches the global network from the learner, plays five steps of
Pong (twenty of CartPole) with it, computes gradients and sends them; the learner applies them with
the network's optimizer, one actor at a time. CartPole shows that it learns: a run ends when the
last 100 episodes have a mean reward of 475, which gymnasium calls solved. Pong shows the delays:
the network is that of the A3C paper (Mnih et al., 2016), which goes each way as a whole.

What differs from the paper: the game, which the paper does not name; all processes are on one host,
with fewer cores than actors. So the delays of actors that play are mostly those of waiting for a
core. And an actor does one thing after the other: where the fetch is short, more actors are at the
update at once, and wait there for each other and for cores. So fetch and update are to be looked at
together, and with them frames per second. In the last case the actors wait 50 ms instead of
playing, as if each had a core of its own elsewhere: that is the delay of the communication and of
the learner. gRPC sends the bytes of tensors, without pickle, through a Unix socket, so it is faster
here than a program that pickles.

In the paper CPU RPC lost to gRPC in updates by 15 actors (1638 ms to 1025 ms). Here, on a quiet
machine, it does not: in Pong, TENSORPIPE's updates are shorter than gRPC's with any number of
actors. So what slowed it there was not found here, and only a part can be shown. In each process on
TENSORPIPE a thread, TP_SHM_reactor, polls shared memory while nothing comes ("An idle process",
below, has what it takes), and with more processes than cores these threads compete with those that
play and update. The column "tensorpipe, sockets" is TENSORPIPE told to leave shared memory alone
(`_transports=["uv"]`): that thread is gone, and fetches are shorter. Updates by actors that play
are not, so the thread does not explain those. UCX has no such thread.

What is not ahead on UCX, and why: waiting for other updates, with 11 and 15 actors, because actors
that fetch faster meet at the update; and in the last case the optimizer's step, which is the same
code, as it is longer on gRPC and on TENSORPIPE without the polling thread, which keeps the
learner's core awake. How many seconds CartPole takes is mostly luck, that is, how many steps it
needs; steps per second are not.
"""


class A3c(Application):
    """The paper's video game solver."""

    name = "a3c"
    title = "A3C, a solver of video games"
    metrics = {
        "fetch": Metric("fetch of the global network"),
        "update": Metric("update of the global network"),
        "wait": Metric("fetch and update together"),
        "lock": Metric("of it: waiting for other updates"),
        "step": Metric("of it: the optimizer's step"),
        "way": Metric("of it: the way there and back, mean"),
        "frames": Metric("frames of the game per second", "1/s"),
        "cpu": Metric("cores that an actor keeps busy", ""),
        "bytes": Metric("the global network", "B"),
        "reward": Metric("reward, the last 100 episodes", "", is_spread=True),
        "steps": Metric("steps of all actors", "", is_spread=True),
        "seconds": Metric("seconds", "s", is_spread=True),
        "speed": Metric("steps per second", "1/s", is_spread=True),
    }
    remarks = _REMARKS
    plots = (Plot(("fetch", "update", "frames"), "actors", {f"pong-{n}": n for n in _ACTORS}),)
    paper_lines = {"rpc": 10, "rpc on CUDA": 12, "grpc": 52, "grpc, generated": 270}

    def jobs(self, *, small: bool) -> Sequence[Job]:
        return list(_small() if small else _full())

    def shown(self, job: Job) -> Sequence[str]:
        assert isinstance(job, A3cJob)
        if job.name.startswith("cartpole"):
            return ("reward", "steps", "seconds", "speed", "fetch", "update")
        rest = ("fetch", "update", "lock", "step", "way", "wait", "cpu")
        return rest if job.wait else ("bytes", "frames", *rest)

    def paper(self, job: Job, metric: str) -> str:
        assert isinstance(job, A3cJob)
        if not job.game.startswith("ALE/"):
            return ""
        of_actors = _PAPER.get(metric, {})
        by_grpc, by_rpc = of_actors.get(1 if job.actors <= 7 else job.actors, ("", ""))
        return f"gRPC {by_grpc}, CPU RPC {by_rpc}" if by_rpc else ""


def _small() -> Iterator[Job]:
    one = A3cJob(
        name="cartpole-one",
        title="CartPole, 1 actor, 40 updates",
        game=_CARTPOLE,
        packages=("gymnasium",),
        actors=1,
        processes=2,
        updates=40,
        rate=2e-3,
        steps=20,
    )
    yield one
    yield replace(
        one,
        name="cartpole-learns",
        title="CartPole, 3 actors, 600 updates",
        actors=3,
        processes=4,
        updates=600,
    )


def _full() -> Iterator[Job]:
    yield A3cJob(
        name="cartpole",
        title="CartPole, 4 actors",
        game=_CARTPOLE,
        packages=("gymnasium",),
        actors=4,
        processes=5,
        rounds=10,  # each with a seed of its own
        updates=20_000,
        seconds=180,
        solved=_SOLVED,
        rate=2e-3,
        steps=20,
    )
    for actors in _ACTORS:
        yield _pong(f"pong-{actors}", f"Pong, {actors} actor{'s' * (actors > 1)}", actors)
    waits = _pong("pong-15-wait", "Pong, 15 actors that wait 50 ms instead of playing", 15)
    yield replace(waits, wait=_SECONDS_OF_PLAY)


def _pong(name: str, title: str, actors: int) -> A3cJob:
    return A3cJob(
        name=name,
        title=title,
        game=_ATARI,
        packages=("gymnasium", "ale_py"),
        actors=actors,
        processes=actors + 1,
        seconds=5,
        more_ways=(SOCKETS_ONLY,) if actors == max(_ACTORS) else (),
        rounds=3,
    )
