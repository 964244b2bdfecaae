"""Remote functions in Python and TorchScript, and calls to several workers.

::

    from torch_rpc_ext import scripting

    @scripting.script
    def add(x: Tensor, y: float) -> Tensor:
        return x + y

    add.sync("worker1", x, 2.0)  # also within TorchScript
    add.gather(["worker1", "worker2"], x, 2.0)

Works over any back end of torch.distributed.rpc.
"""

from torch_rpc_ext._upstream import torch_names

torch_names.require("torch_rpc_ext.scripting")  # before the names are imported
from torch_rpc_ext._calls.group_calls import GroupError, broadcast, first_of, gather, map_reduce  # noqa: E402
from torch_rpc_ext._calls.remote_function import RemoteFunction  # noqa: E402

from ._plain import remote  # noqa: E402
from ._script import NotScriptableError, ScriptRemoteFunction, script  # noqa: E402

__all__ = [
    "GroupError",
    "NotScriptableError",
    "RemoteFunction",
    "ScriptRemoteFunction",
    "broadcast",
    "first_of",
    "gather",
    "map_reduce",
    "remote",
    "script",
]
