"""Upstream's generic suites, 366 cases: what every RPC back end has to do."""

from torch.testing._internal.distributed import rpc_utils

from tests.upstream.fixtures import Generic
from tests.upstream.harness import generate

globals().update(generate(__name__, Generic, rpc_utils.GENERIC_TESTS))
