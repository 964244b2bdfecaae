"""What runs at ``import torch`` (entry point group ``torch.backends``) and at our own import.

This module must cost less than 5 ms where RPC is never used, and must never make ``import torch``
fail. So it imports the other rooms only when torch.distributed.rpc is imported.
Source: torch's "Autoload Mechanism", torch/__init__.py, _import_device_backends.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch_rpc_ext._upstream.import_hook import when_rpc_is_imported

_activated = False


def activate() -> None:
    """Register the back end; take over where TORCH_RPC_BACKEND=ucx asks for it. Idempotent."""
    global _activated
    if _activated:
        return
    _activated = True
    when_rpc_is_imported(_on_rpc_imported)


def _on_rpc_imported(rpc: Any) -> None:
    """Do what needs torch.distributed.rpc to be there; a failure becomes a warning."""
    try:
        _enter(rpc)
    except Exception as error:
        # Raised from here, the error would make `import torch` fail, also in programs without RPC.
        warnings.warn(
            f"torch_rpc_ext cannot offer BackendType.UCX to this torch ({error!r}): use "
            "BackendType.TENSORPIPE, or a torch and a torch_rpc_ext that fit each other.",
            stacklevel=2,
        )


def _enter(rpc: Any) -> None:
    from torch_rpc_ext._base.environment import check_backend
    from torch_rpc_ext._lifecycle import entry

    try:
        wanted = check_backend()
    except ValueError as error:
        # init_rpc will refuse the value. A program without RPC must not fail for it.
        warnings.warn(str(error), stacklevel=3)
        wanted = False
    if not hasattr(rpc, "BackendType"):
        if wanted:
            from torch_rpc_ext._base.requirements import require_rpc

            require_rpc()
        return  # this torch was built without RPC, so init_rpc does not exist either
    entry.register(rpc)
    if wanted:
        entry.serve_tensorpipe(rpc)
