"""Upstream's fault-injection suites, 28 cases, through our own fault transport."""

from torch.testing._internal.distributed import rpc_utils

from tests.upstream.faulty_fixture import Faulty
from tests.upstream.harness import generate

globals().update(generate(__name__, Faulty, rpc_utils.FAULTY_AGENT_TESTS))
