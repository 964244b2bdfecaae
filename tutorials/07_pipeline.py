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
# # 7. A small GPT as a pipeline over three workers
#
# **What you will learn**
#
# - to split a model over workers with `sharding.shard`, and to train it as a pipeline of micro-batches
# - to *see* the pipeline's bubble in a timeline, and what makes it smaller
# - to check that the gradients are those of the local model
#
# The first notebook explains workers, `%%writefile` and `WorkerGroup`.

# %%
import statistics
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed.rpc as rpc
from torch import nn
from tqdm import tqdm

from torch_rpc_ext import sharding
from torch_rpc_ext.launch import WorkerGroup

SMALL = False  # True: smaller sizes, for a first look
WORKERS = ["stage0", "stage1", "stage2"]
torch.set_num_threads(1)  # as the workers have: sums in the same order

# %% [markdown]
# ## The smallest version
#
# `shard` copies consecutive layers to the workers. The pipeline cuts a batch into micro-batches and keeps all stages busy with
# them; activations go from worker to worker, gradients back:
#
# ![The notebook hands a batch to all stages; activations go from stage to stage, gradients back, and the last stage answers with
# the loss](pictures/07_pipeline.svg)
#
# While stage1 works on this micro-batch, stage0 is at work on the next one.

# %%
group = WorkerGroup(WORKERS).start()
group.init_rpc("UCX", join="notebook")

tiny = sharding.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)), WORKERS)
pipeline = sharding.Pipeline(tiny, n_microbatches=4, loss_fn=nn.functional.mse_loss)
print("loss", pipeline.forward_backward(torch.ones(8, 4), torch.zeros(8, 1)).item())
tiny

# %% [markdown]
# ## The real version
#
# A GPT of six blocks, as plain as one can be. It stands in a module, because the workers must be able to import its classes.
# `Mark` is an identity that notes when a forward and a backward pass it: with one at each end of a stage we can draw what the
# stage did. With `pace` it also sleeps, below.

# %%
# %%writefile gpt_parts.py
import time

import torch
from torch import nn
from torch.nn import functional as F

EVENTS = []  # (what, label, time in s) of this process


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, label, pace):
        ctx.label, ctx.pace = label, pace
        time.sleep(pace)
        EVENTS.append(("forward", label, time.monotonic()))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        EVENTS.append(("backward", ctx.label, time.monotonic()))
        time.sleep(2 * ctx.pace)
        return gradient, None, None


class Mark(nn.Module):
    def __init__(self, label, pace=0.0):
        super().__init__()
        self.label, self.pace = label, pace

    def forward(self, x):
        return Note.apply(x, self.label, self.pace)


class Embed(nn.Module):
    def __init__(self, letters, width, length):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)

    def forward(self, x):
        return self.letter(x) + self.place.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def gpt(letters, width=48, heads=4, length=32, pace=0.0):
    """Three stages of two blocks; each begins and ends with a mark."""
    torch.manual_seed(0)

    def middle():
        return [Mark("in"), Block(width, heads), Block(width, heads), Mark("out", pace)]

    head = [nn.LayerNorm(width), nn.Linear(width, letters)]
    return nn.Sequential(Embed(letters, width, length), *middle(), *middle(), *middle(), *head)


def loss(scores, target):
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def take_events():
    taken = EVENTS[:]
    EVENTS.clear()
    return taken


def gradients(parameters):
    """Called at the owner of the parameters' RRefs: their gradients."""
    return [parameter.local_value().grad for parameter in parameters]


# %%
import gpt_parts

PARTITION = [5, 4, 6]  # layers of each stage
text = (
    "she sells sea shells by the sea shore. the shells she sells are sea shells, i am sure. " * 40
)
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])


def batch_of(number, size=16, length=32):
    """Inputs and targets, [size, length] each."""
    generator = torch.Generator().manual_seed(number)
    at = torch.randint(len(data) - length - 1, (size,), generator=generator)
    rows = torch.stack([data[i : i + length + 1] for i in at])
    return rows[:, :-1], rows[:, 1:]


# %% [markdown]
# ### The gradients are the local model's
#
# The local model runs the same micro-batches one after another and adds up. Compared bit by bit. (`reduction="mean"` says that our
# loss is a mean in which each row of a batch counts the same; of a function of ours the pipeline cannot know that.)

# %%
local = gpt_parts.gpt(len(letters))
model = sharding.shard(local, WORKERS, partition=PARTITION)
x, y = batch_of(0)
for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
    (gpt_parts.loss(local(part_x), part_y) / 4).backward()
expected = [parameter.grad for parameter in local.parameters()]

pipeline = sharding.Pipeline(model, 4, gpt_parts.loss, reduction="mean")
pipeline.forward_backward(x, y)
parameters = {worker: [] for worker in WORKERS}
for rref in model.remote_parameters():
    parameters[rref.owner().name].append(rref)
found = []
for worker in WORKERS:
    found += rpc.rpc_sync(worker, gpt_parts.gradients, args=(parameters[worker],))
print(sum(map(torch.equal, expected, found)), "of", len(expected), "gradients are equal")
assert len(found) == len(expected) and all(map(torch.equal, expected, found))

# %% [markdown]
# ### Training
#
# As with a local model: an optimizer, a scheduler of torch's, gradients clipped by the norm of the whole model.

# %%
STEPS = 3 if SMALL else 100
optimizer = sharding.ShardedOptimizer(torch.optim.AdamW, model, lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=3e-4)
losses = []
for step in tqdm(range(STEPS), mininterval=1):
    optimizer.zero_grad()
    losses.append(pipeline.forward_backward(*batch_of(step)).item())
    model.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per letter")

# %%
figure, axis = plt.subplots(figsize=(6, 2.6), layout="constrained")
axis.plot(losses)
axis.set(xlabel="step", ylabel="cross entropy, nats", ylim=(0, None))
axis.spines[["top", "right"]].set_visible(False)

# %%
line = [letters.index(letter) for letter in "she sells "]
model.eval()
for _ in range(40):
    line.append(model(torch.tensor([line[-32:]]))[0, -1].argmax().item())
print("".join(letters[i] for i in line))

# %% [markdown]
# ### The bubble
#
# The first stage has nothing to do until the last one's gradients come back, and the last one has nothing to do in the beginning.
# That is the *bubble*. With `m` micro-batches and `s` stages it takes `(s - 1) / (m + s - 1)` of the time.
#
# This machine may have fewer cores than we have stages, and our GPT is tiny. So that the picture shows the schedule, and not who
# gets a core, each stage sleeps 20 ms in a forward and 40 ms in a backward, as if it were larger.

# %%
del model, optimizer, scheduler, pipeline, parameters, rref, tiny
slow = sharding.shard(gpt_parts.gpt(len(letters), pace=0.02), WORKERS, partition=PARTITION)


def intervals(micro_batches, schedule):
    """Run a batch; return (stage, what, micro-batch, begin, end) of all that was done, s."""
    pipeline = sharding.Pipeline(
        slow, micro_batches, gpt_parts.loss, schedule=schedule, reduction="mean"
    )
    for _ in range(2):  # the first batch warms up
        for worker in WORKERS:
            rpc.rpc_sync(worker, gpt_parts.take_events)
        pipeline.forward_backward(*batch_of(0))
    found = []
    for stage, worker in enumerate(WORKERS):
        events = rpc.rpc_sync(worker, gpt_parts.take_events)
        for what, first, last in (("forward", "in", "out"), ("backward", "out", "in")):
            begins = [t for kind, label, t in events if (kind, label) == (what, first)]
            ends = [t for kind, label, t in events if (kind, label) == (what, last)]
            pairs = zip(begins, ends, strict=True)
            found += [(stage, what, i, begin, end) for i, (begin, end) in enumerate(pairs)]
    start = min(begin for *_, begin, _ in found)
    return [(*what, begin - start, end - start) for *what, begin, end in found]


def idle_share(found):
    """The part of all stages' time in which they waited."""
    busy = sum(end - begin for *_, begin, end in found)
    return 1 - busy / (len(WORKERS) * max(end for *_, end in found))


runs = {
    (m, s): intervals(m, s) for m, s in tqdm([(1, "1f1b"), (4, "gpipe"), (4, "1f1b"), (8, "1f1b")])
}

# %%
figure, axes = plt.subplots(4, 1, figsize=(8, 7), sharex=True, layout="constrained")
colors = {"forward": "tab:blue", "backward": "tab:orange"}
for axis, ((m, schedule), found) in zip(axes, runs.items(), strict=True):
    for stage, what, number, begin, end in found:
        axis.barh(stage, end - begin, left=begin, color=colors[what], edgecolor="white", height=0.8)
        axis.text(
            (begin + end) / 2, stage, number, ha="center", va="center", fontsize=7, color="white"
        )
    axis.set(yticks=range(3), yticklabels=WORKERS)
    axis.invert_yaxis()
    axis.set_title(
        f"{m} micro-batches, {schedule}: idle {idle_share(found):.0%}", fontsize=10, loc="left"
    )
    axis.spines[["top", "right"]].set_visible(False)
axes[-1].set_xlabel("time, s   (blue: forward, orange: backward; the number is the micro-batch's)")
figure.align_labels()

# %%
for (m, schedule), found in runs.items():
    formula = (len(WORKERS) - 1) / (m + len(WORKERS) - 1)
    print(
        f"{m} micro-batches, {schedule:<6} idle {idle_share(found):4.0%}, by the formula {formula:4.0%}"
    )

# %% [markdown]
# One micro-batch is no pipeline at all: one stage works, two wait. More micro-batches make the bubble smaller. (The pace is per
# micro-batch here, so more of them also take longer in all; in a real model each gets smaller.) GPipe and 1F1B take the same
# time, in another order: 1F1B begins its backwards early, and so holds the activations of fewer micro-batches.

# %% [markdown]
# ## What can go wrong
#
# **1. A loss that the last stage cannot import.**

# %%
try:
    sharding.Pipeline(slow, 2, lambda scores, y: scores.sum())
except ValueError as error:
    print(error)

# %% [markdown]
# **2. A loss of which nobody knows what it is over a batch, and a batch that is too small.**

# %%
try:
    sharding.Pipeline(slow, 2, gpt_parts.loss)
except ValueError as error:
    print(error)
pipeline = sharding.Pipeline(slow, 32, gpt_parts.loss, reduction="mean")
try:
    pipeline.forward_backward(x, y)
except ValueError as error:
    print(error)

# %% [markdown]
# **3. A stage that raises.** The error says which one, and has the stage's own error as its cause. Here a letter that the
# embedding does not know:

# %%
pipeline = sharding.Pipeline(slow, 2, gpt_parts.loss, reduction="mean")
try:
    pipeline.forward_backward(x + 1000, y)
except sharding.StageError as error:
    print(str(error).splitlines()[0])

# %%
slow = pipeline = None
group.stop()

# %% [markdown]
# ## What it costs
#
# Between stages travel activations and gradients, each as large as [micro-batch, length, width]. The step is measured under both
# back ends, with the driver as a worker of its own, by a function of this cell. (In this process TENSORPIPE could not use
# RRefs any more: torch keeps the agent with which they were used first.)

# %%
from torch_rpc_ext.profiler import profile

ROUNDS, STEPS = (1, 3) if SMALL else (2, 20)


def measure(steps):
    """Seconds of each step, and the bytes of the calls of one."""
    model = sharding.shard(gpt_parts.gpt(len(letters)), WORKERS, partition=PARTITION)
    pipeline = sharding.Pipeline(model, 4, gpt_parts.loss, reduction="mean")
    times = []
    for step in range(steps):
        begin = time.perf_counter()
        pipeline.forward_backward(*batch_of(step))
        times.append(time.perf_counter() - begin)
    with profile(operators=False) as prof:
        pipeline.forward_backward(*batch_of(0))
    return times, sum(row.sent_bytes for row in prof.table())


times, sent = {"UCX": [], "TENSORPIPE": []}, {}
names = [*WORKERS, "driver"]
with WorkerGroup(names) as ucx, WorkerGroup(names) as tensorpipe:
    groups = {"UCX": ucx.init_rpc("UCX"), "TENSORPIPE": tensorpipe.init_rpc("TENSORPIPE")}
    for _ in tqdm(range(ROUNDS)):
        for backend, each in groups.items():
            some, sent[backend] = each["driver"].run(measure, STEPS)
            times[backend] += some[len(some) // 3 :]  # the first ones warm up

# %%
one_way = 16 * 32 * 48 * 4  # batch, length, width, bytes of a float
print(f"activations and gradients over two borders: {4 * one_way / 1e3:.0f} kB a step")
for backend in times:
    milliseconds = statistics.median(times[backend]) * 1e3
    print(
        f"{backend:<11}{milliseconds:6.1f} ms a step, {sent[backend] / 1e3:.0f} kB in all requests"
    )

# %% [markdown]
# ## Exercises
#
# 1. Give stage1 twice the pace of the others (`Mark("out", 2 * pace)` in its part) and draw the timeline again. How much of the
#    time do the others wait? Move the borders in `PARTITION` with `balance="time"`.
# 2. Print `pipeline.stats` after a batch with each schedule. Where does `peak_micro_batches` differ?
# 3. Save model, optimizer and scheduler with `sharding.save_checkpoint`, shard the model over two workers instead of three, load them,
#    and go on. Are the losses those of a training without a break?
# 4. Kill `stage1` within a batch (`group["stage1"].kill()` from a thread). What does the error say, and how soon?
