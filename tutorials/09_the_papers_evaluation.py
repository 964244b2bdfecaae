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
# # 9. The paper's evaluation
#
# The paper "PyTorch RPC: Distributed Deep Learning Built on Tensor-Optimized Remote Procedure Calls" (MLSys 2023) shows its work by
# four applications: a solver of video games (A3C), federated learning, a GPT over several workers, and a recommendation model
# (DLRM). `benchmarks/applications/` has them, and `make paper` runs them beside TENSORPIPE and gRPC.
#
# **What you will learn**
#
# - what each application sends, and which claim of the paper it stands for
# - to run one on two back ends, and to *check* that both compute what one process computes
# - to read the stored results: figures, plots, lines of communication

# %%
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from IPython.display import Image, display

from benchmarks import records
from benchmarks.applications import APPLICATIONS, idle, lines, page, report
from benchmarks.applications.gpt import model as gpt
from benchmarks.applications.runner import run_once, why_not

SMALL = False  # True: smaller sizes, for a first look
torch.set_num_threads(1)  # as the applications' processes have: sums in the same order

# %% [markdown]
# ## The smallest version
#
# A *job* is one case of an application. `run_once` starts its processes, as torchrun would, and returns what they measured. The
# program is the same on both back ends; only the name of the back end differs. Here a tiny GPT over two stages.

# %%
jobs = {job.name: job for job in APPLICATIONS["gpt"].jobs(small=True)}
job = jobs["1f1b-2"]
losses = {way: run_once(APPLICATIONS["gpt"], job, way)["losses"] for way in ("tensorpipe", "ucx")}
for way, found in losses.items():
    print(f"{way:<12}", *(f"{loss:.6f}" for loss in found))

# %% [markdown]
# The model in one process, over the same micro-batches one after another, has the same losses, to the last bit. A comparison of
# speeds is worth something only then.

# %%
local = gpt.Local(job)
here = [local.step(*batch) for batch in gpt.batches(job)]
print(f"{'one process':<12}", *(f"{loss:.6f}" for loss in here))
print("the same bits:", losses["tensorpipe"] == losses["ucx"] == here)

# %% [markdown]
# The long run of this application goes further: one of its processes is killed, another takes its place, and the training is
# resumed from a checkpoint. `run_once` would raise if a single loss differed from the unbroken run's.

# %%
if not SMALL:
    figures = run_once(APPLICATIONS["gpt"], jobs["long"], "ucx")
    print(f"text held out: loss {figures['before'][0]:.2f} -> {figures['after'][0]:.2f}")

# %% [markdown]
# ## The real version
#
# `make paper` takes most of an hour and stores all figures in `docs/evaluation.jsonl`, from which
# [the page](../docs/evaluation.md) is written. What follows is made from that file, so it says nothing about the machine that you
# are reading this on. The first thing to look at is the machine, and whether it was quiet.

# %%
STORED = Path(page.DOCS) / "evaluation.jsonl"
stored = records.read(STORED)
for machine in records.of_type(stored, "machine"):
    titles = ", ".join(machine["applications"])
    share = machine.get("others_cpu_share", 0)
    print(f"{titles}: {machine['time'][:10]}, {machine['cores']} cores; others used {share:.0%}")

# %%
pictures = page.draw(stored, Path("."))
for name, files in pictures.items():
    print(APPLICATIONS[name].title)
    for file in files:
        display(Image(filename=file))
for name in sorted(set(APPLICATIONS) - set(pictures)):
    print(f"{name}: no figures stored yet; make paper PAPER={name}")

# %% [markdown]
# The paper's first claim is about *A3C*: with 15 actors an update took 1025 ms on gRPC, 1638 ms on CPU RPC (TENSORPIPE) and 14.6 ms
# on CUDA RPC. CPU RPC lost to gRPC. In the case below actors wait instead of playing, as if each had a core of its own, so that
# the delay is that of the communication and of the learner.

# %%
for metric in ("fetch", "update"):
    found = {
        one["way"]: one["median"]
        for one in records.of_type(stored, "result")
        if one["job"] == "pong-15-wait" and one["metric"] == metric
    }
    for way, seconds in found.items():
        print(f"{metric:<8}{way:<22}{seconds * 1e3:6.1f} ms{seconds / found['ucx']:6.1f} x UCX")

# %% [markdown]
# The claim of the abstract: one tenth of the user code. A script counts the lines of the files that communicate and do nothing
# else; anybody can count again.

# %%
for name, application in APPLICATIONS.items():
    print(name)
    print(lines.text(lines.of_application(name), application.paper_lines))

# %% [markdown]
# ## What can go wrong
#
# A case that cannot run here says why, and the others go on: a package is missing, the memory does not suffice, network namespaces
# are not permitted.

# %%
print(why_not(APPLICATIONS["gpt"], replace(job, packages=("no_such_package",)), "ucx"))
try:
    gpt.check([1.0], job, exactly=True)
except RuntimeError as error:
    print("a run that computes something else is a failure, not a figure:", error)
print(*report.missing(stored), sep="\n")

# %% [markdown]
# And a figure of a busy machine is worth little: look at the share that others used, above, and at the spread of the rounds.

# %%
for one in records.of_type(stored, "result"):
    if one["job"] == "pong-15-wait" and one["metric"] == "update":
        rounds = [figure * 1e3 for figure in one["rounds"]]
        print(
            f"{one['way']:<22}{min(rounds):6.1f} to {max(rounds):.1f} ms, {median(rounds):.1f} ms"
        )

# %% [markdown]
# ## What it costs
#
# With more processes than cores, what an idle process takes is missing elsewhere. Two processes are connected and nobody calls:

# %%
print(idle.text({one["kind"]: one["threads"] for one in records.of_type(stored, "idle")}))

# %% [markdown]
# ## Exercises
#
# 1. Run `python -m benchmarks.applications gpt --small` with `--ways ucx` and without. What does the column of gRPC say, and why?
# 2. In `benchmarks/applications/federated/with_rpc.py` the server asks all clients at once and takes the answers in any order. Why
#    are the weights at the end the same bits in each run?
# 3. Give the A3C program one more method of the learner, by both RPC and gRPC. How many lines does each need?
# 4. Add an application: a folder with `model.py`, `with_rpc.py` and `application.py` (see `benchmarks/applications/interface.py`).
