"""What the fork server loads once, so that a child starts in milliseconds. Only imports: it must
stay single-threaded.

Nothing of it is garbage while a child lives, so no collection looks at it, in the server or, page
by copied page, in each child.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

from tests.support.backend import on_ucx

gc.disable()

# The suites of upstream, and what they and the children import on first use.
for _name in (
    "torch.testing._internal.distributed.rpc_utils",
    "torch.distributed.nn.jit.instantiator",
    "torch.distributed.optim",
    "torch.profiler",
    "pytest",
    "tests.support.child",
):
    importlib.import_module(_name)

# Ours, where it is built; a broken build shows in the child that needs it, with its own message.
if on_ucx():
    with contextlib.suppress(Exception):
        importlib.import_module("torch_rpc_ext")

gc.freeze()
gc.enable()
