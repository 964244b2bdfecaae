"""Worker processes on this host, for notebooks, scripts and tests::

    from torch_rpc_ext.launch import WorkerGroup

    with WorkerGroup(["ps", "trainer0", "trainer1"]) as group:
        group.init_rpc("UCX", join="notebook")  # this process becomes a worker as well
        rpc.rpc_sync("ps", torch.add, args=(torch.ones(2), 1))
        group["trainer0"].run(train, 10)  # without RPC: in the main thread of that process

A line that a worker prints is shown here behind the worker's name. No worker outlives this process,
however this process ends. Works with any back end. For several hosts use torchrun.
"""

from __future__ import annotations

from torch_rpc_ext.launch.group import WorkerGroup
from torch_rpc_ext.launch.process import Worker, WorkerExitedError

__all__ = ["Worker", "WorkerExitedError", "WorkerGroup"]
