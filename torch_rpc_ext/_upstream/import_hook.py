"""Running code when torch.distributed.rpc is imported, which may be long after our own import."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

RPC_MODULE = "torch.distributed.rpc"


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
    """Loads by the module's own loader, which it puts back in its place; then runs the action."""

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
