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
    from torch_rpc_ext import sharding as sharding
    from torch_rpc_ext._info import info as info
    from torch_rpc_ext._wire_dtype import wire_dtype as wire_dtype
    from torch_rpc_ext.options import UcxRpcBackendOptions as UcxRpcBackendOptions
    from torch_rpc_ext.retry import RetryPolicy as RetryPolicy
    from torch_rpc_ext.takeover import take_over as take_over

__all__ = [
    "RetryPolicy",
    "UcxRpcBackendOptions",
    "__version__",
    "errors",
    "info",
    "sharding",
    "take_over",
    "wire_dtype",
]

# Public name -> (module, attribute; None for the module itself).
_LAZY: dict[str, tuple[str, str | None]] = {
    "RetryPolicy": ("torch_rpc_ext.retry", "RetryPolicy"),
    "UcxRpcBackendOptions": ("torch_rpc_ext.options", "UcxRpcBackendOptions"),
    "errors": ("torch_rpc_ext.errors", None),
    "info": ("torch_rpc_ext._info", "info"),
    "sharding": ("torch_rpc_ext.sharding", None),
    "take_over": ("torch_rpc_ext.takeover", "take_over"),
    "wire_dtype": ("torch_rpc_ext._wire_dtype", "wire_dtype"),
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
