"""Entering the back end in torch's registry: the only file that touches it.

torch's ``register_backend`` replaces the enum class ``BackendType``; members that a program took
earlier, and ``torch.distributed.rpc.BackendType`` itself, then belong to a class that init_rpc no
longer accepts. So the member is added to the class that is there. It comes last, so that a call
with options only still finds TENSORPIPE first.
Source: torch/distributed/rpc/backend_registry.py.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from types import ModuleType
from typing import Any

NAME = "UCX"
RPC_MODULE = "torch.distributed.rpc"


def construct_options(rpc_timeout: float, init_method: str, **kwargs: Any) -> Any:
    """Build the options; upstream's construct_rpc_backend_options_handler.

    Args:
        rpc_timeout: default time-out of a call, s.
        init_method: URL of the rendezvous.
        **kwargs: any option of UcxRpcBackendOptions; ``_transports`` and ``_channels``, which mean
            something to TENSORPIPE only, are accepted and ignored.
    """
    from torch_rpc_ext.options import UcxRpcBackendOptions

    kwargs.pop("_transports", None)
    kwargs.pop("_channels", None)
    return UcxRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Any:
    """Start the agent, with TENSORPIPE's options or ours; upstream's init_backend_handler."""
    from torch_rpc_ext import takeover

    return takeover.init_tensorpipe(store, name, rank, world_size, rpc_backend_options)


def register(rpc: Any) -> None:
    """Enter BackendType.UCX. Idempotent.

    Args:
        rpc: the module torch.distributed.rpc, imported completely.
    """
    if not hasattr(rpc, "BackendType"):
        return  # This torch was built without RPC; init_rpc does not exist either.
    value = rpc.backend_registry.BackendValue(construct_options, init_backend)
    for enum_class in enum_classes(rpc):
        add_member(enum_class, NAME, value)

    from torch_rpc_ext._lifecycle import init_hook

    init_hook.install(rpc)


def require_rpc() -> None:
    """Refuse a torch that was built without RPC.

    Raises:
        ImportError: it was; the text says what to do.
    """
    import torch
    from torch.distributed import rpc

    if not rpc.is_available():
        raise ImportError(
            f"this torch ({torch.__version__}) was built without torch.distributed.rpc: install a "
            "build that has it, such as PyPI's for Linux"
        )


def enum_classes(rpc: Any) -> list[type[Enum]]:
    """Return the enum classes in use: two where somebody called register_backend, else one."""
    classes = [rpc.BackendType]
    if rpc.backend_registry.BackendType is not rpc.BackendType:
        classes.append(rpc.backend_registry.BackendType)
    return classes


def add_member(enum_class: type[Enum], name: str, value: Any) -> None:
    """Add a member to an existing enum class (Python 3.11 to 3.14), unless it is there.

    Python offers no public way. These attributes are what enum.EnumType fills in itself; the
    registry test holds them to what the running Python expects.
    """
    members = enum_class._member_map_
    if name in members:
        return
    member = object.__new__(enum_class)
    member._name_ = name
    member._value_ = value
    member.__objclass__ = enum_class  # type: ignore[attr-defined]
    member._sort_order_ = len(members)  # type: ignore[attr-defined]
    enum_class._member_names_.append(name)
    members[name] = member
    enum_class._value2member_map_[value] = member
    # EnumType.__setattr__ refuses to set a name that is a member.
    type.__setattr__(enum_class, name, member)


def replace_value(member: Enum, value: Any) -> None:
    """Give an existing member another value, so that everybody who holds the member sees it."""
    table = type(member)._value2member_map_
    table.pop(member.value, None)
    member._value_ = value
    table[value] = member


def when_rpc_is_imported(action: Callable[[Any], None]) -> None:
    """Call action(torch.distributed.rpc) now, or as soon as that module has been imported."""
    module = sys.modules.get(RPC_MODULE)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
        return
    sys.meta_path.insert(0, _ImportHook(action))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Finds torch.distributed.rpc once, lets its own loader load it, then runs the action."""

    def __init__(self, action: Callable[[Any], None]) -> None:
        self._action = action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != RPC_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)
        return spec


class _Loader(importlib.abc.Loader):
    """Delegates to the module's own loader and puts it back before the action runs."""

    def __init__(self, loader: Any, action: Callable[[Any], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
