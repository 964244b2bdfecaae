"""Fault injection for tests: importing this module registers BackendType.FAULTY_UCX.

The options are those of upstream's FAULTY_TENSORPIPE: the first ``num_fail_sends`` attempts to
send a message of a type in ``messages_to_fail`` fail, and a message of a type in
``messages_to_delay`` leaves that many seconds late::

    from torch_rpc_ext import testing

    rpc.init_rpc(
        "worker0",
        backend=rpc.BackendType.FAULTY_UCX,
        rank=0,
        world_size=2,
        rpc_backend_options=testing.FaultyUcxRpcBackendOptions(
            messages_to_fail=[],
            messages_to_delay={"SCRIPT_CALL": 1.5},  # calls of operators begin 1.5 s late
            num_fail_sends=0,
        ),
    )

The faults happen in a transport that wraps the real one (csrc/transport/fault).
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
        messages_to_delay: name of a message type -> delay, s.
        num_fail_sends: how often sending one message fails before it succeeds.
        **options: those of UcxRpcBackendOptions.
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
            messages_to_fail=messages_to_fail,
            messages_to_delay=messages_to_delay,
            num_fail_sends=num_fail_sends,
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
