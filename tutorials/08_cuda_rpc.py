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
# # 8. CUDA RPC: device maps and streams
#
# **What you will learn**
#
# - device maps: which GPU of the other side a tensor goes to
# - a model in two stages on two workers, by CUDA RPC and by hand through the CPU
# - streams: why a call need not wait for a GPU, and what the result's future does instead
# - which mistakes in a map are found when, and how they read
#
# It runs everywhere. Where there is a GPU, the tensors live on it, with a device map between the workers. Where there is none, the
# same code runs with tensors on the CPU and without a map; the few cells that make no sense then say so. **The outputs that are kept in
# this file are those of a machine without a GPU; its GPU half has not been run on one yet.** The first notebook explains workers,
# `%%writefile` and `WorkerGroup`.

# %%
import statistics
import threading
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from tqdm import tqdm

from torch_rpc_ext import UcxRpcBackendOptions
from torch_rpc_ext.launch import WorkerGroup

SMALL = False  # True: smaller sizes, for a first look
GPUS = torch.cuda.device_count()
torch.set_num_threads(1)  # as the workers have: sums in the same order
if GPUS:
    print(f"{GPUS} GPU(s), the first is {torch.cuda.get_device_name(0)}")
else:
    print("no GPU: the tensors below are on the CPU")

# %% [markdown]
# ## The smallest version
#
# A CUDA tensor names its device: `cuda:0`. On the other side that name may stand for another GPU, for one that somebody else uses, or
# for nothing. So nothing is guessed: **without a device map, CUDA tensors are refused**. A map says, for one callee, where the
# tensors of each of my devices go.

# %%
HERE = "cuda:0" if GPUS else "cpu"
THERE = f"cuda:{min(1, GPUS - 1)}" if GPUS else "cpu"  # the second GPU, if there are two
MAPS = {"worker": {HERE: THERE}} if GPUS else {}

# Workers also print the errors that they answer with; we shall see those where they arrive.
group = WorkerGroup(["worker"], show=lambda name, line: None).start()
group.init_rpc("UCX", join="notebook", device_maps=MAPS)

x = torch.ones(3, device=HERE)
y = rpc.rpc_sync("worker", torch.add, args=(x, 1))
print(x.device, "->", THERE, "->", y.device, y.tolist())

# %% [markdown]
# With GPUs, the sum is computed on `THERE`, and the result comes back to `HERE`: answers take the **inverse** of the caller's map. The
# callee needs no map to answer, only to call. In a program without `WorkerGroup` the same is said with
# `options.set_device_map("worker", {"cuda:0": "cuda:1"})`, before `init_rpc`.

# %% [markdown]
# ## Maps, drawn
#
# Because answers go backwards, a map must be invertible: no two devices to the same one. The options accept maps on a machine without
# a GPU too, as long as devices have names. Three callees of a worker with two GPUs:

# %%
options = UcxRpcBackendOptions()
options.set_device_map("alice", {"cuda:0": "cuda:0", "cuda:1": "cuda:1"})
options.set_device_map("bob", {"cuda:0": "cuda:1"})
options.set_device_map("bob", {"cuda:1": "cuda:0"})  # may be said bit by bit
options.set_device_map("carol", {"cuda:1": "cuda:0"})

figure, axes = plt.subplots(1, 3, figsize=(8, 2.2), layout="constrained")
figure.supxlabel("blue: arguments, orange: results", fontsize=9)
for axis, (callee, device_map) in zip(axes, options.device_maps.items(), strict=True):
    for side, title in ((0, "me"), (1, callee)):
        axis.text(side, 1.6, title, ha="center", fontweight="bold")
        for number in range(2):
            box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "tab:gray"}
            axis.text(side, 1 - number, f"cuda:{number}", ha="center", va="center", bbox=box)
    for source, target in device_map.items():
        begin, end = (0.24, 1 - source.index), (0.76, 1 - target.index)
        for a, b, color, bend in ((begin, end, "blue", -0.12), (end, begin, "orange", -0.12)):
            style = {"arrowstyle": "->", "color": f"tab:{color}", "linewidth": 2}
            axis.annotate("", b, a, arrowprops={**style, "connectionstyle": f"arc3,rad={bend}"})
    axis.set(xlim=(-0.4, 1.4), ylim=(-0.4, 1.9))
    axis.axis("off")
# %% [markdown]
# A tensor on `cuda:0` cannot go to carol: her map does not have it.

# %% [markdown]
# ## The real version: a model in two stages
#
# The first stage is here, the second on the worker. By CUDA RPC, its input is passed as it is. By hand, it is copied to the CPU, sent,
# and copied to the GPU there; the result takes the same way back. (Without a GPU, a copy within the CPU's memory stands for one
# between GPU and CPU: `to` would find that there is nothing to do.)

# %%
# %%writefile two_stages.py
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn


def stage(seed, width, device):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU()).to(device)


def move(x, device):
    """Copy to another device, or within the CPU."""
    return x.to(device) if x.is_cuda or device != "cpu" else x.clone()


def call(module, x):
    """Called at the owner: forward of a tensor that is where the module is."""
    return module.local_value()(x)


def call_by_hand(module, x, device):
    """Called at the owner: forward of a tensor that was sent on the CPU, as is the result."""
    return move(module.local_value()(move(x, device)), "cpu")


def gradients(context, module):
    """Called at the owner: the gradients of the module's parameters in a context, on the CPU."""
    found = dist_autograd.get_gradients(context)
    return [found[parameter].cpu() for parameter in module.local_value().parameters()]


def echo(tensors):
    return tensors


# %%
import two_stages

ROWS, WIDTH = (1000 if SMALL else 16_000), 64
first = two_stages.stage(1, WIDTH, HERE)
second = rpc.remote("worker", two_stages.stage, args=(2, WIDTH, THERE))
x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)).to(HERE)


def forward(first, second, x):
    return rpc.rpc_sync("worker", two_stages.call, args=(second, first(x)))


def forward_by_hand(first, second, x):
    sent = two_stages.move(first(x), "cpu")
    return two_stages.move(
        rpc.rpc_sync("worker", two_stages.call_by_hand, args=(second, sent, THERE)), HERE
    )


direct, by_hand = forward(first, second, x), forward_by_hand(first, second, x)
print("the same result:", torch.equal(direct, by_hand), "on", direct.device)
assert torch.equal(direct, by_hand)

# %% [markdown]
# The backward pass goes the same way, backwards: gradients of what was sent take the inverse map. Compared with the local model, on
# one device, from the same seeds:

# %%
with dist_autograd.context() as context:
    loss = forward(first, second, x).pow(2).mean()
    dist_autograd.backward(context, [loss])
    here = dist_autograd.get_gradients(context)
    found = [here[parameter].cpu() for parameter in first.parameters()]
    found += rpc.rpc_sync("worker", two_stages.gradients, args=(context, second))

local = nn.Sequential(two_stages.stage(1, WIDTH, HERE), two_stages.stage(2, WIDTH, HERE))
local(x).pow(2).mean().backward()
expected = [parameter.grad.cpu() for parameter in local.parameters()]
print(sum(map(torch.equal, found, expected)), "of", len(expected), "gradients are equal")
assert all(map(torch.allclose, found, expected))

# %% [markdown]
# ## Streams: who waits for whom
#
# A GPU works off queues, called *streams*. Python only puts work into them and runs on; `x + 1` returns long before `x + 1` exists.
# That is what makes GPUs fast from Python, and what makes RPC difficult: when you call `rpc_async` with `x`, `x` may not be there
# yet. A careless library would copy what is in its memory at that moment. A slow one would stop Python until the GPU is done,
# twice for each call, and the GPU then has nothing to do while Python prepares its next work.
#
# The way out is an *event*, a mark in one stream for which other streams wait, without Python. To see it on any machine, here is a
# **model** of a GPU: a stream is a thread that works off a queue. It is no part of the package.

# %%
import queue


class Stream:
    """Runs what is put into it, in order, in a thread; notes when."""

    def __init__(self, name):
        self.name, self.queue, self.done = name, queue.SimpleQueue(), []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (work := self.queue.get()) is not None:
            work()

    def launch(self, label, seconds, function):
        def work():
            begin = time.perf_counter()
            time.sleep(seconds)  # what a large kernel would take
            function()
            self.done.append((label, begin, time.perf_counter()))

        self.queue.put(work)

    def record(self):
        event = threading.Event()
        self.queue.put(event.set)
        return event

    def wait(self, event):
        self.queue.put(event.wait)


# %% [markdown]
# One call in that model, `y = double(x)` on the other worker. Four streams take part: that of the caller's program, one that the RPC
# library sends with, one that the callee runs and answers on, and one that receives. `after` is the rule that one stream
# waits for another.


# %%
def one_call(ordered):
    """Run the model of a call; return its value, the streams, and when Python was done."""
    program, send, callee, receive = streams = [
        Stream(name) for name in ("program", "send", "callee", "receive")
    ]

    def after(stream, other):
        if ordered:
            stream.wait(other.record())

    memory = dict.fromkeys(("x", "x there", "y there", "y", "z"), 0)
    begin = time.perf_counter()
    program.launch("x = 3", 0.06, lambda: memory.update({"x": 3}))
    after(send, program)
    send.launch("copy x", 0.03, lambda: memory.update({"x there": memory["x"]}))
    after(callee, send)
    callee.launch("2 * x", 0.06, lambda: memory.update({"y there": 2 * memory["x there"]}))
    after(receive, callee)
    receive.launch("copy y", 0.03, lambda: memory.update({"y": memory["y there"]}))
    after(program, receive)  # what wait() of the call's future does
    program.launch("z = y + 1", 0.06, lambda: memory.update({"z": memory["y"] + 1}))
    python = time.perf_counter() - begin
    for stream in streams:  # only to print the result, as torch.cuda.synchronize()
        stream.record().wait()
        stream.queue.put(None)
    return memory["z"], streams, begin, python


runs = {"without events": one_call(False), "with events": one_call(True)}
figure, axes = plt.subplots(2, 1, figsize=(8, 4.2), sharex=True, layout="constrained")
for axis, (title, (z, streams, begin, _)) in zip(axes, runs.items(), strict=True):
    for row, stream in enumerate(streams):
        for label, start, end in stream.done:
            color = "tab:orange" if "copy" in label else "tab:blue"
            axis.barh(row, end - start, left=start - begin, color=color, edgecolor="white")
            middle = (start + end) / 2 - begin
            axis.text(middle, row, label, ha="center", va="center", color="white", fontsize=8)
    axis.set(yticks=range(4), yticklabels=[stream.name for stream in streams])
    axis.invert_yaxis()
    axis.set_title(f"{title}: z = {z}", loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
axes[-1].set(xlim=(0, None), xlabel="time, s")
print(f"with events, Python was done after {runs['with events'][3] * 1e3:.1f} ms")
assert runs["with events"][0] == 7

# %% [markdown]
# Without events everything starts at once and reads what is not there yet: a wrong number, and no error. With events each waits for
# the one before, and Python has not waited at all. (In a real call it does wait for the answer's arrival at `wait()`, because the
# answer is not only tensors; but not for any stream.)
#
# Upstream's API promises the second picture, and so does a back end that implements it:
#
# - what you pass is read after what your *current* stream has queued at the time of the call;
# - the callee's function runs with current streams of its own, on which its arguments are complete, and its results are sent
#   after what it queues there;
# - `future.wait()`, and a callback given to `then`, let your current stream wait for the results.
#
# So no `torch.cuda.synchronize()` is needed around a call. It is when you use *other* streams: then make the current one
# wait for them before you call, as for any function.

# %% [markdown]
# ## What can go wrong
#
# **1. No map.** Needs a CUDA tensor, and so a GPU.

# %%
if GPUS:
    with WorkerGroup(["caller", "callee"], show=lambda name, line: None) as mapless:
        mapless.init_rpc("UCX")

        def send_without_map():
            return rpc.rpc_sync("callee", torch.add, args=(torch.ones(1, device="cuda"), 1))

        try:
            mapless["caller"].run(send_without_map)
        except Exception as error:
            print(str(error).splitlines()[0])
else:
    print("no GPU here: not tried")

# %% [markdown]
# **2. Two devices to one.** Found when the option is set.

# %%
try:
    UcxRpcBackendOptions(device_maps={"bob": {"cuda:0": "cuda:1", "cuda:2": "cuda:1"}})
except ValueError as error:
    print(error)

# %% [markdown]
# **3. A worker that does not exist, or a device that does not.** Workers tell each other their devices in `init_rpc`, which then fails
# on all of them: before the first call, and with the map in the text. (`GPUS` is the number of GPUs, so `cuda:{GPUS}` is
# always one too many.)


# %%
wrong_maps = [{"eve": {"cpu": "cpu"}}, {"bob": {f"cuda:{GPUS}": "cpu"}}]
with WorkerGroup(["alice", "bob"], show=lambda name, line: None) as some:
    for device_maps in wrong_maps:
        try:
            some.init_rpc("UCX", device_maps=device_maps)
        except ValueError as error:
            print(error, "\n")
        some.shutdown_rpc()

# %% [markdown]
# **4. Numbers for devices, on a machine without a GPU.** `{0: 1}` is short for `{"cuda:0": "cuda:1"}`, but torch asks the machine which
# kind of accelerator a number is of. Names work everywhere.

# %%
try:
    print(UcxRpcBackendOptions(device_maps={"bob": {0: 1}}).device_maps)
except RuntimeError as error:
    print(error)

# %%
del second
group.stop()

# %% [markdown]
# ## What it costs
#
# The two stages under both back ends, in turns, by RPC and by hand; the median of all calls counts. A worker, `driver`, makes the
# calls. With a GPU its clock stops when the result is complete on the GPU.

# %%
from torch_rpc_ext import kernels
from torch_rpc_ext.profiler import profile

ROUNDS, CALLS = (1, 4) if SMALL else (5, 10)
COUNT, SIZE = 500, 1024  # small tensors, elements of each


def finish():
    if GPUS:
        torch.cuda.synchronize()


def seconds_of(function, *args):
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        function(*args)
        finish()
        times.append(time.perf_counter() - begin)
    return times[CALLS // 4 :]  # the first ones warm up


def many(tensors):
    """Send tensors as they are, in one call."""
    return rpc.rpc_sync("worker", two_stages.echo, args=(tensors,))


def one_block(tensors):
    """Copy tensors into one block, send it, and copy them out of the one that comes back."""
    offsets, size = kernels.block_offsets([tensor.nbytes for tensor in tensors])
    block = torch.empty(size, dtype=torch.uint8, device=HERE)
    kernels.gather(tensors, block, offsets)
    result = [torch.empty_like(tensor) for tensor in tensors]
    kernels.scatter(many(block), offsets, result)
    return result


def prepare():
    """Called on the driver: stages and tensors for the calls that follow, kept in the module."""
    first = two_stages.stage(1, WIDTH, HERE)
    second = rpc.remote("worker", two_stages.stage, args=(2, WIDTH, THERE))
    x = torch.randn(ROWS, WIDTH, device=HERE)
    small = list(torch.randn(COUNT, SIZE, device=HERE).unbind())
    assert torch.equal(forward(first, second, x), forward_by_hand(first, second, x))
    assert all(map(torch.equal, one_block(small), small))
    two_stages.stages, two_stages.small = (first, second, x), [t.clone() for t in small]


def measure():
    """Seconds of the calls, by what is called."""
    stages, small = two_stages.stages, two_stages.small
    with torch.no_grad():
        return {
            "two stages, by RPC": seconds_of(forward, *stages),
            "two stages, by hand": seconds_of(forward_by_hand, *stages),
            f"{COUNT} tensors of {SIZE * 4 // 1024} KB": seconds_of(many, small),
            "the same in one block": seconds_of(one_block, small),
        }


def count_bytes():
    with profile(operators=False) as prof:
        forward(*two_stages.stages)
        many(two_stages.small)
    return {row.function: row for row in prof.table()}


def release():
    del two_stages.stages


times, rows = {"UCX": {}, "TENSORPIPE": {}}, {}
names = ["worker", "driver"]
with WorkerGroup(names) as ucx, WorkerGroup(names) as tensorpipe:
    groups = {
        backend: each.init_rpc(backend, device_maps=MAPS)
        for backend, each in (("UCX", ucx), ("TENSORPIPE", tensorpipe))
    }
    for each in groups.values():
        each["driver"].run(prepare)
    for _ in tqdm(range(ROUNDS), mininterval=1):
        for backend, each in groups.items():
            for what, seconds in each["driver"].run(measure).items():
                times[backend].setdefault(what, []).extend(seconds)
    for backend, each in groups.items():
        rows[backend] = each["driver"].run(count_bytes)
        each["driver"].run(release)

# %%
print(f"the input of the second stage is {ROWS}x{WIDTH} floats: {ROWS * WIDTH * 4 / 1e6:.2f} MB")
for backend, functions in rows.items():
    for name in ("two_stages.call", "two_stages.echo"):
        row = functions[name]
        print(
            f"{backend:<11}{name:<16}{row.sent_bytes / 1e6:6.2f} MB there, "
            f"{row.result_bytes / 1e6:5.2f} MB back"
        )

# %%
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
for shift, (backend, color) in enumerate((("UCX", "tab:blue"), ("TENSORPIPE", "tab:gray"))):
    values = [statistics.median(seconds) * 1e3 for seconds in times[backend].values()]
    places = [place + 0.4 * shift for place in range(len(values))]
    bars = axis.barh(places, values, height=0.38, color=color, label=backend)
    axis.bar_label(bars, fmt="%.1f", padding=3)
axis.set(yticks=[i + 0.2 for i in range(4)], yticklabels=list(times["UCX"]))
axis.set_xlabel(f"ms a call, tensors on {HERE}")
axis.invert_yaxis()
axis.margins(x=0.12)
figure.legend(frameon=False, ncols=2, loc="outside upper right")
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# By hand, the input and the result are each copied twice more. On a GPU it has a second price, which a machine without one cannot show:
# a copy to the CPU makes Python wait until the GPU has done all its work, on both sides, in each call.
#
# Many small tensors cost by their number, not by their bytes. `torch_rpc_ext.kernels` has `gather` and `scatter`, which copy them
# into one block and back. On a GPU with numba-cuda that is one launch for all; elsewhere it is plain torch, a copy for each, so that
# what the call saves is spent again.
#
# ## Exercises
#
# 1. In the model of the streams, leave out only the last `after`. What is `z`? Which mistake in a program looks like this?
# 2. Let the model make *two* calls, each with streams of its own for sending, callee and receiving. How much of them can happen
#    at the same time?
# 3. Put the second stage into a `torch.distributed.nn.RemoteModule` on `f"worker/{THERE}"`. On which device does its `forward`
#    return with a map, and on which without?
# 4. With a GPU: give the map to the notebook only (`rpc.init_rpc` without `WorkerGroup`), and let the worker *call* the notebook
#    with a CUDA tensor. What does the error say? Which map is missing?
