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
# # 3. A recurrent network with its tables on another worker
#
# **What you will learn**
#
# - to put the large parts of a model, embedding and decoder, on a parameter server, and keep the recurrent part here
# - distributed autograd: one backward pass through several processes
# - `DistributedOptimizer`: parameters change where they live
# - to check such a program against the local model: same seeds, same losses
#
# The first notebook explains workers, `%%writefile` and `WorkerGroup`.

# %% [markdown]
# ## The smallest version
#
# `y = (2 * w).sum()`, where the doubling runs on the server. Distributed autograd notes in a *context* which calls took part;
# `backward` follows them through both processes. Gradients are not left in `.grad`, where several trainers would write over
# each other, but in the context.

# %%
import logging
import os
import time

os.environ["PYTORCH_JIT"] = "0"  # plain optimizers; those on TorchScript are deprecated

import matplotlib.pyplot as plt
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from tqdm import tqdm

from torch_rpc_ext.launch import WorkerGroup

logging.getLogger("torch.distributed.optim").setLevel("ERROR")  # it would mention TorchScript
SMALL = False  # True: smaller sizes, for a first look

QUIET = {
    "PYTHONWARNINGS": "ignore::DeprecationWarning"
}  # DistributedOptimizer is built on TorchScript
group = WorkerGroup(["server"]).start()
group.init_rpc("UCX", join="trainer")

w = torch.ones(3, requires_grad=True)
with dist_autograd.context() as context:
    y = rpc.rpc_sync("server", torch.mul, args=(w, 2)).sum()
    dist_autograd.backward(context, [y])
    print("in the context:", dist_autograd.get_gradients(context)[w], "in w.grad:", w.grad)

# %% [markdown]
# ## The real version
#
# A character model. Its text is made here: sentences of a small grammar, so that there is something to learn and nothing to
# download.

# %%
import random

WORDS = [["the", "a", "one"], ["red", "old", "tiny"], ["cat", "dog", "bird"], ["sees", "likes"]]
dice = random.Random(0)


def sentence():
    subject, thing = ([dice.choice(words) for words in WORDS[:3]] for _ in range(2))
    return " ".join([*subject, dice.choice(WORDS[3]), *thing]) + ". "


text = "".join(sentence() for _ in range(600))
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
print(text[:70], "...", len(text), "letters,", len(letters), "different")

# %% [markdown]
# The parts stand in a module, which the server imports. The embedding and the decoder live on the server; the trainer holds
# the LSTM.
# `seeded` builds a part from a seed: that is how both processes and the local model get the same weights. A worker serves calls on
# several threads, and all of them draw from torch's one generator: without the lock, two parts that are built at the same time would
# get each other's numbers.

# %%
# %%writefile rnn_parts.py
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn

one_at_a_time = threading.Lock()


def seeded(seed, kind, *sizes):
    with one_at_a_time:
        torch.manual_seed(seed)
        return kind(*sizes)


def parameter_rrefs(module_rref):
    """Called at the owner: one RRef for each parameter."""
    return [rpc.RRef(parameter) for parameter in module_rref.local_value().parameters()]


def call(module_rref, x):
    """Called at the owner: the module's forward."""
    return module_rref.local_value()(x)


class RNN(nn.Module):
    """Letters [batch, time] to scores [batch, time, letters]; two of its parts may be remote."""

    def __init__(self, embed, lstm, decode):
        super().__init__()
        self.embed, self.lstm, self.decode = embed, lstm, decode

    def forward(self, x):
        hidden, _ = self.lstm(self.embed(x))
        return self.decode(hidden)


# %%
from rnn_parts import RNN, call, parameter_rrefs, seeded

N, WIDTH, HIDDEN = len(letters), 32, 64
PARTS = {
    "embed": (1, nn.Embedding, N, WIDTH),
    "lstm": (2, nn.LSTM, WIDTH, HIDDEN, 1, True, True),  # 1 layer, bias, batch first
    "decode": (3, nn.Linear, HIDDEN, N),
}


class Remote(nn.Module):
    """A part on the server: calls its forward there."""

    def __init__(self, name):
        super().__init__()
        self.rref = rpc.remote("server", seeded, args=PARTS[name])

    def forward(self, x):
        return rpc.rpc_sync("server", call, args=(self.rref, x))

    def parameter_rrefs(self):
        return rpc.rpc_sync("server", parameter_rrefs, args=(self.rref,))


# %% [markdown]
# The local model and the distributed one, from the same seeds:


# %%
def local_model():
    return RNN(*(seeded(*PARTS[name]) for name in PARTS))


def distributed_model():
    return RNN(Remote("embed"), seeded(*PARTS["lstm"]), Remote("decode"))


def batches(steps, size=16, length=32):
    """Yield inputs and targets, [size, length] each; the same ones each time."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        at = torch.randint(len(data) - length - 1, (size,), generator=generator)
        rows = torch.stack([data[i : i + length + 1] for i in at])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


# %% [markdown]
# Training differs in three lines: the context, `dist_autograd.backward` in place of `loss.backward`, and an optimizer that
# takes RRefs of parameters.


# %%
def train_local(steps):
    model, losses = local_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_distributed(steps):
    model, losses = distributed_model(), []
    rrefs = model.embed.parameter_rrefs() + model.decode.parameter_rrefs()
    rrefs += [rpc.RRef(parameter) for parameter in model.lstm.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0, momentum=0.9)
    for x, y in tqdm(batches(steps), total=steps, mininterval=1):
        with dist_autograd.context() as context:
            loss = loss_of(model, x, y)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses, model


# %%
torch.set_num_threads(1)  # as the server has: sums in the same order
STEPS = 20 if SMALL else 400
local = train_local(STEPS)
distributed, model = train_distributed(STEPS)
print(f"first loss {local[0]:.4f}, last loss {local[-1]:.4f}")
print("largest difference:", max(abs(a - b) for a, b in zip(local, distributed, strict=True)))
assert local == distributed

# %% [markdown]
# Not close: equal, bit for bit. That is worth asserting in a test of your own program, because most mistakes in such a
# program, such as a gradient that is lost on the way, still give a loss that goes down.

# %%
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(distributed, label="distributed", linewidth=4, alpha=0.4)
axis.plot(local, label="local", linewidth=1, color="black")
axis.set(xlabel="step", ylabel="cross entropy per letter, nats", ylim=(0, None))
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# What it has learned, letter by letter the likeliest one:

# %%
with torch.no_grad():
    letters_so_far = [letters.index(letter) for letter in "the "]
    for _ in range(50):
        scores = model(torch.tensor([letters_so_far[-32:]]))
        letters_so_far.append(scores[0, -1].argmax().item())
print("".join(letters[i] for i in letters_so_far))

# %% [markdown]
# ## What can go wrong
#
# **1. `loss.backward()` out of habit.** The graph here ends where the call left, and plain autograd cannot follow it. The error
# reads like a bug in PyTorch, but it is about this mistake.

# %%
x, y = next(batches(1))
with dist_autograd.context():
    try:
        loss_of(model, x, y).backward()
    except RuntimeError as error:
        print(str(error).splitlines()[0])

# %% [markdown]
# **2. A call outside of any context.** It works, but nothing is recorded: the result has no history. No error, and the
# server's part never learns. Look for it when some parameters do not change.

# %%
print("outside:", model.decode(torch.ones(1, HIDDEN)).grad_fn)
with dist_autograd.context():
    print("inside: ", model.decode(torch.ones(1, HIDDEN)).grad_fn)

# %% [markdown]
# **3. A context that is over.** Its gradients are gone; the optimizer must step within.

# %%
with dist_autograd.context() as context:
    pass
try:
    dist_autograd.get_gradients(context)
except RuntimeError as error:
    print(str(error).splitlines()[0])

# %%
del model
group.stop()

# %% [markdown]
# ## What it costs
#
# Each step makes two calls forward and two backward, plus the optimizer's. Which tensors travel is known from the shapes;
# the backward carries the gradient of what the forward carried, except of the letters, which are integers.

# %%
BATCH, LENGTH = 16, 32
floats = BATCH * LENGTH * (WIDTH + HIDDEN + N)
integers = BATCH * LENGTH
forward = 8 * integers + 4 * floats
print(f"a step: forward {forward / 1e3:.0f} kB, backward {4 * floats / 1e3:.0f} kB")

# %% [markdown]
# Measured under both back ends, in turns, so that other work on the machine hits both; the median step counts. Here the trainer
# is a worker too, and the function of this cell runs there: torch cannot use RRefs under TENSORPIPE in a process that has used
# them under another agent. The profiler counts the bytes of calls that begin in Python, which are the forward ones.

# %%
import statistics

from torch_rpc_ext.profiler import profile

ROUNDS, STEPS = (1, 3) if SMALL else (4, 30)


def measure(steps):
    """Seconds of each step, and bytes of one forward."""
    logging.getLogger("torch.distributed.optim").setLevel("ERROR")  # there, as above
    model, times = distributed_model(), []
    rrefs = model.embed.parameter_rrefs() + model.decode.parameter_rrefs()
    rrefs += [rpc.RRef(parameter) for parameter in model.lstm.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    for x, y in batches(steps):
        begin = time.perf_counter()
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss_of(model, x, y)])
            optimizer.step(context)
        times.append(time.perf_counter() - begin)
    with profile(operators=False) as prof, dist_autograd.context():
        loss_of(model, x, y)
    return times, sum(row.sent_bytes + row.result_bytes for row in prof.table())


times, sent = {"UCX": [], "TENSORPIPE": []}, {}
names = ["server", "trainer"]
with WorkerGroup(names) as ucx, WorkerGroup(names) as tensorpipe:
    groups = {"UCX": ucx.init_rpc("UCX"), "TENSORPIPE": tensorpipe.init_rpc("TENSORPIPE")}
    for _ in tqdm(range(ROUNDS)):
        for backend, each in groups.items():
            some, sent[backend] = each["trainer"].run(measure, STEPS)
            times[backend] += some[len(some) // 3 :]  # the first ones warm up

# %%
begin = time.perf_counter()
train_local(STEPS)
print(f"local      {(time.perf_counter() - begin) / STEPS * 1e3:5.1f} ms a step (mean)")
for backend in times:
    milliseconds = statistics.median(times[backend]) * 1e3
    print(f"{backend:<11}{milliseconds:5.1f} ms a step, {sent[backend] / 1e3:.0f} kB forward")

# %% [markdown]
# On one machine the distributed model is slower than the local one: it computes the same and sends tensors besides. It pays when
# the tables do not fit into one machine's memory, or when several trainers share them: the next notebooks.
#
# ## Exercises
#
# 1. Let *two* trainers work on one server, each with its own context. Are the losses still those of the local model? Why not?
# 2. Put the LSTM on a second worker too, so that the notebook only computes the loss. What travels now?
# 3. Both calls of the forward send the whole sequence. Send embedding and decoder together, as one function on the server that
#    runs the LSTM as well, and measure again.
# 4. Replace SGD by Adam. Does the equality still hold?
