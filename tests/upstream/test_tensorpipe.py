"""Upstream's suites for TENSORPIPE, 70 cases, unmodified, under takeover."""

from torch.testing._internal.distributed import rpc_utils

from tests.upstream.fixtures import TakenOver
from tests.upstream.harness import generate

globals().update(generate(__name__, TakenOver, rpc_utils.TENSORPIPE_TESTS))
