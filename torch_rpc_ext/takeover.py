"""Running programs that ask for TENSORPIPE on UCX, on request only.

Requested by TORCH_RPC_BACKEND=ucx, ``python -m torch_rpc_ext run``, or take_over(). The value of
the member BackendType.TENSORPIPE is changed in place, so that members taken earlier follow.
"""

from __future__ import annotations

import os
from typing import Any

from torch_rpc_ext._base.environment import BACKEND
from torch_rpc_ext._upstream import registry

__all__ = ["take_over"]

_applied = False
_agent_class: Any = None


def take_over() -> None:
    """From now on run TENSORPIPE's users on UCX: in this process and in those it starts.

    Programs that name ``BackendType.TENSORPIPE``, pass ``TensorPipeRpcBackendOptions``
    (``_transports`` and ``_channels`` are ignored), or pass nothing are served. Idempotent.

    Raises:
        RuntimeError: an agent runs already; call it before init_rpc.
        ImportError: this torch was built without RPC.
    """
    registry.require_rpc()
    from torch._C import _distributed_rpc
    from torch.distributed import rpc

    if not _applied and _distributed_rpc._is_current_rpc_agent_set():
        raise RuntimeError(
            "torch_rpc_ext.take_over() came too late: RPC is initialized. Call it before "
            "init_rpc, or after shutdown."
        )
    registry.register(rpc)
    apply(rpc)
    os.environ[BACKEND] = "ucx"  # children take over when they import torch


def is_active() -> bool:
    """Return whether TENSORPIPE's users run on UCX in this process."""
    return _applied


def apply(rpc: Any) -> None:
    """Change the member TENSORPIPE, and the name TensorPipeAgent. Idempotent.

    Args:
        rpc: the module torch.distributed.rpc.
    """
    global _applied
    if _applied or not hasattr(rpc, "TensorPipeAgent"):
        return
    _applied = True
    for enum_class in registry.enum_classes(rpc):
        _serve_member(enum_class["TENSORPIPE"], init_tensorpipe)
    rpc.TensorPipeAgent = _either_agent(rpc.TensorPipeAgent)


def _either_agent(original: Any) -> Any:
    """Make a TensorPipeAgent that our agent, too, is an instance of.

    isinstance(agent, rpc.TensorPipeAgent) is how programs ask for dynamic groups and the like. It
    derives from the original because torch's FAULTY_TENSORPIPE takes it for its base class, in C++.
    The original stays what it is in torch._C, so that rpc.shutdown() treats our agent as ours.
    """

    def __instancecheck__(_: Any, value: Any) -> bool:
        return isinstance(value, original) or (
            _agent_class is not None and isinstance(value, _agent_class)
        )

    kind: Any = type(original)
    metaclass: Any = type("TensorPipeAgentType", (kind,), {"__instancecheck__": __instancecheck__})
    return metaclass(
        original.__name__,
        (original,),
        {"__doc__": original.__doc__, "__module__": original.__module__},
    )


def adopt_agent_class(agent_class: Any) -> None:
    """Let our agent pass for a TensorPipeAgent under takeover, now or later."""
    global _agent_class
    _agent_class = agent_class


def _serve_member(member: Any, handler: Any) -> None:
    """Let another handler start the agent of a back end."""
    registry.replace_value(member, member.value._replace(init_backend_handler=handler))


def init_tensorpipe(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Any:
    """Start our agent for BackendType.TENSORPIPE; its init_backend_handler under takeover."""
    from torch.distributed import rpc

    from torch_rpc_ext.options import UcxRpcBackendOptions

    if not isinstance(rpc_backend_options, (rpc.TensorPipeRpcBackendOptions, UcxRpcBackendOptions)):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    return _start(store, name, rank, world_size, rpc_backend_options)


def _start(store: Any, name: str, rank: int, world_size: int | None, given: Any) -> Any:
    """Start our agent with TENSORPIPE's options."""
    from torch_rpc_ext._lifecycle import starting

    return starting.start(
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        options=to_ucx_options(given),
        given_options=given,
    )


def to_ucx_options(given: Any) -> Any:
    """Return UcxRpcBackendOptions that say what TENSORPIPE's options say.

    Args:
        given: TensorPipeRpcBackendOptions, or ours (returned as they are).
    """
    from torch_rpc_ext.options import UcxRpcBackendOptions

    if isinstance(given, UcxRpcBackendOptions):
        return given
    return UcxRpcBackendOptions(
        num_worker_threads=given.num_worker_threads,
        rpc_timeout=given.rpc_timeout,
        init_method=given.init_method,
        device_maps=given.device_maps,
        devices=given.devices,
    )
