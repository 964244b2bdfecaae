"""Upstream's CUDA suites, collected everywhere, run where there is a device."""

import torch
from torch.testing._internal.distributed import rpc_utils

from tests.upstream.fixtures import Generic, TakenOver
from tests.upstream.harness import generate

_unless = None if torch.cuda.is_available() else "no CUDA device"
globals().update(generate(__name__, Generic, rpc_utils.GENERIC_CUDA_TESTS, unless=_unless))
globals().update(generate(__name__, TakenOver, rpc_utils.TENSORPIPE_CUDA_TESTS, unless=_unless))
