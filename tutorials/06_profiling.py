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
# # 6. Why is it slow? Profiling a group of workers
#
# **What you will learn**
#
# - to record what all workers do at the same time, with `torch_rpc_ext.profiler.profile`
# - to read its table, its picture and its trace, and which of them answers which question
# - to find a bottleneck, remove it, and measure what that gained; then the next one
# - what recording costs
#
# The first notebook explains workers, `%%writefile` and `WorkerGroup`.

# %% [markdown]
# ## The smallest version
#
# `profile` records the calls of all workers of the group while its block runs. Here are three calls of `torch.mm` to one
# worker.

# %%
# %matplotlib inline
import os
import statistics
import time

os.environ["KINETO_LOG_LEVEL"] = "99"  # torch.profiler would tell when it starts and stops

import matplotlib.pyplot as plt
import torch
import torch.distributed.rpc as rpc
from tqdm import tqdm

from torch_rpc_ext.launch import WorkerGroup
from torch_rpc_ext.profiler import profile

SMALL = False  # True: smaller sizes, for a first look
torch.set_num_threads(1)  # as the workers have
SHARDS = ["shard0", "shard1", "shard2"]


def start_profiler():
    """torch.profiler takes a second to start, and wants the main thread for it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass


group = WorkerGroup(SHARDS).start()
start_profiler()
group.run(start_profiler)
group.init_rpc("UCX", join="gateway")

with profile() as prof:
    for _ in range(3):
        rpc.rpc_sync("shard0", torch.mm, args=(torch.ones(300, 300), torch.ones(300, 300)))
print(prof.summary())

# %% [markdown]
# A row for each function and callee: how many calls, how many bytes, and the median (`p50`) and the slowest hundredth (`p99`)
# of the times. *Total* is the caller's: from the call to the result. *Execution* is the function's on the callee, and is known
# for Python functions, not for operators such as `mm`. What total has beyond execution went into packing, the wire and waiting.
# The last line says how exactly times of different workers can be compared.

# %% [markdown]
# ## The real version
#
# A search service. Three shards hold 40 000 pages each: a vector of 64 numbers and a kilobyte of text. The gateway, this
# notebook, gets two queries at a time and finds for each of them the ten most similar vectors of all shards. Somebody has
# written it in an afternoon, and it is slow.

# %%
# %%writefile search.py
import torch
import torch.distributed.rpc as rpc

BEST = 10


class Shard:
    """Some of the pages, on one worker: a vector and a kilobyte of text of each."""

    def __init__(self, seed, rows=40_000, width=64):
        generator = torch.Generator().manual_seed(seed)
        self.vectors = torch.nn.functional.normalize(torch.randn(rows, width, generator=generator))
        self.texts = torch.zeros(rows, 1000, dtype=torch.uint8)

    def fetch(self):
        return self.vectors, self.texts

    def search(self, queries):
        return search(self.vectors, queries)

    def search_topk(self, queries):
        return (queries @ self.vectors.T).topk(BEST)


def search(vectors, queries):
    """The best scores and their rows, [queries, BEST] each."""
    scores, rows = (queries @ vectors.T).sort(descending=True)
    return scores[:, :BEST], rows[:, :BEST]


def merge(found):
    """The best of all shards: their scores, [queries, BEST]."""
    return torch.cat([scores for scores, _ in found], 1).sort(descending=True)[0][:, :BEST]


def first_version(shards, queries):
    found = []
    for shard in shards:
        vectors, texts = shard.rpc_sync().fetch()
        found.append(search(vectors, queries))
    return merge(found)


# %%
import search

shards = [rpc.remote(name, search.Shard, args=(seed,)) for seed, name in enumerate(SHARDS)]
queries = torch.nn.functional.normalize(torch.randn(2, 64))
answer = search.first_version(shards, queries)  # to compare with, below


def milliseconds(*versions, times=5 if SMALL else 30):
    """The median times of a request in several versions, in turns."""
    measured = [[] for _ in versions]
    for _ in range(times):
        for version, its_own in zip(versions, measured, strict=True):
            begin = time.perf_counter()
            found = version(shards, queries)
            its_own.append((time.perf_counter() - begin) * 1e3)
            torch.testing.assert_close(found, answer)
    return [statistics.median(its_own) for its_own in measured]


print(f"{milliseconds(search.first_version)[0]:.1f} ms a request")

# %% [markdown]
# ### First: the table
#
# Ask it first, because it is one line of code. Which calls are there, how often, how large, and where does their time go?

# %%
with profile() as prof:
    for _ in range(5):
        search.first_version(shards, queries)
print(prof.summary())

# %% [markdown]
# Look at the columns from left to right. Five calls for each shard: as many as requests, so nobody calls too often. No errors.
# But each result has 50 MB, and execution takes next to nothing of the total: the time of the calls goes into *moving the
# pages*, three times a request. The data travel to the queries. These have half a kilobyte; let them travel to the data.

# %%
# %%writefile search_there.py
from search import merge


def second_version(shards, queries):
    return merge([shard.rpc_sync().search(queries) for shard in shards])


# %%
from search_there import second_version

with profile() as prof:
    for _ in range(5):
        second_version(shards, queries)
print(prof.summary())
before, after = milliseconds(search.first_version, second_version)
print(f"{before:.1f} -> {after:.1f} ms a request")

# %% [markdown]
# Each call now sends about a kilobyte and brings less than 1 kB back. Most of the total is execution.
#
# ### Second: the picture
#
# The table adds up and does not say *when*. The picture does: time goes from left to right, each worker has a band. Blue is a
# call at its caller, orange its execution, grey the operators of a thread, and arrows are requests and responses. We draw a
# single request.

# %%
with profile() as prof:
    second_version(shards, queries)
prof.plot()

# %% [markdown]
# A staircase: while one shard works, the two others wait for their turn. That is the mark of `rpc_sync` in a loop. The shards
# do not need each other's results, so ask all of them and then wait.

# %%
# %%writefile search_at_once.py
from search import merge


def third_version(shards, queries):
    futures = [shard.rpc_async().search(queries) for shard in shards]
    return merge([future.wait() for future in futures])


# %%
from search_at_once import third_version

before, after = milliseconds(second_version, third_version)
with profile() as prof:
    third_version(shards, queries)
print(f"{before:.1f} -> {after:.1f} ms a request")
prof.plot()

# %% [markdown]
# The executions lie above each other. (On a machine with fewer cores than shards they share the cores: each then takes longer
# than it did alone.)
#
# ### Third: the trace
#
# What is left is execution, and neither table nor picture says what a function does. The trace does: it holds every operator of
# every thread, beside the calls. https://ui.perfetto.dev opens the file and lets you zoom into it. It is plain JSON, so
# questions can also be asked here.

# %%
import collections
import json


def operators(path, worker):
    """{name: ms} of the operators that ran on a worker."""
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    (process,) = {
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"]["name"].startswith(worker)
    }
    spent = collections.Counter()
    for event in events:
        if event["pid"] == process and event.get("cat") == "cpu_op":
            spent[event["name"]] += event["dur"] / 1e3
    return spent


prof.export_chrome_trace("trace.json")
for name, spent in operators("trace.json", "shard1").most_common(5):
    print(f"{name:<28}{spent:8.2f} ms")

# %% [markdown]
# The product of queries and vectors (`mm`, within `matmul`) is the work itself. `sort` takes more: it puts 40 000 scores of
# each query in order, and we keep ten. `topk` finds ten without ordering the others.

# %%
# %%writefile search_topk.py
from search import merge


def fourth_version(shards, queries):
    futures = [shard.rpc_async().search_topk(queries) for shard in shards]
    return merge([future.wait() for future in futures])


# %%
from search_topk import fourth_version

VERSIONS = {
    "first version": search.first_version,
    "search at the shards": second_version,
    "all shards at once": third_version,
    "topk in place of sort": fourth_version,
}
medians = milliseconds(*VERSIONS.values())
figure, axis = plt.subplots(figsize=(6, 2.2), layout="constrained")
bars = axis.barh(list(VERSIONS), medians, color="tab:blue")
axis.bar_label(bars, fmt=" %.1f")
axis.set(xlabel="ms a request")
axis.invert_yaxis()
axis.margins(x=0.12)
axis.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Three tools, three questions: the table says *how much*, the picture *when*, the trace *what*. The answers are the same in all
# four versions: `milliseconds` compares them each time. Do that too when you make something faster.

# %% [markdown]
# ## What can go wrong
#
# **1. Recording the first call.** It makes connections, starts threads, imports modules and fills caches. Warm up first, unless
# it is the start that you want to see. Here are three requests to a shard that nobody has called yet, from another shard:


# %%
def first_requests(queries):
    """Run on a worker: ms of three calls to its neighbour."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        rpc.rpc_sync("shard2", torch.sum, args=(queries,))
        times.append((time.perf_counter() - begin) * 1e3)
    return times


print([f"{ms:.2f} ms" for ms in group["shard0"].run(first_requests, queries)])

# %% [markdown]
# **2. A name that is not in the group, and two profiles at once.** A worker records for one `profile` at a time.

# %%
try:
    profile(workers=["gateway", "shard7"]).__enter__()
except ValueError as error:
    print("ValueError:", error)

with profile(operators=False):
    try:
        profile(operators=False).__enter__()
    except RuntimeError as error:
        print("RuntimeError:", error)

# %% [markdown]
# **3. A worker that dies meanwhile.** What the others have recorded is there all the same; `missing` says who is not.

# %%
import logging

logging.getLogger("torch_rpc_ext.profiler").setLevel("ERROR")  # it would warn as well
with profile(operators=False) as prof:
    second_version(shards, queries)
    group["shard2"].kill()
for row in prof.table():
    print(f"{row.function:<14}{row.worker:<8} total {row.total_p50 * 1e3:6.1f} ms")
print(prof.missing)

# %%
shards = None
group.stop(graceful=False)

# %% [markdown]
# ## What it costs
#
# While nothing is recorded, nothing. While it records, each call notes when it begins and ends on both sides; with operators,
# torch's own profiler runs too. Measured with a small call, to which it matters most, under both back ends, in turns. The limit
# of the fastest tenth counts: other work on the machine disturbs it less than the median.

# %%
ROUNDS, CALLS = (1, 20) if SMALL else (5, 200)
KINDS = {"off": None, "calls only": False, "with operators": True}


def measure(calls):
    """{kind: us of each call}, and bytes of a call: to the callee, and back."""
    import search  # a Python function, as most calls are

    x, times, sizes = torch.ones(8, 256), {}, None
    for kind, operators in KINDS.items():
        prof = None if operators is None else profile(operators=operators)
        if prof:
            prof.__enter__()
        times[kind] = []
        for _ in range(calls):
            begin = time.perf_counter()
            rpc.rpc_sync("shard0", search.merge, args=([(x, None)],))
            times[kind].append((time.perf_counter() - begin) * 1e6)
        if prof:
            prof.__exit__(None, None, None)
            row = prof.table()[0]
            sizes = row.sent_bytes // row.calls, row.result_bytes // row.calls
    return times, sizes


times = {}
names = ["shard0", "gateway"]
with WorkerGroup(names) as ucx, WorkerGroup(names) as tensorpipe:
    for each in (ucx, tensorpipe):
        each.run(start_profiler)
    groups = {"UCX": ucx.init_rpc("UCX"), "TENSORPIPE": tensorpipe.init_rpc("TENSORPIPE")}
    for each in groups.values():
        each["gateway"].run(measure, 10)  # warms up
    for _ in tqdm(range(ROUNDS), mininterval=1):
        for backend, each in groups.items():
            some, sizes = each["gateway"].run(measure, CALLS)
            for kind, us in some.items():
                times.setdefault(kind, {}).setdefault(backend, []).extend(us)

# %%
print(f"{'':<18}{'UCX':>8}{'TENSORPIPE':>12}   us a call, a tenth is faster")
for kind, by_backend in times.items():
    values = [statistics.quantiles(by_backend[backend], n=10)[0] for backend in groups]
    print(f"{kind:<18}{values[0]:>8.0f}{values[1]:>12.0f}")
print(f"{sizes[0] / 1e3:.1f} kB there, {sizes[1] / 1e3:.1f} kB back")

# %% [markdown]
# So trust the proportions in a profile more than its microseconds; and measure what you gained without it, as above.
#
# ## Exercises
#
# 1. Write a version that sends each of the two queries in a call of its own. Which column of the table shows it?
# 2. Give `Shard.search_topk` a `time.sleep(0.005)` for shard1 only. What do table and picture look like? Which percentile of a request's
#    time depends on the slowest shard?
# 3. Let `Shard.search` hold a `threading.Lock`, and send two requests at once. Where does the time of waiting for the lock show?
# 4. Open `trace.json` in Perfetto and follow an arrow from a call to its execution. How long is a request on its way?
# 5. A group that runs already can be recorded from outside: `python -m torch_rpc_ext trace`. Try it on a dynamic group.
