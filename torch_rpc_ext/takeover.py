"""Programs that ask for TENSORPIPE run on UCX, on request only.

The request is TORCH_RPC_BACKEND=ucx, ``python -m torch_rpc_ext run``, or::

    import torch_rpc_ext

    torch_rpc_ext.take_over()
    rpc.init_rpc("worker0", rank=0, world_size=2)  # on UCX, though it does not say so
"""

from __future__ import annotations

import os

from torch_rpc_ext._base.environment import BACKEND
from torch_rpc_ext._base.requirements import require_rpc
from torch_rpc_ext._lifecycle import entry
from torch_rpc_ext._upstream import tensorpipe

__all__ = ["take_over"]


def take_over() -> None:
    """Run on UCX what asks for TENSORPIPE, in this process and in those that it starts.

    From now on init_rpc uses UCX when it is given ``BackendType.TENSORPIPE``,
    ``TensorPipeRpcBackendOptions`` (``_transports`` and ``_channels`` are ignored), or nothing.
    Idempotent.

    Raises:
        RuntimeError: RPC is initialized already; call take_over() before init_rpc.
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
