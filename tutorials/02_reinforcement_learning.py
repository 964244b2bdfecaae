# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. Reinforcement learning: one agent, many observers
#
# **What you will learn**
#
# - to split a program into an agent that learns and observers that play, each a process, with RRefs in both directions
# - `@rpc.functions.async_execution`: one function that answers the calls of all observers at once, as a batch
# - to make such a program repeatable, so that it can be compared with a local one
# - what happens to the others when one observer dies
#
# The first notebook explains workers, `%%writefile` and `WorkerGroup`. The game is CartPole: a pole stands on a cart, and every
# 0.02 s the cart is pushed to the left or to the right. Each step that the pole stands brings a reward of 1, and after 500 steps
# the episode is over. It counts as solved with a mean reward of 475 over 100 episodes.

# %%
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed.rpc as rpc
from tqdm import tqdm

from torch_rpc_ext.launch import WorkerGroup

SMALL = False  # True: smaller sizes, for a first look
OBSERVERS = [f"observer{i}" for i in range(2 if SMALL else 4)]
torch.set_num_threads(1)  # as the workers have: sums in the same order

# Workers also print the errors that they answer with; we shall see those where they arrive.
group = WorkerGroup(["agent", *OBSERVERS], show=lambda name, line: None).start()
group.init_rpc("UCX", join="notebook")
rpc.get_worker_info()

# %% [markdown]
# ## The smallest version
#
# The agent knows what to do, the observer has the game. `play` runs on an observer and gets an RRef to the agent. It calls
# the agent's method through it, at each step: a call from one worker to another one, within a call.

# %%
# %%writefile smallest.py
import gymnasium


class Agent:
    def choose(self, state):
        return int(state[2] > 0)  # push to the side to which the pole leans


def play(agent, seed):
    """Called on an observer: one episode; returns its reward."""
    game = gymnasium.make("CartPole-v1")
    state, _ = game.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        state, reward, failed, late, _ = game.step(agent.rpc_sync().choose(state))
        total, over = total + reward, failed or late
    return total


# %%
import smallest

agent = rpc.remote("agent", smallest.Agent)
futures = [
    rpc.rpc_async(name, smallest.play, args=(agent, seed)) for seed, name in enumerate(OBSERVERS)
]
print("rewards:", [future.wait() for future in futures])

# %% [markdown]
# A fixed rule does not get far. The rest is the same with a policy that learns, and with fewer and larger calls.

# %% [markdown]
# ## The real version
#
# **The learner** is plain PyTorch and knows nothing of RPC: two small networks, trained by PPO (Schulman et al., 2017). Skip it if
# you trust it. It gets what the observers have seen as tensors [environments, ...], one row for each environment of all observers.
#
# An environment whose episode is over takes one step to start anew. That step has no meaning for learning, so it is left out
# (`real`).

# %%
# %%writefile learner.py
from typing import NamedTuple

import torch
from torch import nn
from torch.distributions import Categorical


class Seen(NamedTuple):
    """What environments show after a step, a row for each."""

    state: torch.Tensor  # [environments, 4]
    reward: torch.Tensor  # [environments]; so are those below
    failed: torch.Tensor  # the pole fell
    late: torch.Tensor  # 500 steps are over


def join(parts, combine=torch.cat):
    """Join several Seen into one, row by row."""
    return Seen(*(combine(column) for column in zip(*parts, strict=True)))


def network(outputs):
    hidden = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


class Learner:
    def __init__(self, environments, seed):
        torch.manual_seed(seed)
        self.policy, self.value = network(2), network(1)
        self.parameters = [*self.policy.parameters(), *self.value.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=2.5e-3)
        self.steps = []  # (seen, actions, their log-probabilities)
        self.over = torch.zeros(environments, dtype=torch.bool)
        self.totals = torch.zeros(environments)  # of the episodes under way

    @torch.no_grad()
    def choose(self, seen):
        """Return an action for each environment."""
        choices = Categorical(logits=self.policy(seen.state))
        actions = choices.sample()
        self.steps.append((seen, actions, choices.log_prob(actions)))
        return actions

    def learn(self, last):
        """Learn from the steps so far; ``last`` is what the last actions led to.

        Returns the rewards of the episodes that ended.
        """
        before, actions, log_probs = zip(*self.steps, strict=True)
        self.steps = []
        seen = join([*before, last], torch.stack)  # [steps + 1, environments, ...]
        rewards, failed = seen.reward[1:], seen.failed[1:]
        over = failed | seen.late[1:]
        real = ~torch.cat([self.over[None], over[:-1]])
        self.over = over[-1]
        gains, targets = self.advantages(seen.state, rewards, failed, over)
        columns = [seen.state[:-1], torch.stack(actions), torch.stack(log_probs), gains, targets]
        rows = [column[real] for column in columns]
        for _ in range(4):
            for chosen in torch.randperm(len(rows[0])).chunk(4):
                self.update(*(column[chosen] for column in rows))
        return self.finished(rewards, over)

    @torch.no_grad()
    def advantages(self, states, rewards, failed, over, discount=0.99, trace=0.95):
        """Generalized advantage estimation (Schulman et al., 2016), and the values' targets."""
        values = self.value(states).squeeze(-1)
        gains, gain = torch.empty_like(rewards), torch.zeros_like(rewards[0])
        for t in reversed(range(len(rewards))):
            surprise = rewards[t] + discount * values[t + 1] * ~failed[t] - values[t]
            gains[t] = gain = surprise + discount * trace * gain * ~over[t]
        return gains, gains + values[:-1]

    def update(self, states, actions, log_probs, gains, targets):
        choices = Categorical(logits=self.policy(states))
        ratio = (choices.log_prob(actions) - log_probs).exp()
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        better = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
        wrong = (self.value(states).squeeze(-1) - targets).pow(2).mean()
        self.optimizer.zero_grad()
        (0.5 * wrong - better - 0.01 * choices.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.optimizer.step()

    def finished(self, rewards, over):
        """Return the total rewards of the episodes that ended."""
        ended = []
        for reward, ends in zip(rewards, over, strict=True):
            self.totals += reward
            ended += self.totals[ends].tolist()
            self.totals[ends] = 0
        return ended


# %% [markdown]
# **Agent and observers.** Who calls whom, with two observers:
#
# ![The notebook calls iterate on the agent, the agent calls observe on each observer, and each observer calls act on the agent
# 64 times](pictures/02_agent_and_observers.svg)
#
# If the agent answered each `act` by itself, it would run its network once for each observer and step, with few rows. Instead
# it waits until all observers have asked and runs it once. Waiting must not block a thread for each call: `act` is an
# `@async_execution` function, which returns a *future*. The call is answered when the future is set, and until then it occupies
# no thread.
#
# Each observer has its own rows in the batch, wherever in time its call arrives. So the run does not depend on who is first, and
# the same seed gives the same run.

# %%
# %%writefile cartpole.py
import threading

import gymnasium
import torch
import torch.distributed.rpc as rpc
from learner import Learner, Seen, join


class Observer:
    """Plays some environments; it knows no policy."""

    def __init__(self, number, environments, seed):
        self.number = number
        self.games = gymnasium.make_vec("CartPole-v1", environments, vectorization_mode="sync")
        state, _ = self.games.reset(seed=seed + number * environments)
        none = torch.zeros(environments, dtype=torch.bool)
        self.seen = Seen(torch.from_numpy(state), none.float(), none, none)

    def step(self, actions):
        state, reward, failed, late, _ = self.games.step(actions.numpy())
        self.seen = Seen(*map(torch.from_numpy, (state, reward.astype("float32"), failed, late)))
        return self.seen

    def observe(self, agent, steps):
        for _ in range(steps):
            actions = rpc.rpc_sync(agent.owner(), act, args=(agent, self.number, self.seen))
            self.step(actions)
        return self.seen


@rpc.functions.async_execution
def act(agent, number, seen):
    """Called at the agent: a future of the actions of observer ``number``."""
    return agent.local_value().join_batch(number, seen)


class Agent:
    """Asks observers to play, decides for them in batches, and learns."""

    def __init__(self, names, environments, seed):
        self.learner = Learner(len(names) * environments, seed)
        self.observers = [
            rpc.remote(name, Observer, args=(number, environments, seed))
            for number, name in enumerate(names)
        ]
        self.lock = threading.Lock()  # calls come in several threads
        self.asked = {}  # number of an observer: what it has seen
        self.answer = torch.futures.Future()  # the actions of each observer

    def join_batch(self, number, seen):
        with self.lock:
            mine = self.answer.then(lambda answer: answer.wait()[number])
            self.asked[number] = seen
            if len(self.asked) == len(self.observers):
                batch = join([self.asked[i] for i in range(len(self.observers))])
                actions = self.learner.choose(batch).chunk(len(self.observers))
                answer, self.answer, self.asked = self.answer, torch.futures.Future(), {}
                answer.set_result(actions)  # all the calls are answered
        return mine

    def iterate(self, me, steps):
        """Let all observers play and learn from it; ``me`` is an RRef to this agent."""
        calls = [observer.rpc_async().observe(me, steps) for observer in self.observers]
        for call in calls:
            call.add_done_callback(self.give_up)
        return self.learner.learn(join(torch.futures.wait_all(calls)))

    def give_up(self, call):
        """If an observer's call failed, the others must not wait for its part of the batch."""
        try:
            call.wait()
        except Exception as error:
            with self.lock:
                self.asked = {}
                if not self.answer.done():
                    self.answer.set_exception(error)  # also for those who come later

    def play(self, seed):
        """Play an episode here, always the likelier action; the states [steps, 4]."""
        game = gymnasium.make("CartPole-v1")
        state, _ = game.reset(seed=seed)
        states, over = [torch.from_numpy(state)], False
        while not over:
            with torch.no_grad():
                action = self.learner.policy(states[-1]).argmax().item()
            state, _, failed, late, _ = game.step(action)
            states.append(torch.from_numpy(state))
            over = failed or late
        return torch.stack(states)


# %% [markdown]
# The notebook has the agent start the observers, and from then on only says `iterate`. It passes the agent an RRef to the
# agent itself, which it hands on to the observers.

# %%
from cartpole import Agent, Observer
from learner import Learner, join

ENVIRONMENTS, STEPS, SEED = 16, 64, 0  # of each observer; in one iteration
LIMIT = 3 if SMALL else 100  # iterations
agent = rpc.remote("agent", Agent, args=(OBSERVERS, ENVIRONMENTS, SEED))
untrained = agent.rpc_sync().play(seed=1)


def mean_of_last(rewards, count=100):
    return statistics.mean(rewards[-count:]) if rewards else 0.0


rewards, ended = [], []  # of all episodes; how many there were after each iteration
with tqdm(total=475, bar_format="{desc} |{bar}| {elapsed}", mininterval=1) as bar:
    for _ in range(LIMIT):
        rewards += agent.rpc_sync().iterate(agent, STEPS)
        ended.append(len(rewards))
        bar.n = min(round(mean_of_last(rewards)), 475)
        bar.set_description(f"mean reward {mean_of_last(rewards):.0f}")
        if len(rewards) >= 100 and mean_of_last(rewards) >= 475:
            break
steps = len(ended) * STEPS * ENVIRONMENTS * len(OBSERVERS)
print(f"{len(ended)} iterations, {len(rewards)} episodes, {steps} steps of environments")
print(f"mean reward of the last 100 episodes: {mean_of_last(rewards):.0f}")
assert SMALL or mean_of_last(rewards) >= 475

# %%
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
means = [mean_of_last(rewards[: i + 1]) for i in range(len(rewards))]
axis.plot(rewards, ".", markersize=3, color="tab:gray", label="an episode")
axis.plot(means, color="tab:blue", label="mean of the last 100")
axis.axhline(475, color="tab:green", linestyle="--", linewidth=1, label="solved: 475")
axis.set(xlabel="episode", ylabel="reward", ylim=(0, 510))
axis.legend(frameon=False, loc="center left")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# What it has learned, seen: an episode that begins alike, before and after. Each row is a whole episode in twelve pictures, with
# the step below. The angle is drawn three times as large as it is; the episode ends at 12 degrees.

# %%
import math

trained = agent.rpc_sync().play(seed=1)
figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
for row, states in enumerate((trained, untrained)):
    for picture in range(12):
        step = round(picture * (len(states) - 1) / 11)
        lean = 3 * states[step, 2].item()
        x, y = 1.6 * picture, 2 * row
        top = (x + math.sin(lean), y + math.cos(lean))
        axis.plot(*zip((x, y), top, strict=True), color="tab:orange", linewidth=4)
        axis.plot(x, y, "s", color="black", markersize=11)
        axis.text(x, y - 0.55, step, ha="center", fontsize=8)
axis.set(yticks=[0.3, 2.3], yticklabels=["after", "before"], xticks=[], ylim=(-0.7, 3.2))
axis.set_aspect("equal")
axis.tick_params(length=0)
axis.spines[:].set_visible(False)

# %% [markdown]
# ### The same run without RPC
#
# `Learner` and `Observer.step` know nothing of RPC. So the local program is a loop over them, and the first iterations must
# give the same episodes. If batches were made of whoever comes first, this would not hold.


# %%
def local(iterations):
    """The program in this process: the rewards of all episodes, and the seconds of a round."""
    learner = Learner(len(OBSERVERS) * ENVIRONMENTS, SEED)
    observers = [Observer(i, ENVIRONMENTS, SEED) for i in range(len(OBSERVERS))]
    rewards, seconds = [], 0.0
    for _ in range(iterations):
        begin = time.perf_counter()
        for _ in range(STEPS):
            actions = learner.choose(join([observer.seen for observer in observers]))
            for observer, mine in zip(observers, actions.chunk(len(observers)), strict=True):
                observer.step(mine)
        seconds += time.perf_counter() - begin
        rewards += learner.learn(join([observer.seen for observer in observers]))
    return rewards, seconds / (iterations * STEPS)


expected, _ = local(3)
print(f"{len(expected)} episodes, equal: {rewards[: len(expected)] == expected}")
assert rewards[: len(expected)] == expected

# %% [markdown]
# ## What can go wrong
#
# **1. `to_here()` where a call was meant.** It copies the agent, with all that it holds. Here that is a lock, which cannot be
# copied; without the lock you would get a second agent, and whatever it is told never reaches the first one.

# %%
try:
    agent.to_here()
except RuntimeError as error:  # what follows the first line is a stack of C++
    print(str(error).splitlines()[0])

# %% [markdown]
# **2. An `@async_execution` function that returns no future.** The decorator marks the function; what it returns is looked at
# when it has run.

# %%
# %%writefile forgotten.py
import torch.distributed.rpc as rpc


@rpc.functions.async_execution
def act(seen):
    return seen > 0


# %%
import forgotten

try:
    rpc.rpc_sync("agent", forgotten.act, args=(torch.ones(2),))
except RuntimeError as error:
    print(str(error)[str(error).index("Functions decorated") :])

# %% [markdown]
# **3. An observer that dies.** All others wait for a batch that will never be full. The agent's call of `observe` fails at once
# and names the dead worker; `give_up` then sets the future to that error, and so nobody waits. Leave `give_up` out, and all wait
# for their time-out of 60 s: `torch.futures.wait_all` waits for *all*, also when one has failed.
#
# The error comes from the observers through the agent to us, and its text has the traceback of each. One line says what was:

# %%
future = agent.rpc_async().iterate(agent, 100_000)
time.sleep(0.5)
group[OBSERVERS[-1]].kill()
begin = time.perf_counter()
try:
    future.wait()
except RuntimeError as error:
    print(next(line for line in str(error).splitlines() if "PeerLostError" in line))
print("noticed in less than 5 s:", time.perf_counter() - begin < 5)

# %%
del agent
group.stop(graceful=False)

# %% [markdown]
# ## What it costs
#
# A *round* is one step of all environments: each observer calls `act`, all are answered. It is measured under both back ends, in
# turns, so that other work on the machine hits both alike, and so is a round of the local program. The agent's own worker runs
# the function of this cell, so no further process is needed.

# %%
from torch_rpc_ext.profiler import profile

ROUNDS = 2 if SMALL else 6


def prepare(names, environments, seed):
    """Make an agent on this worker; what is kept in cartpole stays from call to call."""
    import cartpole

    cartpole.here = Agent(names, environments, seed)
    cartpole.here.rref = rpc.RRef(cartpole.here)
    cartpole.here.iterate(cartpole.here.rref, 10)  # connects, and warms up


def measure(steps):
    """Seconds of each round without learning, and the rewards of the episodes that ended."""
    import cartpole

    agent = cartpole.here
    begin = time.perf_counter()
    calls = [observer.rpc_async().observe(agent.rref, steps) for observer in agent.observers]
    last = torch.futures.wait_all(calls)
    seconds = (time.perf_counter() - begin) / steps
    return seconds, agent.learner.learn(join(last))


def count_bytes():
    """Rows of the profiler for one iteration, calls of act only."""
    with profile(operators=False) as prof:
        measure(10)
    return [row for row in prof.table() if "act" in row.function]


def release():
    import cartpole

    del cartpole.here


times = {"local, no RPC": [], "UCX": [], "TENSORPIPE": []}
episodes, rows = {"UCX": [], "TENSORPIPE": []}, {}
names = ["agent", *OBSERVERS]
with WorkerGroup(names) as ucx, WorkerGroup(names) as tensorpipe:
    groups = {"UCX": ucx.init_rpc("UCX"), "TENSORPIPE": tensorpipe.init_rpc("TENSORPIPE")}
    for each in groups.values():
        each["agent"].run(prepare, OBSERVERS, ENVIRONMENTS, SEED)
    for _ in tqdm(range(ROUNDS), mininterval=1):
        times["local, no RPC"].append(local(1)[1])
        for backend, each in groups.items():
            seconds, ended = each["agent"].run(measure, STEPS)
            times[backend].append(seconds)
            episodes[backend] += ended
    for backend, each in groups.items():
        rows[backend] = each["agent"].run(count_bytes)
        each["agent"].run(release)

# %%
for backend, each in rows.items():
    sent = sum(row.sent_bytes for row in each) / sum(row.calls for row in each)
    print(f"{backend:<11}a call of act: {sent:.0f} bytes")
tensors = ENVIRONMENTS * (4 * 4 + 4 + 1 + 1)  # states, rewards, and two booleans
print(f"its tensors: {tensors} bytes; those of the answer: {ENVIRONMENTS * 8}")
print("the same episodes under both:", episodes["UCX"] == episodes["TENSORPIPE"])
assert episodes["UCX"] == episodes["TENSORPIPE"]

# %%
rounds = {name: statistics.median(seconds) for name, seconds in times.items()}
figure, axis = plt.subplots(figsize=(6, 1.8), layout="constrained")
bars = axis.barh(
    list(rounds),
    [seconds * 1e3 for seconds in rounds.values()],
    color=["tab:orange", "tab:blue", "tab:gray"],
)
axis.bar_label(bars, fmt="%.1f", padding=3)
axis.invert_yaxis()
axis.set(xlabel=f"ms for a round of {ENVIRONMENTS * len(OBSERVERS)} environments")
axis.margins(x=0.12)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# A step of CartPole takes some hundred-thousandths of a second, much less than a call, so here observers of their own gain
# nothing. They are for games whose steps are expensive: a physics engine, a renderer, a robot. Exercise 3 is about that.
#
# ## Exercises
#
# 1. Answer each `act` by itself: no `@async_execution`, and `choose` on the rows of one observer. How long is a round now? Why is
#    the run no longer the same each time? (`Learner.steps` needs another form, too.)
# 2. Let one observer sleep 20 ms in each step. How long is a round? Answer after 5 ms with those who have asked by then;
#    `torch_rpc_ext.aio.batched` has such a limit, `max_wait`.
# 3. Make every step of the game sleep 1 ms for each environment, in the local program too. With how many observers is the
#    distributed one faster?
# 4. Go on after the death of an observer: start a new one with `rpc.remote` on a worker that lives, and put it into the
#    dead one's place. What has to be reset in the agent?
