"""torch.distributed.rpc over UCX.

``import torch_rpc_ext`` registers the back end ``BackendType.UCX`` and nothing more: no thread,
no UCX, no CUDA, not even torch is loaded by it. Everything else is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_rpc_ext._autoload import activate
from torch_rpc_ext._version import __version__

if TYPE_CHECKING:
    from torch_rpc_ext import errors as errors
    from torch_rpc_ext import events as events
    from torch_rpc_ext import sharding as sharding
    from torch_rpc_ext._current_call import CurrentCall as CurrentCall
    from torch_rpc_ext._current_call import current_call as current_call
    from torch_rpc_ext._info import info as info
    from torch_rpc_ext._wire_dtype import wire_dtype as wire_dtype
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
    "current_call",
    "errors",
    "events",
    "info",
    "on_worker_event",
    "sharding",
    "take_over",
    "wire_dtype",
    "worker_events",
]

# Public name -> (module, attribute; None for the module itself).
_LAZY: dict[str, tuple[str, str | None]] = {
    "CurrentCall": ("torch_rpc_ext._current_call", "CurrentCall"),
    "RetryPolicy": ("torch_rpc_ext.retry", "RetryPolicy"),
    "UcxRpcBackendOptions": ("torch_rpc_ext.options", "UcxRpcBackendOptions"),
    "current_call": ("torch_rpc_ext._current_call", "current_call"),
    "errors": ("torch_rpc_ext.errors", None),
    "events": ("torch_rpc_ext.events", None),
    "info": ("torch_rpc_ext._info", "info"),
    "on_worker_event": ("torch_rpc_ext.events", "on_worker_event"),
    "sharding": ("torch_rpc_ext.sharding", None),
    "take_over": ("torch_rpc_ext.takeover", "take_over"),
    "wire_dtype": ("torch_rpc_ext._wire_dtype", "wire_dtype"),
    "worker_events": ("torch_rpc_ext.events", "worker_events"),
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


activate()
