"""Operators that tell TorchScript what a worker knows of itself and of its group.

Importing this module defines them, also as torch.ops.torch_rpc_ext.*. They work in TorchScript and
in Python, and need no GIL::

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

#: worker_names() -> str[]: names of all workers of the group, sorted by their ids.
worker_names = _ops.worker_names
#: worker_ids() -> int[]: ids of the same workers, in the same order.
worker_ids = _ops.worker_ids
#: own_name() -> str: name of this worker.
own_name = _ops.own_name
#: own_id() -> int: id of this worker.
own_id = _ops.own_id
#: is_alive(str worker) -> bool: False once this worker has noticed that the other one is gone. To
#: notice that, this worker connects to the other one; the first answer does not wait for the
#: connection. A stopped process (SIGSTOP) is alive.
is_alive = _ops.is_alive
#: metrics() -> Dict(str, float): the agent's counters, by upstream's names (agent.*).
metrics = _ops.metrics

__all__ = ["is_alive", "metrics", "own_id", "own_name", "worker_ids", "worker_names"]
