"""Fault injection for tests: BackendType.FAULTY_UCX, registered by importing this module.

Its options are those of upstream's FAULTY_TENSORPIPE: the first ``num_fail_sends`` attempts to
send a message of a type in ``messages_to_fail`` fail, and messages of the types in
``messages_to_delay`` leave that many seconds late. The faults happen in a transport that wraps the
real one (csrc/transport/fault).
Source: torch/distributed/rpc/_testing/faulty_agent_backend_registry.py.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import rpc

from torch_rpc_ext._lifecycle.entry import init_backend
from torch_rpc_ext._upstream import registry
from torch_rpc_ext.options import UcxRpcBackendOptions

__all__ = ["FaultyUcxRpcBackendOptions", "register", "take_over"]

NAME = "FAULTY_UCX"


class FaultyUcxRpcBackendOptions(UcxRpcBackendOptions):
    """UcxRpcBackendOptions with faults.

    Args:
        messages_to_fail: names of torch's message types, such as ``"RREF_FORK_REQUEST"``.
        messages_to_delay: seconds by name of message type.
        num_fail_sends: how often sending one message fails before it succeeds.
        **options: of UcxRpcBackendOptions.
    """

    def __init__(
        self,
        *,
        messages_to_fail: list[str],
        messages_to_delay: dict[str, float],
        num_fail_sends: int,
        **options: Any,
    ) -> None:
        super().__init__(
            _messages_to_fail=messages_to_fail,
            _messages_to_delay=messages_to_delay,
            _num_fail_sends=num_fail_sends,
            **options,
        )


def _construct_options(
    rpc_timeout: float,
    init_method: str,
    messages_to_fail: list[str] | None = None,
    messages_to_delay: dict[str, float] | None = None,
    num_fail_sends: int = 0,
    **kwargs: Any,
) -> FaultyUcxRpcBackendOptions:
    return FaultyUcxRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        messages_to_fail=messages_to_fail or [],
        messages_to_delay=messages_to_delay or {},
        num_fail_sends=num_fail_sends,
        **kwargs,
    )


def register() -> None:
    """Enter BackendType.FAULTY_UCX. Idempotent."""
    rpc_module: Any = rpc
    value = rpc_module.backend_registry.BackendValue(_construct_options, init_backend)
    for enum_class in registry.enum_classes(rpc_module):
        registry.add_member(enum_class, NAME, value)


def take_over() -> None:
    """Let programs that name upstream's FAULTY_TENSORPIPE run on FAULTY_UCX. Idempotent."""
    import torch.distributed.rpc._testing  # noqa: F401  registers FAULTY_TENSORPIPE

    rpc_module: Any = rpc
    faulty = rpc_module.backend_registry.BackendType["FAULTY_TENSORPIPE"]
    ours = rpc_module.backend_registry.BackendValue(_construct_options, init_backend)
    if faulty.value != ours:
        registry.replace_value(faulty, ours)


register()
