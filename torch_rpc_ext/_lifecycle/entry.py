"""Our entries in torch's registry of back ends: init_rpc calls them to make options and an agent.

Every program that imports torch.distributed.rpc imports this module, so it loads little: the
options and the agent's start are loaded when they are used.
"""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any

from torch_rpc_ext._lifecycle import init_hook
from torch_rpc_ext._upstream import registry

NAME = "UCX"


def register(rpc: Any) -> None:
    """Enter BackendType.UCX, wrap init_rpc, and watch for the end of the process. Idempotent.

    Args:
        rpc: the module torch.distributed.rpc, imported completely.
    """
    if not hasattr(rpc, "BackendType"):
        return  # this torch was built without RPC, so init_rpc does not exist either
    value = rpc.backend_registry.BackendValue(construct_options, init_backend)
    for enum_class in registry.enum_classes(rpc):
        registry.add_member(enum_class, NAME, value)
    init_hook.install(rpc)
    _watch_exit()


@functools.cache
def _watch_exit() -> None:
    """Let a process that ends without rpc.shutdown() stop its agent.

    atexit calls first what was registered last. So this is registered with the back end and not in
    init_rpc: a program may register rpc.shutdown before init_rpc, which then still has its agent.
    """
    atexit.register(_at_exit)


def _at_exit() -> None:
    name = "torch_rpc_ext._lifecycle.lifetime"
    if name in sys.modules:  # otherwise there was no agent
        sys.modules[name].leave()


def serve_tensorpipe(rpc: Any) -> None:
    """Start our agent for BackendType.TENSORPIPE too. Idempotent.

    Args:
        rpc: the module torch.distributed.rpc.
    """
    # Imported here, so that processes without takeover need not load it.
    from torch_rpc_ext._upstream import tensorpipe

    tensorpipe.apply(rpc, init_backend)


def construct_options(rpc_timeout: float, init_method: str, **kwargs: Any) -> Any:
    """Build the options: the construct_rpc_backend_options_handler of upstream's registry.

    Args:
        rpc_timeout: default time-out of a call, s.
        init_method: URL of the rendezvous.
        **kwargs: any option of UcxRpcBackendOptions; ``_transports`` and ``_channels``, which mean
            something to TENSORPIPE only, are accepted and ignored.
    """
    from torch_rpc_ext.options import UcxRpcBackendOptions

    kwargs.pop("_transports", None)
    kwargs.pop("_channels", None)
    return UcxRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Any:
    """Start the agent, with TENSORPIPE's options or ours: upstream's init_backend_handler."""
    from torch.distributed import rpc

    from torch_rpc_ext._lifecycle import starting
    from torch_rpc_ext.options import UcxRpcBackendOptions

    if not isinstance(rpc_backend_options, (rpc.TensorPipeRpcBackendOptions, UcxRpcBackendOptions)):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    return starting.start(
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        options=to_ucx_options(rpc_backend_options),
        given_options=rpc_backend_options,
        numbered=init_hook.in_init_rpc(),
    )


def to_ucx_options(given: Any) -> Any:
    """Return UcxRpcBackendOptions with the values of TENSORPIPE's options.

    Args:
        given: TensorPipeRpcBackendOptions; UcxRpcBackendOptions are returned as they are.
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
