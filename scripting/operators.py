"""Operators that tell TorchScript what a worker knows of itself and of its group.

They are torch.ops.torch_rpc_ext.*, too; importing this module defines them. They work in
TorchScript and in Python, and need no GIL::

    from torch_rpc_ext.scripting import operators

    @torch.jit.script
    def following() -> str:
        names = operators.worker_names()
        return names[(names.index(operators.own_name()) + 1) % len(names)]

All but is_alive() work over any back end of torch.distributed.rpc. The schemas are in
csrc/bindings/operators.cpp.

Raises (each operator, within TorchScript as torch.jit.Error):
    RuntimeError: RPC is not initialized in this process; or is_alive() over another back end, or
        for a worker that is not in the group. The text says what to do.
"""

from __future__ import annotations

import torch

from torch_rpc_ext._native import loader

loader.load()

_ops = torch.ops.torch_rpc_ext

#: worker_names() -> str[]: of all workers of the group, by their ids.
worker_names = _ops.worker_names
#: worker_ids() -> int[]: in the same order.
worker_ids = _ops.worker_ids
#: own_name() -> str: of this worker.
own_name = _ops.own_name
#: own_id() -> int: of this worker.
own_id = _ops.own_id
#: is_alive(str worker) -> bool: False once it has been noticed that the worker is gone. Connects to
#: it, so that this will be noticed; the first answer may come before. A stopped worker is alive.
is_alive = _ops.is_alive
#: metrics() -> Dict(str, float): the agent's counters, by upstream's names (agent.*).
metrics = _ops.metrics

__all__ = ["is_alive", "metrics", "own_id", "own_name", "worker_ids", "worker_names"]
