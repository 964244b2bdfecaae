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
# # 1. Getting started
#
# **What you will learn**
#
# - to start worker processes from a notebook, and to make the notebook one of them
# - the three calls: `rpc_sync`, `rpc_async`, `remote`, and the `RRef` that the last one returns
# - to choose the back end, and to read `torch_rpc_ext.info()`
# - what three common mistakes look like, and what calls cost
#
# You need PyTorch, and nothing of its distributed parts. All runs on this machine, on the CPU.

# %% [markdown]
# ## The smallest version
#
# A *worker* is a process with a name. `WorkerGroup` starts some; `init_rpc` makes them find each other. With `join` the
# notebook becomes a worker as well, so that we can call the others from here.

# %%
import statistics
import time

import torch
import torch.distributed.rpc as rpc

import torch_rpc_ext
from torch_rpc_ext.launch import WorkerGroup

group = WorkerGroup(["alice", "bob"]).start()
group.init_rpc("UCX", join="notebook", num_worker_threads=4)
rpc.get_worker_info()

# %% [markdown]
# `rpc_sync(to, function, args)` runs a function over there, waits, and returns what it returned.

# %%
rpc.rpc_sync("alice", torch.add, args=(torch.ones(3), 41))

# %% [markdown]
# That is all there is to it. The rest of this notebook is about the forms of this call.

# %% [markdown]
# ## Functions of your own
#
# A function travels **by its name**: alice gets "`torch.add`", and imports it. So whatever you call must stand in a module that
# all workers can import. A cell of a notebook is not one, so we write a file. (In a program of several files you have one
# anyway.)

# %%
# %%writefile greetings.py
import os
import time

import torch
import torch.distributed.rpc as rpc


def greet(name):
    print(f"{name} called")
    return f"hello {name}, this is {rpc.get_worker_info().name}"


def slow_square(x):
    time.sleep(0.5)
    return x * x


class Counter:
    def __init__(self, start):
        self.value = start

    def add(self, n):
        self.value += n
        return self.value


def pid_of(counter_rref):
    return os.getpid() if counter_rref.is_owner() else None


def echo(x):
    return x


# %% [markdown]
# What a worker prints appears here, behind its name.

# %%
import greetings

print(rpc.rpc_sync("alice", greetings.greet, args=("notebook",)))
time.sleep(0.2)

# %% [markdown]
# ## Several calls at once: `rpc_async`
#
# It returns a future at once; `wait()` gives the result. Two calls of half a second to two workers take half a second.

# %%
begin = time.perf_counter()
futures = [rpc.rpc_async(to, greetings.slow_square, args=(7,)) for to in ("alice", "bob")]
print([future.wait() for future in futures], f"after {time.perf_counter() - begin:.1f} s")

# %% [markdown]
# ## Results that stay there: `remote` and `RRef`
#
# `remote` runs a function and keeps the result where it was made. You get an `RRef`, a reference to it. It can be passed to
# other workers; only `to_here()` copies the value. The owner frees it when nobody has a reference any more.

# %%
counter = rpc.remote("bob", greetings.Counter, args=(10,))
print("owner:", counter.owner().name)
print("value now:", counter.rpc_sync().add(5))  # a method, run at the owner
print("and then:", counter.rpc_async().add(1).wait())
print("a copy:", counter.to_here().value)

# %% [markdown]
# Alice knows of bob's counter only by reference, and is not its owner:

# %%
print("alice owns it:", rpc.rpc_sync("alice", greetings.pid_of, args=(counter,)) is not None)
print("bob owns it:  ", rpc.rpc_sync("bob", greetings.pid_of, args=(counter,)) is not None)

# %% [markdown]
# ## Functions of a cell: `run`
#
# `group.run` and `group["bob"].run` are no RPC. They run a function in the *main thread* of a worker, and take functions of
# cells too. Use them for what a program's `main` would do; as there, each worker is then free to call the others.


# %%
def ask(neighbour):
    import greetings

    return rpc.rpc_sync(neighbour, greetings.greet, args=("bob",))


group["bob"].run(ask, "alice")

# %% [markdown]
# ## Which way do the bytes go?
#
# `torch_rpc_ext.info()` describes the back end in this process. For each peer it says which transport small messages take
# ("control") and which large tensors ("bulk"). On one host these are shared memory and a direct copy from process to
# process, where the machine allows both.

# %%
info = torch_rpc_ext.info()
print("UCX", info["ucx"]["version"], "from the", info["ucx"]["source"])
for peer in info["agent"]["peers"]:
    print(f"{peer['worker']:<10}control: {peer['control']:<18}bulk: {peer['bulk']}")

# %% [markdown]
# ## What can go wrong
#
# **1. A function that the other side cannot import.** `double` stands in this cell, so bob looks for it in his own `__main__`,
# in vain. The remedy is a module. (Bob prints the error as well.)


# %%
def double(x):
    return 2 * x


try:
    rpc.rpc_sync("bob", double, args=(21,))
except AttributeError as error:  # its text is the whole traceback of the other side
    time.sleep(1)  # so that bob's output comes first
    print(next(line for line in str(error).splitlines() if "attribute" in line))

# %% [markdown]
# **2. A call that takes too long.** Each has a time-out, 60 s unless you say otherwise. It is about the answer: the function
# itself is not stopped.

# %%
try:
    rpc.rpc_sync("bob", greetings.slow_square, args=(7,), timeout=0.1)
except Exception as error:
    print(type(error).__name__, "-", error)

# %% [markdown]
# **3. A worker that dies.** Its calls fail at once, with its name. Here we kill bob while he computes.

# %%
future = rpc.rpc_async("bob", time.sleep, args=(100,))
time.sleep(0.2)
group["bob"].kill()
begin = time.perf_counter()
try:
    future.wait()
except Exception as error:
    print(type(error).__name__, "-", error)
print("noticed in less than 5 s:", time.perf_counter() - begin < 5)

# %% [markdown]
# The group is broken now. `stop()` ends what is left of it; nothing stays behind, also not when you restart the kernel.

# %%
del counter
group.stop(graceful=False)

# %% [markdown]
# ## What it costs
#
# The same program under both back ends: an empty call, and an echo of a large tensor, both ways. `%%timeit` would do; medians
# by hand show what is measured. Both groups live side by side and take turns, so that other work on
# the machine hits both alike; the calls are made by a worker, `driver`. The bytes are those that the profiler counts, without the headers of the transport.

# %%
from tqdm import tqdm

from torch_rpc_ext.profiler import profile

SMALL = False  # True: smaller sizes, for a first look
MEGABYTES = 4 if SMALL else 64
ROUNDS, CALLS = (1, 20) if SMALL else (5, 200)


def times_of(x, calls):
    """Seconds of each call, after some that warm up."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        rpc.rpc_sync("worker0", greetings.echo, args=(x,))
        times.append(time.perf_counter() - begin)
    return times[calls // 4 :]


def measure():
    return times_of(None, CALLS), times_of(torch.ones(MEGABYTES * 1_000_000 // 4), 8)


def count_bytes():
    with profile(operators=False) as prof:
        rpc.rpc_sync("worker0", greetings.echo, args=(torch.ones(1_000_000),))
    return prof.table()[0]


small, large, rows = {}, {}, {}
names = ["worker0", "driver"]
with WorkerGroup(names) as ucx, WorkerGroup(names) as tensorpipe:
    groups = {"UCX": ucx.init_rpc("UCX"), "TENSORPIPE": tensorpipe.init_rpc("TENSORPIPE")}
    for _ in tqdm(range(ROUNDS)):
        for backend, each in groups.items():
            few, many = each["driver"].run(measure)
            small.setdefault(backend, []).extend(few)
            large.setdefault(backend, []).extend(many)
    for backend, each in groups.items():
        rows[backend] = each["driver"].run(count_bytes)

# %%
medians = {
    backend: (statistics.median(small[backend]) * 1e6, statistics.median(large[backend]) * 1e3)
    for backend in groups
}
for backend, (microseconds, milliseconds) in medians.items():
    sent, back = rows[backend].sent_bytes, rows[backend].result_bytes
    print(
        f"{backend:<11} empty call {microseconds:.0f} us, {MEGABYTES} MB echo {milliseconds:.0f} ms"
    )
    print(f"{'':<11} echo of 4 MB: {sent / 1e6:.3f} MB there, {back / 1e6:.3f} MB back")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
titles = ["empty call, us", f"echo of {MEGABYTES} MB, ms"]
for index, (axis, title) in enumerate(zip(axes, titles, strict=True)):
    values = [medians[backend][index] for backend in groups]
    bars = axis.bar(list(groups), values, color=["tab:blue", "tab:gray"], width=0.6)
    axis.bar_label(bars, fmt="%.0f")
    axis.set_title(title)
    axis.margins(y=0.15)
    axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# An empty call costs a fixed time, mostly Python's. So few calls with much in them are better than many with little.
#
# ## Exercises
#
# 1. Start four workers. Let each call the next one in a ring, `WorkerGroup.run` starting all at once, and sum up their ranks.
# 2. Make 100 `rpc_async` calls of `slow_square` to one worker and time them with `num_worker_threads=4` and `16`. Which do you
#    expect to be faster, and by how much?
# 3. Pass an `RRef` of a `Counter` on bob to alice, and let *her* add to it 1000 times while the notebook does so too. Is the
#    sum right? Whose threads run `add`?
# 4. Find the size of tensor from which the echo takes longer than twice the empty call.
