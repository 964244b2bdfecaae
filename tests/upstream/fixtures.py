"""The fixtures that tell upstream's generic suites which back end to run on."""

from __future__ import annotations

from typing import Any

from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

from tests.support.backend import backend_options, backend_type, on_ucx
from tests.upstream.harness import Forked


class UcxRpcAgentTestFixture(RpcAgentTestFixture):
    """The generic suites on BackendType.UCX."""

    @property
    def rpc_backend(self) -> Any:
        return backend_type()

    @property
    def rpc_backend_options(self) -> Any:
        return backend_options(self.init_method)

    def get_shutdown_error_regex(self) -> str:
        # A worker that has left: its name, always.
        return r"worker\d"

    def get_timeout_error_regex(self) -> str:
        return "RPC ran for more than"


class Generic(Forked, UcxRpcAgentTestFixture if on_ucx() else TensorPipeRpcAgentTestFixture):  # type: ignore[misc]
    """What the generic suites run on: UCX, or TENSORPIPE as the baseline (RPC_TEST_BACKEND)."""


def _take_over() -> None:
    import torch_rpc_ext

    torch_rpc_ext.take_over()


class TakenOver(Forked, TensorPipeRpcAgentTestFixture):
    """Upstream's own TENSORPIPE fixture, unmodified; under takeover where UCX is under test."""

    prepare = staticmethod(_take_over) if on_ucx() else None
