"""Every private name of torch that this package uses: torch may change them in any release.

Where a torch lacks a name, the feature that needs the name is refused before it begins, with the
name and what to do; `import torch` and TENSORPIPE work as without this package. A rule compares
this list with the sources, in both directions (tests/rules/test_torch_names.py), and a test takes
each name away in turn (tests/process/test_torch_names.py). The names that csrc uses are in
csrc/compat.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

UCX = "BackendType.UCX"

#: Feature -> the names that it cannot do without.
NEEDED: dict[str, tuple[str, ...]] = {
    UCX: (
        "torch._C.Future",
        "torch._C._DistNetworkError",
        "torch._C._distributed_c10d.FileStore",
        "torch._C._distributed_c10d.PrefixStore",
        "torch._C._distributed_c10d.Store",
        "torch._C._distributed_c10d.TCPStore",
        "torch._C._distributed_rpc.RpcBackendOptions",
        "torch._C._distributed_rpc.WorkerInfo",
        "torch._C._distributed_rpc._cleanup_python_rpc_handler",
        "torch._C._distributed_rpc._delete_all_user_and_unforked_owner_rrefs",
        "torch._C._distributed_rpc._get_current_rpc_agent",
        "torch._C._distributed_rpc._is_current_rpc_agent_set",
        "torch._C._distributed_rpc._reset_current_rpc_agent",
        "torch._C._distributed_rpc._rref_context_get_debug_info",
        "torch._jit_internal._qualified_name",
        "torch.distributed.nn.jit.instantiator._do_instantiate_remote_module_template",
        "torch.distributed.rpc._init_counter",
        "torch.distributed.rpc._set_rpc_timeout",
        "torch.distributed.rpc.api._all_gather_dict_lock",
        "torch.distributed.rpc.api._all_gather_sequence_id",
        "torch.distributed.rpc.api._all_gather_sequence_id_to_states",
        "torch.distributed.rpc.api._default_pickler",
        "torch.distributed.rpc.api._delete_all_user_and_unforked_owner_rrefs",
        "torch.distributed.rpc.api._destroy_rref_context",
        "torch.distributed.rpc.api._get_current_rpc_agent",
        "torch.distributed.rpc.api._get_should_profile",
        "torch.distributed.rpc.api._init_rpc_states",
        "torch.distributed.rpc.api._invoke_remote_builtin",
        "torch.distributed.rpc.api._invoke_remote_python_udf",
        "torch.distributed.rpc.api._invoke_remote_torchscript",
        "torch.distributed.rpc.api._invoke_rpc",
        "torch.distributed.rpc.api._invoke_rpc_builtin",
        "torch.distributed.rpc.api._invoke_rpc_python_udf",
        "torch.distributed.rpc.api._invoke_rpc_torchscript",
        "torch.distributed.rpc.api._is_current_rpc_agent_set",
        "torch.distributed.rpc.api._to_worker_info",
        "torch.distributed.rpc.api._wait_all_workers",
        "torch.distributed.rpc.backend_registry._create_device_list",
        "torch.distributed.rpc.backend_registry._create_reverse_mapping",
        "torch.distributed.rpc.backend_registry._validate_device_maps",
        "torch.distributed.rpc.internal._InternalRPCPickler",
        "torch.distributed.rpc.internal._handle_exception",
        "torch.distributed.rpc.internal._internal_rpc_pickler",
        "torch.distributed.rpc.internal._internal_rpc_pickler._class_reducer_dict",
        "torch.distributed.rpc.internal._internal_rpc_pickler._dispatch_table",
        "torch.distributed.rpc.internal._internal_rpc_pickler._py_rref_reducer",
        "torch.distributed.rpc.internal._internal_rpc_pickler._register_reducer",
        "torch.distributed.rpc.internal._internal_rpc_pickler._tensor_reducer",
        "torch.distributed.rpc.internal._pickler",
        "torch.distributed.rpc.internal._run_function",
        "torch.distributed.rpc.internal._thread_local_tensor_tables",
        "torch.distributed.rpc.internal._unpickler",
        "torch.distributed.rpc.options._to_device_list",
        "torch.distributed.rpc.options._to_device_map",
        "torch.jit._builtins._find_builtin",
    ),
    "the option allow_list": (
        "torch._C._jit_get_schemas_for_operator",
        "torch.distributed.rpc.PyRRef._deserialize",
        "torch.distributed.rpc.internal._InternalRPCPickler._script_module_receiver",
        "torch.serialization._get_layout",
    ),
    "torch_rpc_ext.launch": ("torch.distributed.rpc._init_counter_lock",),
    "torch_rpc_ext.profiler": (
        "torch._C._profiler._ExperimentalConfig",
        # Without it a second torch.profiler would be started beside the program's own, which ends
        # the process.
        "torch.autograd.profiler._is_profiler_enabled",
    ),
    "torch_rpc_ext.scripting": (
        "torch._jit_internal.createResolutionCallbackFromClosure",
        "torch._jit_internal.fake_range",
    ),
    "torch_rpc_ext.sharding": (
        "torch.distributed.autograd._current_context",
        "torch.distributed.remote_device._remote_device",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._pytree.tree_unflatten",
    ),
}
#: Nothing is refused for lack of these: the code that uses a name says what it does without.
DONE_WITHOUT = (
    "torch._GLOBAL_DEVICE_CONTEXT",
    # Without it, sharding sends values by way of the CPU.
    "torch._C._distributed_rpc.TensorPipeAgent._get_device_map",
    "torch.distributed.rendezvous._create_c10d_store",
    "torch.distributed.rpc.api._ALL_WORKER_NAMES",
    "torch.distributed.rpc.api._broadcast_to_followers",
    "torch.distributed.rpc.api._gather_to_leader",
    # With the option allow_list, RemoteModule and DistributedOptimizer fail without them. The
    # functional optimizers came with torch 2.14, in place of the scripted ones.
    "torch.distributed.nn.api.remote_module._create_module",
    "torch.distributed.nn.api.remote_module._create_module_with_interface",
    "torch.distributed.nn.api.remote_module._instantiate_template",
    "torch.distributed.nn.api.remote_module._remote_module_receiver",
    "torch.distributed.nn.jit.instantiator._StringLoader",
    "torch.distributed.optim.optimizer._FunctionalLocalOptimizer",
    "torch.distributed.optim.optimizer._LocalOptimizer",
    "torch.distributed.optim.optimizer._functional_local_optimizer_step",
    "torch.distributed.optim.optimizer._local_optimizer_step",
    "torch.distributed.optim.optimizer._new_functional_local_optimizer",
    "torch.distributed.optim.optimizer._new_local_optimizer",
    "torch.distributed.optim.optimizer._new_script_local_optimizer",
)


def require(who: str) -> None:
    """Refuse a torch that lacks a private name.

    Args:
        who: the feature, a key of NEEDED.

    Raises:
        ImportError: the text has the first name that is missing, and what to do.
    """
    for name in NEEDED[who]:
        if not _is_there(name):
            import torch

            remedy = "use BackendType.TENSORPIPE, or " if who == UCX else ""
            raise ImportError(
                f"this torch ({torch.__version__}) has no {name}, which {who} needs: {remedy}"
                "install a torch_rpc_ext that knows this torch, or a torch that this torch_rpc_ext "
                "knows (docs/compatibility.md)"
            )


def _is_there(name: str) -> bool:
    parts = name.split(".")
    value: Any = sys.modules.get(parts[0]) or importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part) and not _imported(parts[:depth]):
            return False
        value = getattr(value, part)
    return True


def _imported(parts: Iterable[str]) -> bool:
    """Import a submodule that its package does not import by itself; return whether it exists."""
    try:
        importlib.import_module(".".join(parts))
    except ImportError:
        return False
    return True
