"""The fixture of the fault-injection suites. Apart, because importing upstream's registers
FAULTY_TENSORPIPE."""

from __future__ import annotations

from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (
    FaultyRpcAgentTestFixture,
)

from tests.support.backend import on_ucx
from tests.upstream.harness import Forked

if on_ucx():
    import torch_rpc_ext.testing

    torch_rpc_ext.testing.take_over()


class Faulty(Forked, FaultyRpcAgentTestFixture):
    """Upstream's fixture, unmodified; under takeover its back end is ours."""
