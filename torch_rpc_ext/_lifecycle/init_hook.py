"""init_rpc on UCX: the store opens with a time limit, and what can fail early fails early.

init_rpc opens the store before it calls the back end, and torch's TCPStore waits inside C++ for all
workers: up to 30 minutes, without reacting to Ctrl-C. So init_rpc gets a thin wrapper, which notes
that a call is for UCX, and the function that opens TCP stores looks at this note. Calls for other
back ends pass through both unchanged.
Source: torch/distributed/rpc/__init__.py, torch/distributed/rendezvous.py.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from typing import Any

from torch_rpc_ext._base.environment import check_backend

_MARK = "_torch_rpc_ext_wrapper"
_call = threading.local()


def install(rpc: Any) -> None:
    """Wrap rpc.init_rpc and the opening of TCP stores. Idempotent.

    Args:
        rpc: the module torch.distributed.rpc.
    """
    if hasattr(rpc.init_rpc, _MARK):
        return
    rpc.init_rpc = _wrap_init_rpc(rpc, rpc.init_rpc)
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if hasattr(rendezvous, "_create_c10d_store"):
        rendezvous._create_c10d_store = _wrap_create_store(rendezvous._create_c10d_store)


def in_init_rpc() -> bool:
    """Return whether this thread is inside init_rpc for UCX."""
    return getattr(_call, "timeout", None) is not None


def _wrap_init_rpc(rpc: Any, original: Any) -> Any:
    @functools.wraps(original)
    def init_rpc(
        name: str,
        backend: Any = None,
        rank: int = -1,
        world_size: int | None = None,
        rpc_backend_options: Any = None,
    ) -> None:
        check_backend()
        member = _ucx_member(rpc, backend, rpc_backend_options)
        if member is None:
            original(name, backend, rank, world_size, rpc_backend_options)
            return
        from torch_rpc_ext._upstream import torch_names

        torch_names.require(torch_names.UCX)  # before the import of modules that need the names
        from torch_rpc_ext._lifecycle import starting

        starting.prepare(rank, world_size, rpc_backend_options)
        _call.timeout = starting.init_timeout(rpc_backend_options)
        try:
            original(name, member, rank, world_size, rpc_backend_options)
        finally:
            _call.timeout = None

    setattr(init_rpc, _MARK, True)
    return init_rpc


def _ucx_member(rpc: Any, backend: Any, options: Any) -> Any:
    """Return the back end that init_rpc would take if that is ours, else None."""
    registry = rpc.backend_registry
    if options is not None and not isinstance(options, rpc.RpcBackendOptions):
        return None  # upstream's error is the right one
    if backend is None:
        if _is_ours(options):
            # Naming the back end avoids upstream's warning about options without a back end.
            return registry.BackendType["UCX"]
        if options is not None and not isinstance(options, rpc.TensorPipeRpcBackendOptions):
            return None
        backend = getattr(rpc.BackendType, "TENSORPIPE", None)
    value = getattr(backend, "value", None)
    handler = getattr(value, "init_backend_handler", None)
    if not str(getattr(handler, "__module__", "")).startswith("torch_rpc_ext."):
        return None
    # Looked up anew: register_backend(), if a program has called it, has replaced the enum class.
    return registry.BackendType[backend.name]


def _is_ours(options: Any) -> bool:
    module: Any = sys.modules.get("torch_rpc_ext.options")
    return module is not None and isinstance(options, module.UcxRpcBackendOptions)


def _wrap_create_store(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create_c10d_store(*args: Any, **kwargs: Any) -> Any:
        if not in_init_rpc():
            return original(*args, **kwargs)
        from torch_rpc_ext._group.store_opening import open_tcp

        given = signature.bind(*args, **kwargs).arguments
        return open_tcp(
            given["hostname"],
            given["port"],
            given["rank"],
            given["world_size"],
            _call.timeout,
            given.get("use_libuv", True),
        )

    return create_c10d_store
