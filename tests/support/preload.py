"""Imports what children need. The fork server does this once, so that a child starts in
milliseconds. Does nothing else: the server must stay single-threaded.

The imported objects are frozen for the garbage collector: it would never free them, and to look at
them would copy their pages in each child.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

from tests.support.backend import on_ucx

gc.disable()

# Upstream's suites, and modules that the suites and the children import later.
for _name in (
    "torch.testing._internal.distributed.rpc_utils",
    "torch.distributed.nn.jit.instantiator",
    "torch.distributed.optim",
    "torch.profiler",
    "pytest",
    "tests.support.child",
):
    importlib.import_module(_name)

# Our extension, if it is built. If it is broken, the child that needs it shows the error.
if on_ucx():
    with contextlib.suppress(Exception):
        importlib.import_module("torch_rpc_ext")

gc.freeze()
gc.enable()
