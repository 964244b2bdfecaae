"""What a worker tells about itself to other workers and to the command line.

Other workers, and the commands, call the functions of this module over RPC::

    from torch_rpc_ext import monitoring

    for name in monitoring.other_names():
        state = rpc.rpc_sync(name, monitoring.snapshot)
        print(name, state["host"], state["counters"]["agent.queued_requests"])

A worker with an ``allow_list`` serves these functions when the list names
``torch_rpc_ext.monitoring``. Without an RPC group all of them but is_initialized() raise
RuntimeError.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.distributed.rpc import api as _untyped_api

api: Any = _untyped_api  # upstream's functions have no types

__all__ = ["is_initialized", "member_names", "other_names", "snapshot"]


def is_initialized() -> bool:
    """Return whether this process is in an RPC group, over any back end."""
    return bool(api._is_current_rpc_agent_set())


def member_names() -> list[str]:
    """Return the names of the workers that this worker knows in its group, sorted."""
    return sorted(info.name for info in api._get_current_rpc_agent().get_worker_infos())


def other_names() -> list[str]:
    """Return member_names() without the name of this worker."""
    me = api._get_current_rpc_agent().get_worker_info().name
    return [name for name in member_names() if name != me]


def _nothing() -> None:
    """Do nothing. `ping` calls this function to measure latency."""


def _take(tensor: torch.Tensor) -> int:
    """Return the size of a tensor, bytes. `ping` calls this function to measure bandwidth."""
    return tensor.nbytes


def snapshot() -> dict[str, Any]:
    """Describe this worker now.

    Returns:
        A dict that JSON can hold: ``worker``, ``rank``, ``host``, ``pid``, ``time`` (monotonic,
        s; for rates between two snapshots), ``counters`` (the agent's get_metrics() as numbers),
        ``histograms`` (name -> upper bounds, counts, and sum; there is one count more than there
        are bounds, for values above the last bound; times in ns, sizes in bytes), ``members``
        (names), ``lost`` (the members that cannot be reached any more), ``waiting`` (caller ->
        number and bytes of its requests that wait here for room) and ``peers`` (for each connection
        ``worker``, ``control``, ``bulk`` and ``why``).
        On TENSORPIPE ``histograms``, ``lost``, ``waiting`` and ``peers`` are empty.
    """
    agent = api._get_current_rpc_agent()
    me = agent.get_worker_info()
    members = member_names()
    on_ucx = hasattr(agent, "describe_peers")
    return {
        "worker": me.name,
        "rank": me.id,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "time": time.monotonic(),
        "counters": _numbers(agent.get_metrics()),
        "histograms": agent.get_histograms() if on_ucx else {},
        "members": members,
        "lost": sorted(set(agent.lost_workers()) & set(members)) if on_ucx else [],
        "waiting": agent.waiting_callers() if on_ucx else {},
        "peers": [dict(peer) for peer in agent.describe_peers()] if on_ucx else [],
    }


def _numbers(metrics: dict[str, str]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}
