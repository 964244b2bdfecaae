"""The fixture of the fault-injection suites. Apart, because importing upstream's registers
FAULTY_TENSORPIPE."""

from __future__ import annotations

from typing import Any

from torch.distributed.rpc import backend_registry
from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (
    FaultyRpcAgentTestFixture,
)

from tests.support.backend import on_ucx
from tests.upstream.harness import Forked

if on_ucx():
    import torch_rpc_ext.testing  # noqa: F401  registers FAULTY_UCX


class Faulty(Forked, FaultyRpcAgentTestFixture):
    """Upstream's fixture; only the name of the back end differs."""

    @property
    def rpc_backend(self) -> Any:
        return backend_registry.BackendType["FAULTY_UCX" if on_ucx() else "FAULTY_TENSORPIPE"]
