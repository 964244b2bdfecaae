"""Running programs that ask for TENSORPIPE on UCX, on request only.

Requested by TORCH_RPC_BACKEND=ucx, ``python -m torch_rpc_ext run``, or take_over().
"""

from __future__ import annotations

import os

from torch_rpc_ext._base.environment import BACKEND
from torch_rpc_ext._base.requirements import require_rpc
from torch_rpc_ext._lifecycle import entry
from torch_rpc_ext._upstream import tensorpipe

__all__ = ["take_over"]


def take_over() -> None:
    """From now on run TENSORPIPE's users on UCX: in this process and in those it starts.

    Programs that name ``BackendType.TENSORPIPE``, pass ``TensorPipeRpcBackendOptions``
    (``_transports`` and ``_channels`` are ignored), or pass nothing are served. Idempotent.

    Raises:
        RuntimeError: an agent runs already; call it before init_rpc.
        ImportError: this torch was built without RPC.
    """
    require_rpc()
    from torch._C import _distributed_rpc
    from torch.distributed import rpc

    if not tensorpipe.is_active() and _distributed_rpc._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch_rpc_ext.take_over() came too late: RPC is initialized. Call it before "
            "init_rpc, or after shutdown."
        )
    entry.register(rpc)
    entry.serve_tensorpipe(rpc)
    os.environ[BACKEND] = "ucx"  # children take over when they import torch
