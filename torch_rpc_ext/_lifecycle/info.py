"""What runs here, and why: the data of ``torch_rpc_ext.info()`` and of the command ``info``."""

from __future__ import annotations

import platform
import sys
from typing import Any

from torch_rpc_ext._base import environment
from torch_rpc_ext._base.version import __version__
from torch_rpc_ext._upstream import tensorpipe


def info() -> dict[str, Any]:
    """Describe the UCX back end of this process, initialised or not.

    ::

        for peer in torch_rpc_ext.info()["agent"]["peers"]:
            print(peer["worker"], peer["bulk"], peer["why"])

    Returns:
        A dict that JSON can hold: ``versions``, ``ucx`` (the library in use and why, or
        ``error``), ``environment``, ``takeover``, and ``agent``: None, or name, rank, world
        size, interface with reason, the agent's own description, and for each peer the
        state of the connection (such as ``open``), the transports in use for control and bulk,
        and why.
    """
    return {
        "versions": versions(),
        "ucx": describe_ucx(),
        "environment": environment.in_force(),
        "takeover": tensorpipe.is_active(),
        "agent": _agent(),
    }


def versions() -> dict[str, str]:
    """Return the versions of this package, torch, Python and the platform."""
    import torch

    return {
        "torch_rpc_ext": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def describe_ucx() -> dict[str, Any]:
    """Return which UCX is in use and why, and its transports; or why UCX cannot be loaded."""
    from torch_rpc_ext._native import loader

    try:
        ucx = loader.ucx()
        native = loader.load()
    except ImportError as error:
        return {"error": str(error)}
    return {
        "source": ucx.source,
        "version": ucx.version,
        "path": ucx.path,
        "reason": ucx.reason,
        "preset": dict(ucx.preset),
        "transports": [
            {"transport": transport, "device": device, "kind": kind}
            for transport, device, kind in native.ucx_transports()
        ],
    }


def _agent() -> dict[str, Any] | None:
    if "torch_rpc_ext._group.sessions" not in sys.modules:
        return None  # no session has begun; importing the module may fail: a torch without RPC
    from torch_rpc_ext._group import sessions, stores

    session = sessions.current()
    if session is None:
        return None
    with session.lock:
        members = sorted(session.members)
    return {
        "name": session.me.name,
        "rank": session.me.rank,
        "world_size": session.me.world_size,
        "group": "static" if session.directory is None else "dynamic",
        "members": members,
        "store": stores.describe(session.store),
        "interface": session.interface.described(),
        "transport": dict(session.agent.get_metrics()),
        "peers": [dict(peer) for peer in session.agent.describe_peers()],
    }
