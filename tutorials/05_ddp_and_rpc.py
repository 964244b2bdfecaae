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
# # 5. DistributedDataParallel combined with RPC
#
# **What you will learn**
#
# - which part of a model to copy to all trainers (`DistributedDataParallel`) and which to keep in one place (`RemoteModule`)
# - to train both parts in one backward pass
# - to check such a program against the local model: same seeds, same losses
# - what goes over the wire, beside copying everything
#
# The first notebook explains workers, `%%writefile` and `WorkerGroup`, the third one distributed autograd.
#
# Models that recommend things have a large table, with a row for each item of a shop, and a small network behind it. Every
# trainer needs all of the network at every step, so each has a copy, and the copies' gradients are averaged. Of the table a
# step needs a few rows only. A copy of it in each trainer would cost memory, and averaging its gradients would cost time. So it
# lives on a server:
#
# ```
#                       master                 starts the training and waits
#                      /      \
#           trainer0              trainer1     each: its own batches, a copy of the network
#              |   \   all-reduce   /   |      DDP averages the gradients of the copies
#              |    `--------------'    |
#              `-------> server <-------'      the table; items come in, means of their rows go out
# ```

# %% [markdown]
# ## The smallest version
#
# `RemoteModule` makes a module on another worker. It is called as if it were here.

# %%
import os
import statistics
import time

os.environ["PYTORCH_JIT"] = "0"  # plain optimizers; those on TorchScript are deprecated

import matplotlib.pyplot as plt
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.nn import RemoteModule
from tqdm import tqdm

from torch_rpc_ext.launch import WorkerGroup

SMALL = False  # True: smaller sizes, for a first look
torch.set_num_threads(1)  # as the workers have: sums in the same order
QUIET = {
    "PYTHONWARNINGS": "ignore::DeprecationWarning",  # DistributedOptimizer is built on TorchScript
    "GLOO_SOCKET_IFNAME": "lo",  # all on this host
}
NAMES = ["trainer0", "trainer1", "server"]


def load():
    """RemoteModule's workers must have imported it; in a program of one file they have."""
    import torch.distributed.nn  # noqa: F401


# Without output: errors come back to us anyway.
group = WorkerGroup(NAMES, env=QUIET, show=lambda name, line: None).start()
group.run(load)
group.init_rpc("UCX", join="master")

tiny = RemoteModule("server", nn.EmbeddingBag, args=(10, 4), kwargs={"mode": "sum"})
with dist_autograd.context() as context:
    rows = tiny(torch.tensor([[1, 2, 3], [4, 4, 4]]))  # two bags of three items
    dist_autograd.backward(context, [rows.sum()])
print(rows)
print("parameters live on", [rref.owner().name for rref in tiny.remote_parameters()])

# %% [markdown]
# `RecvRpcBackward` is where the backward pass leaves this process.
#
# Now a network behind it, in two trainers. `DistributedDataParallel` (DDP) needs a *process group* of the trainers, beside RPC:
# the server and the master are not in it. What the trainers run stands in a module.

# %%
# %%writefile smallest.py
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def gradient(table, rank, items):
    """Run on both trainers: the network's gradient after one backward pass."""
    dist.init_process_group("gloo", store=dist.FileStore("smallest", 2), rank=rank, world_size=2)
    network = DistributedDataParallel(nn.Linear(4, 1))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [network(table.forward(items)).sum()])
        (found,) = [g for p, g in dist_autograd.get_gradients(context).items() if p.dim() == 2]
    del network  # first: DDP must not be the last that holds the process group
    dist.destroy_process_group()
    return found


# %%
import smallest

bags = [torch.tensor([[1, 2, 3]]), torch.tensor([[7, 8, 9]])]
futures = [rpc.rpc_async(NAMES[i], smallest.gradient, args=(tiny, i, bags[i])) for i in range(2)]
for future in futures:
    print(future.wait())

# %% [markdown]
# Different items, the same gradient: it is the mean of both. The backward pass went on through the server's table, too.

# %% [markdown]
# ## The real version
#
# A shop with 50 000 items. A visitor has looked at 20 of them, and belongs to one of eight kinds of people, which the model
# shall find out. The data are made here: six of ten items are of the kind that the visitor likes.

# %%
# %%writefile shop.py
import logging

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

logging.getLogger("torch.distributed.optim").setLevel("ERROR")  # it would mention TorchScript
ITEMS, KINDS, WIDTH = 50_000, 8, 64
BATCH = 32  # visitors a step and trainer
TABLE_RATE, NETWORK_RATE = 50.0, 0.3


def visitors(number, count):
    """Items [count, 20] that they looked at, and their kinds [count]."""
    generator = torch.Generator().manual_seed(number)
    kinds = torch.randint(KINDS, (count, 1), generator=generator)
    popular = torch.rand(count, 20, generator=generator) ** 3  # some items are seen by many
    items = (popular * ITEMS).long()
    liked = items - items % KINDS + kinds  # the kind of an item is the rest of its number
    likes = torch.rand(count, 20, generator=generator) < 0.6
    return torch.where(likes, liked.clamp(max=ITEMS - 1), items), kinds.flatten()


class Table(nn.EmbeddingBag):
    """The mean of the rows of a visitor's items; made from a seed, on whichever worker."""

    def __init__(self, seed=1, sparse=True):
        torch.manual_seed(seed)
        super().__init__(ITEMS, WIDTH, mode="mean", sparse=sparse)


def make_network(seed=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, KINDS))


def loss_of(table, network, rank, step):
    items, kinds = visitors(2 * step + rank, BATCH)
    return nn.functional.cross_entropy(network(table.forward(items)), kinds)


class Trainer:
    """Trains a copy of the network, and the table on the server.

    Its process group lives as long as it does.
    """

    def __init__(self, table, rank, meeting, timeout=None):
        from torch.distributed.rpc import RRef  # works only beside a running agent

        store = dist.FileStore(meeting, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        self.rank, self.table = rank, table
        self.network = DistributedDataParallel(make_network())
        local = [RRef(parameter) for parameter in self.network.parameters()]
        self.network_optimizer = DistributedOptimizer(torch.optim.SGD, local, lr=NETWORK_RATE)
        # Both trainers step the table, so their steps add up: half the rate makes it the mean.
        self.table_optimizer = DistributedOptimizer(
            torch.optim.SGD, table.remote_parameters(), lr=TABLE_RATE / 2
        )

    def step(self, number, in_turns=True):
        """Train with one batch; returns its loss."""
        with dist_autograd.context() as context:
            loss = loss_of(self.table, self.network, self.rank, number)
            dist_autograd.backward(context, [loss])  # averages the network's gradients
            self.network_optimizer.step(context)
            if in_turns:
                for turn in range(2):
                    if turn == self.rank:
                        self.table_optimizer.step(context)
                    dist.barrier()
            else:
                self.table_optimizer.step(context)
        return loss.item()

    def run(self, begin, end, in_turns=True):
        return [self.step(number, in_turns) for number in range(begin, end)]

    def weights(self):
        return {key: value.detach() for key, value in self.network.module.state_dict().items()}

    def close(self):
        del self.network  # first: DDP must not be the last that holds the process group
        dist.destroy_process_group()


# %% [markdown]
# The master makes the table on the server and a `Trainer` on both trainers. Then it only asks for steps.

# %%
import shop


class Training:
    """What the master holds: references."""

    def __init__(self, meeting, timeout=None):
        self.table = RemoteModule("server", shop.Table)
        self.trainers = [
            rpc.remote(name, shop.Trainer, args=(self.table, rank, meeting, timeout))
            for rank, name in enumerate(NAMES[:2])
        ]

    def run(self, begin, end, in_turns=True):
        """Losses of both trainers for these steps."""
        futures = [
            trainer.rpc_async(timeout=0).run(begin, end, in_turns) for trainer in self.trainers
        ]
        return [future.wait() for future in futures]

    def accuracy(self):
        """On visitors that were not trained with."""
        items, kinds = shop.visitors(1_000_000, 2000)
        network = shop.make_network()
        network.load_state_dict(self.trainers[0].rpc_sync().weights())
        with torch.no_grad():
            return (network(self.table(items)).argmax(1) == kinds).float().mean().item()

    def close(self):
        torch.futures.wait_all([trainer.rpc_async().close() for trainer in self.trainers])


STEPS, CHUNK = (4, 2) if SMALL else (400, 20)
training = Training("training")
losses = [[], []]
for begin in tqdm(range(0, STEPS, CHUNK), mininterval=1):
    for mine, new in zip(losses, training.run(begin, begin + CHUNK), strict=True):
        mine += new
print(f"loss {losses[0][0]:.2f} -> {losses[0][-1]:.2f}, accuracy {training.accuracy():.2f}")

# %% [markdown]
# ### The losses are the local model's
#
# The same in one process: two batches, the network steps once with the mean of their gradients, the table once with each.


# %%
def train_local(steps):
    """Losses of both batches of each step."""
    table, network = shop.Table(), shop.make_network()
    table_optimizer = torch.optim.SGD(table.parameters(), lr=shop.TABLE_RATE / 2)
    network_optimizer = torch.optim.SGD(network.parameters(), lr=shop.NETWORK_RATE)
    losses = [[], []]
    for step in range(steps):
        both = [shop.loss_of(table, network, rank, step) for rank in range(2)]
        network_optimizer.zero_grad()
        of_table = []
        for rank in range(2):
            table_optimizer.zero_grad()
            both[rank].backward()  # adds to the network's gradients
            of_table.append(table.weight.grad)
            losses[rank].append(both[rank].item())
        for parameter in network.parameters():
            parameter.grad /= 2
        network_optimizer.step()
        for table.weight.grad in of_table:
            table_optimizer.step()
    return losses


local = train_local(STEPS)
equal = sum(a == b for rank in range(2) for a, b in zip(local[rank], losses[rank], strict=True))
print(f"{equal} of {2 * STEPS} losses are equal")
assert local == losses

# %%
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for rank, color in enumerate(["tab:blue", "tab:orange"]):
    axis.plot(losses[rank], color=color, linewidth=3, alpha=0.4, label=f"trainer{rank}")
    axis.plot(local[rank], color="black", linewidth=0.7, label="local" if rank else None)
axis.set(xlabel="step", ylabel="cross entropy, nats", ylim=(0, None))
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Bit for bit, as in the third notebook. It takes two things: the sums are made in the same order (the trainers step the table
# *in turns*), and nobody reads the table while somebody still changes it (the barrier). Most programs do without both, and let
# each trainer step when it is ready (*Hogwild*, Niu et al. 2011). How far off is that?

# %%
training.close()
STEPS_APART = 4 if SMALL else 100
training = Training("hogwild")
apart = training.run(0, STEPS_APART, in_turns=False)
difference = [abs(a - b) for a, b in zip(apart[0], local[0], strict=False)]
print(f"largest difference of a loss in {STEPS_APART} steps: {max(difference):.4f}")
training.close()

# %% [markdown]
# ## What can go wrong
#
# **1. The whole model in DDP.** DDP asks its module for parameters, to copy them. Those of a `RemoteModule` are elsewhere, and
# that is what it says. Wrap the local part only.

# %%
# %%writefile mistakes.py
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shop


class Whole(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.network = table, shop.make_network()


def wrap_all(table):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        DistributedDataParallel(Whole(table))
    finally:
        dist.destroy_process_group()


def call(table, items):
    return table(items)


# %%
import mistakes


def show(error):
    """The line of a remote error that says what is wrong."""
    print([line for line in str(error).splitlines() if "Error" in line][-1])


try:
    rpc.rpc_sync("trainer0", mistakes.wrap_all, args=(tiny,))
except Exception as error:
    show(error)

# %% [markdown]
# **2. A `RemoteModule` that has travelled, called.** Here in the notebook `tiny(items)` worked. One that came as an argument
# has lost what `nn.Module` needs for a call: use its `forward`, as `loss_of` above.

# %%
try:
    rpc.rpc_sync("trainer0", mistakes.call, args=(tiny, bags[0]))
except Exception as error:
    show(error)

# %% [markdown]
# **3. One trainer has more batches than the other.** It waits in DDP's all-reduce for a partner who does not come. The error is
# the process group's, after its own time-out, here 2 s; by default that is half an hour. Give all the same number of steps, or
# use DDP's `join()`.

# %%
from datetime import timedelta

training = Training("uneven", timeout=timedelta(seconds=2))
first, second = (
    trainer.rpc_async().run(0, steps)
    for trainer, steps in zip(training.trainers, [2, 1], strict=True)
)
print("trainer1 is done:", len(second.wait()), "loss")
try:
    first.wait()
except Exception as error:
    show(error)

# %% [markdown]
# **4. `ModuleNotFoundError: No module named '_remote_module_non_scriptable'`.** Upstream generates this module when
# `torch.distributed.nn` is imported. A call that reaches a worker before that fails so, now and then: hence `load` at the top.

# %%
del training, tiny
group.stop(graceful=False)

# %% [markdown]
# ## What it costs
#
# We compare the table on the server, stepped in turns or Hogwild, with copies of everything in the trainers, in plain DDP.
# There DDP averages the gradients of the table as well: of the whole table, or with `sparse=True` only of the rows that were
# used.

# %%
# %%writefile everywhere.py
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shop


class Everything(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.network = shop.Table(sparse=sparse), shop.make_network()

    def forward(self, items):
        return self.network(self.table(items))


class Trainer:
    """As shop.Trainer, with a table of its own."""

    def __init__(self, sparse, rank, meeting):
        store = dist.FileStore(meeting, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        self.rank, self.model = rank, DistributedDataParallel(Everything(sparse))
        inner = self.model.module
        groups = [
            {"params": inner.table.parameters(), "lr": shop.TABLE_RATE},
            {"params": inner.network.parameters(), "lr": shop.NETWORK_RATE},
        ]
        self.optimizer = torch.optim.SGD(groups)

    def run(self, begin, end):
        for number in range(begin, end):
            items, kinds = shop.visitors(2 * number + self.rank, shop.BATCH)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(items), kinds).backward()
            self.optimizer.step()

    def close(self):
        del self.model
        dist.destroy_process_group()


# %% [markdown]
# Both back ends, in turns; trainer0 drives as well. (In this process TENSORPIPE could not use RRefs any more: torch keeps the
# agent with which they were used first.)

# %%
import functools

from torch_rpc_ext.profiler import profile

ROUNDS, STEPS = (1, 2) if SMALL else (3, 60)


def measure(steps, meeting):
    """Milliseconds a step of each way, and bytes of a step's forward: to the server, and back."""
    import everywhere

    def timed(run, *more):
        run(0, max(steps // 4, 1), *more)  # the first ones warm up
        begin = time.perf_counter()
        run(0, steps, *more)
        return (time.perf_counter() - begin) / steps * 1e3

    milliseconds = {}
    training = Training(f"{meeting} server")
    milliseconds["table on the server, in turns"] = timed(training.run)
    milliseconds["table on the server, Hogwild"] = timed(training.run, False)
    with profile(operators=False) as prof:
        training.run(0, 1)
    (row,) = [row for row in prof.table() if row.worker == "server" and "orward" in row.function]
    training.close()
    for sparse in (True, False):
        training.trainers = [
            rpc.remote(name, everywhere.Trainer, args=(sparse, rank, f"{meeting} DDP {sparse}"))
            for rank, name in enumerate(NAMES[:2])
        ]
        kind = "sparse" if sparse else "dense"
        run = functools.partial(run_copies, training.trainers)
        milliseconds[f"all copied, {kind} gradients"] = timed(run)
        training.close()
    return milliseconds, (row.sent_bytes // row.calls, row.result_bytes // row.calls)


def run_copies(trainers, begin, end):
    torch.futures.wait_all([trainer.rpc_async().run(begin, end) for trainer in trainers])


# %%
times = {}
with WorkerGroup(NAMES, env=QUIET) as ucx, WorkerGroup(NAMES, env=QUIET) as tensorpipe:
    ucx.run(load)
    tensorpipe.run(load)
    groups = {"UCX": ucx.init_rpc("UCX"), "TENSORPIPE": tensorpipe.init_rpc("TENSORPIPE")}
    for number in tqdm(range(ROUNDS), mininterval=1):
        for backend, each in groups.items():
            some, sizes = each["trainer0"].run(measure, STEPS, f"{backend}{number}")
            for way, milliseconds in some.items():
                times.setdefault(way, {}).setdefault(backend, []).append(milliseconds)

# %%
print(f"{'':<32}{'UCX':>8}{'TENSORPIPE':>12}   ms a step, median")
for way, by_backend in times.items():
    values = [statistics.median(by_backend[backend]) for backend in groups]
    print(f"{way:<32}{values[0]:>8.1f}{values[1]:>12.1f}")
table = shop.ITEMS * shop.WIDTH * 4
print(
    f"a forward sends {sizes[0] / 1e3:.1f} kB to the server, {sizes[1] / 1e3:.1f} kB come back; "
    f"the table has {table / 1e6:.1f} MB"
)

# %% [markdown]
# The last two lines use RPC only to start the steps: between the back ends they differ by chance. With the table on the server
# a step moves some kilobytes, however large the table is, and trainers need no memory for it. Where they have that memory,
# copies with sparse gradients are a good choice as well: they need no server, and no turns.
#
# ## Exercises
#
# 1. Let the trainers draw from 500 000 items. Which lines of the last table change, and which do not?
# 2. Put half of the table's columns on a second server. What does `forward` look like, and can both halves be asked at once?
# 3. Give trainer1 one batch less and repair it with `self.network.join()`. What must happen to the barrier?
# 4. Each trainer waits for the rows of its batch. Ask for those of the *next* batch before the backward pass of this one. Are the
#    losses still the local model's?
