"""torch.distributed.rpc over UCX.

``import torch_rpc_ext`` registers the back end ``BackendType.UCX`` and does nothing more: it starts
no thread and loads neither UCX nor CUDA nor torch. Everything else is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_rpc_ext._autoload import activate
from torch_rpc_ext._base.version import __version__

if TYPE_CHECKING:
    from torch_rpc_ext import aio as aio
    from torch_rpc_ext import errors as errors
    from torch_rpc_ext import events as events
    from torch_rpc_ext import kernels as kernels
    from torch_rpc_ext import launch as launch
    from torch_rpc_ext import metrics as metrics
    from torch_rpc_ext import monitoring as monitoring
    from torch_rpc_ext import options as options
    from torch_rpc_ext import profiler as profiler
    from torch_rpc_ext import retry as retry
    from torch_rpc_ext import sharding as sharding
    from torch_rpc_ext import takeover as takeover
    from torch_rpc_ext._calls.current_call import CurrentCall as CurrentCall
    from torch_rpc_ext._calls.current_call import current_call as current_call
    from torch_rpc_ext._calls.fan_out import rpc_async_all as rpc_async_all
    from torch_rpc_ext._calls.wire_dtype import wire_dtype as wire_dtype
    from torch_rpc_ext._lifecycle.info import info as info
    from torch_rpc_ext.events import on_worker_event as on_worker_event
    from torch_rpc_ext.events import worker_events as worker_events
    from torch_rpc_ext.options import UcxRpcBackendOptions as UcxRpcBackendOptions
    from torch_rpc_ext.retry import RetryPolicy as RetryPolicy
    from torch_rpc_ext.takeover import take_over as take_over

__all__ = [
    "CurrentCall",
    "RetryPolicy",
    "UcxRpcBackendOptions",
    "__version__",
    "aio",
    "current_call",
    "errors",
    "events",
    "info",
    "kernels",
    "launch",
    "metrics",
    "monitoring",
    "on_worker_event",
    "options",
    "profiler",
    "retry",
    "rpc_async_all",
    "scripting",
    "sharding",
    "take_over",
    "takeover",
    "wire_dtype",
    "worker_events",
]

# All public modules but two: importing `testing` registers a back end, and `cli` is the commands.
_MODULES = frozenset(
    {
        "aio",
        "errors",
        "events",
        "kernels",
        "launch",
        "metrics",
        "monitoring",
        "options",
        "profiler",
        "retry",
        "scripting",
        "sharding",
        "takeover",
    }
)
_NAMES = {
    "CurrentCall": "_calls.current_call",
    "RetryPolicy": "retry",
    "UcxRpcBackendOptions": "options",
    "current_call": "_calls.current_call",
    "info": "_lifecycle.info",
    "on_worker_event": "events",
    "rpc_async_all": "_calls.fan_out",
    "take_over": "takeover",
    "wire_dtype": "_calls.wire_dtype",
    "worker_events": "events",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


activate()
