"""A profiler that sees the whole group.

On one worker::

    from torch_rpc_ext.profiler import profile

    with profile() as prof:
        train_step()
    print(prof.summary())
    prof.export_chrome_trace("trace.json")  # open it in https://ui.perfetto.dev

Built on upstream's API, so it also works over TENSORPIPE, where torch_rpc_ext is installed on all
workers. See docs/profiling.md.
"""

from torch_rpc_ext._upstream import torch_names

torch_names.require("torch_rpc_ext.profiler")  # before the names are imported
from torch_rpc_ext.profiler.clocks import Clock  # noqa: E402
from torch_rpc_ext.profiler.records import Call, Execution, Recording  # noqa: E402
from torch_rpc_ext.profiler.session import profile  # noqa: E402
from torch_rpc_ext.profiler.table import Row  # noqa: E402

__all__ = ["Call", "Clock", "Execution", "Recording", "Row", "profile"]
