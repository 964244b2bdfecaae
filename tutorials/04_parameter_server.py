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
# # 4. A parameter server with several trainers
#
# **What you will learn**
#
# - to write a server that answers several callers *at once*, with `@rpc.functions.async_execution` and a `Future`
# - to write the same with a batcher, `@aio.batched`, which does not wait for those who do not come
# - what more trainers give: images per second, and accuracy over time
# - to check that two trainers learn exactly what one process would
#
# The first notebook explains workers, `%%writefile` and `WorkerGroup`. Distributed autograd, which the third one is about, is
# not needed here: trainers send gradients and get weights.

# %% [markdown]
# ## The smallest version
#
# A function of a worker usually returns its result. A function under `@rpc.functions.async_execution` returns a *future* of it,
# and is done. No thread waits. The answer goes out when somebody, maybe another call, sets the future's result.
#
# `Average` collects three numbers and answers all three callers with their mean.

# %%
# %%writefile average.py
import threading

import torch
import torch.distributed.rpc as rpc


class Average:
    """Answers every `count` calls at once, with the mean of their numbers."""

    def __init__(self, count):
        self.count, self.lock = count, threading.Lock()  # calls run in several threads
        self.numbers, self.future = [], torch.futures.Future()

    @rpc.functions.async_execution
    def add(self, number):
        with self.lock:
            self.numbers.append(number)
            future = self.future
            full = self.numbers if len(self.numbers) == self.count else None
            if full:
                self.numbers, self.future = [], torch.futures.Future()
        if full:
            future.set_result(sum(full) / len(full))
        return future


# %%
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed.rpc as rpc
from tqdm import tqdm

import average
from torch_rpc_ext.launch import WorkerGroup

SMALL = False  # True: smaller sizes, for a first look
torch.set_num_threads(1)  # as the workers have
TRAINERS = [f"trainer{i}" for i in range(2 if SMALL else 4)]
group = WorkerGroup(["server", *TRAINERS]).start()
group.init_rpc("UCX", join="notebook")

mean = rpc.remote("server", average.Average, args=(3,))
futures = [mean.rpc_async().add(number) for number in (1.0, 2.0)]
time.sleep(0.2)
print("after two calls, answered:", [future.done() for future in futures])
futures.append(mean.rpc_async().add(6.0))
print("after the third:", [future.wait() for future in futures])

# %% [markdown]
# A parameter server is this, with gradients for numbers and new weights for the mean.

# %% [markdown]
# ## The real version
#
# The data are real and come with scikit-learn: 1797 digits of 8 x 8 pixels, from forms that 43 people filled in by hand. 360 of
# them are held out.

# %%
from sklearn.datasets import load_digits

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(20))
images = torch.as_tensor(digits.data, dtype=torch.float32)[order] / 16
labels = torch.as_tensor(digits.target)[order]
torch.save((images[:360], labels[:360]), "held_out.pt")  # the workers run in this folder too
torch.save((images[360:], labels[360:]), "train.pt")

figure, axes = plt.subplots(1, 12, figsize=(8, 1.1), layout="constrained")
for axis, picture, label in zip(axes, digits.images, digits.target, strict=False):
    axis.imshow(picture, cmap="gray_r")
    axis.set_title(label, fontsize=9)
    axis.set_axis_off()

# %% [markdown]
# The server holds the weights as one vector, so that one tensor goes each way, and takes gradients in three ways:
#
# - `update_now` applies each gradient when it comes: *asynchronous* training. Nobody waits for anybody, but a gradient may belong to
#   weights that others have changed meanwhile.
# - `update_together` waits for one gradient of each trainer, applies their mean and answers all: *synchronous* training.
# - `update_batch` does the same with the batcher. It is an ordinary function of lists; collecting calls and answering
#   each is done for it. Its batch is complete with `max_size` calls, or after `max_wait` seconds with those that have come.
#
# Who calls whom, with two trainers that have fetched the weights and computed their gradients:
#
# ![Each trainer calls update_together with its gradient; the server answers both when the second has
# come](pictures/04_synchronous.svg)
#
# ![Each trainer calls update_now with its gradient; the server answers each at once](pictures/04_asynchronous.svg)
#
# All three ways return a *copy* of the weights. A result is packed for the wire after the function has returned, and the next call
# may be changing the weights by then.

# %%
# %%writefile parameter_server.py
import threading
import time

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from torch_rpc_ext import aio

BATCH = 32  # images a step and trainer


def network(width):
    torch.manual_seed(0)
    inner = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*inner, nn.Linear(width, 10))


def mean_of(gradients):
    """The mean of {trainer: gradient}, always summed in the same order."""
    return torch.stack([gradients[trainer] for trainer in sorted(gradients)]).mean(0)


class ParameterServer:
    def __init__(self, trainers, lr=0.16, width=128):
        self.trainers, self.width = trainers, width
        self.weights = parameters_to_vector(network(width).parameters()).detach()
        self.optimizer = torch.optim.SGD([self.weights], lr=lr)
        self.lock = threading.Lock()
        self.gradients, self.future = {}, torch.futures.Future()
        self.updates, self.history, self.begin = 0, [], None
        update_batch.max_size = trainers  # a batch is full when all trainers are in it

    def fetch(self):
        with self.lock:
            self.begin = self.begin or time.monotonic()
            return self.weights.clone()

    def step(self, gradient):
        """With the lock held: a step of the optimizer. Returns the new weights."""
        self.weights.grad = gradient
        self.optimizer.step()
        self.updates += 1
        weights = self.weights.clone()
        if self.updates % 10 == 0:
            self.history.append((time.monotonic() - self.begin, weights))
        return weights

    def update_now(self, trainer, gradient):
        with self.lock:
            return self.step(gradient)

    @rpc.functions.async_execution
    def update_together(self, trainer, gradient):
        weights = None
        with self.lock:
            self.gradients[trainer] = gradient
            future = self.future
            if len(self.gradients) == self.trainers:
                weights = self.step(mean_of(self.gradients))
                self.gradients, self.future = {}, torch.futures.Future()
        if weights is not None:
            future.set_result(weights)
        return future

    def curve(self):
        """Seconds since the first fetch, and accuracy on the held-out images then."""
        model, (images, labels) = network(self.width), torch.load("held_out.pt")
        points = []
        for seconds, weights in self.history:
            vector_to_parameters(weights, model.parameters())
            with torch.no_grad():
                right = model(images).argmax(1) == labels
            points.append((seconds, right.float().mean().item()))
        return points


@aio.batched(max_wait=0.1)
def update_batch(servers, trainers, gradients):
    server = servers[0].local_value()
    with server.lock:
        weights = server.step(mean_of(dict(zip(trainers, gradients, strict=True))))
    return [weights] * len(gradients)


class Trainer:
    """Computes gradients on its share of the images."""

    def __init__(self, number, trainers, width=128):
        images, labels = torch.load("train.pt")
        self.images, self.labels = images[number::trainers], labels[number::trainers]
        self.model = network(width)
        self.generator = torch.Generator().manual_seed(number)

    def gradient(self, weights):
        vector_to_parameters(weights, self.model.parameters())
        batch = torch.randint(len(self.labels), (BATCH,), generator=self.generator)
        loss = nn.functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])
        return parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))


def train(server, how, number, trainers, steps, width=128, pace=0.0):
    """Run on a trainer: `steps` times weights, gradient, update."""
    trainer = Trainer(number, trainers, width)
    weights = server.rpc_sync().fetch()
    for _ in range(steps):
        time.sleep(pace)
        gradient = trainer.gradient(weights)
        if how == "batch":
            weights = update_batch.sync(server.owner(), server, number, gradient)
        else:
            weights = getattr(server.rpc_sync(), f"update_{how}")(number, gradient)


# %% [markdown]
# ### Two trainers learn what one process would
#
# A synchronous step with two trainers is a step with the mean of two gradients. So one process that computes both, one after
# the other, must come to the same weights. We compare all of them, bit by bit.

# %%
import parameter_server as ps


def start(how, count, steps, lr=0.16, **more):
    """Train with so many trainers; returns the server."""
    server = rpc.remote("server", ps.ParameterServer, args=(count, lr))
    futures = [
        rpc.rpc_async(TRAINERS[i], ps.train, args=(server, how, i, count, steps), kwargs=more)
        for i in range(count)
    ]
    torch.futures.wait_all(futures)
    return server


server = start("together", 2, 50)
local, trainers = ps.ParameterServer(2), [ps.Trainer(i, 2) for i in range(2)]
weights = local.fetch()
for _ in range(50):
    weights = local.step(ps.mean_of({i: trainers[i].gradient(weights) for i in range(2)}))
print(f"{len(weights)} weights, equal: {torch.equal(weights, server.rpc_sync().fetch())}")
assert torch.equal(weights, server.rpc_sync().fetch())

# %% [markdown]
# ### More trainers
#
# Each run sees the same number of images, divided among 1, 2 or 4 trainers. This machine may have fewer cores than we have
# trainers. So that the figures show the trainers, and not who gets a core, each of them also sleeps 10 ms a step, as if it read
# its images from a disk or computed on a GPU.
#
# A synchronous step of four trainers has the mean of four gradients: a better direction, but as long a step as that of one. To
# gain time the step must grow as well, so its learning rate is multiplied by the number of trainers (the *linear scaling rule*,
# Goyal et al. 2017). Asynchronous trainers make their own steps, which add up by themselves.

# %%
PACE, EPOCHS = 0.01, 1 if SMALL else 14
IMAGES = 1797 - 360
LABELS = {"now": "asynchronous", "together": "synchronous", "batch": "batcher"}
COUNTS = [1, 2] if SMALL else [1, 2, 4]

speed, curves = {}, {}
for how, count in tqdm([(how, count) for how in LABELS for count in COUNTS], mininterval=1):
    steps = EPOCHS * IMAGES // (ps.BATCH * count)
    begin = time.perf_counter()
    lr = 0.16 if how == "now" else 0.16 * count
    server = start(how, count, steps, lr, pace=PACE)
    speed[how, count] = steps * count * ps.BATCH / (time.perf_counter() - begin)
    curves[how, count] = server.rpc_sync().curve()

# %%
figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
for axis, (how, label) in zip(axes, LABELS.items(), strict=True):
    for count in COUNTS:
        seconds, accuracy = zip(*curves[how, count], strict=True)
        axis.plot(seconds, accuracy, label=f"{count} trainer{'s' * (count > 1)}")
    axis.set(title=label, xlabel="time, s", ylim=(0, 1), xlim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("accuracy, held-out images")
axes[2].legend(frameon=False, loc="lower right")

figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
for how, style in zip(LABELS, ["o-", "s-", "^--"], strict=True):
    axis.plot(COUNTS, [speed[how, count] for count in COUNTS], style, label=LABELS[how])
ideal = [speed["now", 1] * count for count in COUNTS]
axis.plot(COUNTS, ideal, ":", color="gray", label="ideal")
axis.set(xlabel="trainers", ylabel="images per second", ylim=(0, None), xticks=COUNTS)
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)


# %%
def seconds_to(accuracy, points):
    """When a curve first reaches an accuracy."""
    reached = [f"{seconds:.1f} s" for seconds, value in points if value >= accuracy]
    return reached[0] if reached else "not reached"


print(f"{'':<14}{'trainers':>8}{'images/s':>10}{'93 % after':>14}{'in the end':>12}")
for (how, count), points in curves.items():
    print(
        f"{LABELS[how]:<14}{count:>8}{speed[how, count]:>10.0f}"
        f"{seconds_to(0.93, points):>14}{points[-1][1]:>12.3f}"
    )

# %% [markdown]
# More trainers bring more images per second, and reach the same accuracy sooner. Asynchronous ones never wait for each other.
# The price does not show here: their gradients belong to weights that are some updates old, and results differ from run to run.
# With larger steps, or momentum, that ends badly (exercise 2). Synchronous ones wait for the slowest of them in each step, and
# can be checked against one process, as above. (Figures vary with whatever else the machine does.)

# %% [markdown]
# ## What can go wrong
#
# **1. A trainer that does not come.** The synchronous server waits for two, and we send one gradient. Nobody is at fault, so
# there is no error but the time-out, which names the helper of upstream that calls a method through an RRef. Give such calls a
# time-out that you can bear.

# %%
server = rpc.remote("server", ps.ParameterServer, args=(2,))
gradient = ps.Trainer(0, 2).gradient(server.rpc_sync().fetch())
try:
    server.rpc_sync(timeout=1).update_together(0, gradient)
except Exception as error:
    print(type(error).__name__, "-", error)

# %% [markdown]
# The batcher goes on after its `max_wait`, here with a batch of one. That is a choice, not a repair: the step is now the
# gradient of fewer images.

# %%
begin = time.perf_counter()
ps.update_batch.sync("server", server, 0, gradient)
print(f"answered after {time.perf_counter() - begin:.1f} s")

# %% [markdown]
# **2. The decorator forgotten.** Then the future itself is taken for the result, and it cannot be sent.

# %%
# %%writefile forgotten.py
import torch


def no_decorator():
    future = torch.futures.Future()
    future.set_result(1)
    return future


# %%
import forgotten

try:
    rpc.rpc_sync("server", forgotten.no_decorator)
except Exception as error:
    time.sleep(1)  # so that the server's output comes first
    print(str(error).splitlines()[0])

# %% [markdown]
# **3. One trainer sends nonsense.** In a batch the mean would spoil the weights for all. The batcher can answer each call for
# itself: a result that is an exception is raised for its caller alone.

# %%
# %%writefile careful.py
import torch

from torch_rpc_ext import aio


@aio.batched(max_size=2, max_wait=1)
def average(gradients):
    good = [gradient for gradient in gradients if gradient.isfinite().all()]
    mean = torch.stack(good).mean(0) if good else None
    refusal = ValueError("the gradient is not finite: lower the learning rate?")
    return [mean if gradient.isfinite().all() else refusal for gradient in gradients]


# %%
import careful

futures = [careful.average.async_("server", torch.tensor([x, 1.0])) for x in (2.0, float("nan"))]
for future in futures:
    try:
        print("got", future.wait())
    except ValueError as error:
        print(str(error).splitlines()[-1])

# %%
del mean, server
group.stop()

# %% [markdown]
# ## What it costs
#
# Each update carries one gradient there and the weights back. Both back ends, in turns, with two trainers that do not sleep,
# for the small network and for one with weights of 4.5 MB. `trainer0` also drives: torch cannot use RRefs under TENSORPIPE in a
# process that has used them under another agent, as this one has.

# %%
from torch_rpc_ext.profiler import profile

ROUNDS, STEPS = (1, 5) if SMALL else (3, 30)
WIDTHS = [128, 256] if SMALL else [128, 1024]


def measure(steps):
    """{(width, how): updates per second of all trainers}, and bytes of an update by width."""
    rates, sizes = {}, {}
    for width in WIDTHS:
        for how in LABELS:
            server = rpc.remote("server", ps.ParameterServer, args=(2, 0.01, width))
            for count in (2, steps):  # the first ones warm up
                begin = time.perf_counter()
                arguments = [(server, how, i, 2, count, width) for i in range(2)]
                calls = [rpc.rpc_async(TRAINERS[i], ps.train, args=arguments[i]) for i in range(2)]
                torch.futures.wait_all(calls)
            rates[width, how] = 2 * steps / (time.perf_counter() - begin)
        gradient = torch.zeros_like(server.rpc_sync().fetch())
        with profile(operators=False) as prof:
            server.rpc_sync().update_now(0, gradient)
        sizes[width] = (prof.table()[0].sent_bytes, prof.table()[0].result_bytes)
    return rates, sizes


rates = {}
names = ["server", "trainer0", "trainer1"]
with WorkerGroup(names) as ucx, WorkerGroup(names) as tensorpipe:
    groups = {"UCX": ucx.init_rpc("UCX"), "TENSORPIPE": tensorpipe.init_rpc("TENSORPIPE")}
    for _ in tqdm(range(ROUNDS), mininterval=1):
        for backend, each in groups.items():
            some, sizes = each["trainer0"].run(measure, STEPS)
            for key, rate in some.items():
                rates.setdefault((backend, *key), []).append(rate)

# %%
print(f"{'':<28}{'UCX':>12}{'TENSORPIPE':>12}   updates per second, median")
for width in WIDTHS:
    print(f"{sizes[width][0] / 1e3:.0f} kB there, {sizes[width][1] / 1e3:.0f} kB back")
    for how, label in LABELS.items():
        values = [statistics.median(rates[backend, width, how]) for backend in groups]
        print(f"  {label:<26}{values[0]:>12.0f}{values[1]:>12.0f}")

# %% [markdown]
# The small network's figures are mostly Python's: computing, packing, threads. The larger one's are about moving tensors.
#
# ## Exercises
#
# 1. Write `update_together` as an ordinary method that waits on a `threading.Condition`, and let four trainers run with
#    `num_worker_threads=2` (an option of `init_rpc`). What happens, and why not with the future?
# 2. Give the server's SGD `momentum=0.9` and a learning rate of 0.05. Which of the nine runs fails now, and why that one?
# 3. Kill a trainer in the middle of a run (`group["trainer1"].kill()`), once with `update_together` and once with `update_batch`.
#    What do the others see?
# 4. Count in `update_now` how many updates came between a trainer's fetch and its own: the *staleness*. How does it grow with the
#    number of trainers?
# 5. Send the gradients as `torch.bfloat16`. How many bytes are left, and what becomes of the accuracy?
