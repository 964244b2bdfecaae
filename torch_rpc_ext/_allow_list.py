"""What peers may call: the option allow_list.

A request is a pickle, and a pickle may call whatever it names while it is read. So the names are
checked where they are looked up (find_class), in requests and in responses, before their modules
are imported. Builtin operators and TorchScript functions are not pickled; C++ checks them
(csrc/agent/allow_list.h) with the names that are made here.

Besides the entries a pickle may name what upstream's own protocol consists of (shutdown, RRefs,
RemoteModule, DistributedOptimizer) and plain data. Each of these is harmless whatever it is called
with, or stands here in a form that is: `getattr`, by which pickle names methods, takes public
methods of listed classes only, and so do calls through an RRef.

Source: pickle's documentation, "Restricting Globals"; torch/package/_package_unpickler.py, which
builds on the same class; torch/distributed/rpc/internal.py.
"""

from __future__ import annotations

import copyreg
import inspect
import logging
import pickle
import pkgutil
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch._jit_internal import _qualified_name
from torch.distributed import rpc as _untyped_rpc
from torch.distributed.rpc import internal as _untyped_internal
from torch.jit import _builtins as _untyped_builtins

from torch_rpc_ext import errors

logger = logging.getLogger(__name__)
# Upstream's functions have no types.
internal: Any = _untyped_internal
rpc: Any = _untyped_rpc
find_builtin: Any = _untyped_builtins._find_builtin
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]

# In the text of every refusal, as in csrc/agent/allow_list.h.
_NOT_ALLOWED = "is not in its allow_list (an option of UcxRpcBackendOptions)"

_PROTOCOL = {
    "torch.distributed.rpc.internal": ("PythonUDF", "RemoteException", "_InternalRPCPickler"),
    "torch.distributed.rpc.api": (
        "_gather_to_leader",
        "_broadcast_to_followers",
        "_rref_typeof_on_owner",
    ),
    "torch._C._distributed_rpc": ("WorkerInfo",),
    "torch.distributed.nn.api.remote_module": (
        "_create_module",
        "_create_module_with_interface",
        "_param_rrefs",
        "_remote_module_receiver",
    ),
    "torch.distributed.optim.optimizer": (
        "_new_local_optimizer",
        "_local_optimizer_step",
        "_new_script_local_optimizer",
    ),
    "torch_rpc_ext._payloads": ("_restore_tensor", "_restore_parameter", "_restore_compressed"),
    "torch_rpc_ext._exceptions": ("RemoteType",),
    "torch_rpc_ext._dynamic": ("member_joined", "member_left"),
    "torch_rpc_ext._returning": ("may_return", "member_returned"),
    "torch_rpc_ext.aio._server": ("run", "cancel"),
    "torch_rpc_ext.aio._batch": ("enqueue",),
    "torch_rpc_ext.errors": (
        "RpcError",
        "PeerLostError",
        "CallTimeoutError",
        "RefusedError",
        "OverloadedError",
        "ShutDownError",
    ),
}
# TorchScript, of the same protocol: DistributedOptimizer calls it.
_SCRIPTED_STEP = "torch.distributed.optim.optimizer._script_local_optimizer_step"
_DATA = {
    "builtins": (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list"),
        *("range", "set", "slice", "str", "tuple"),
    ),
    "collections": ("OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
}
# Values of torch that are pickled by name.
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
# How torch pickles tensors and RRefs.
_RECEIVERS = ("_tensor_receiver", "_py_rref_receiver")
# Modules that torch generates for RemoteModule, and what is called in them: it calls forward().
_REMOTE_MODULE = "_remote_module_"
_REMOTE_MODULE_FUNCTIONS = ("forward", "forward_async", "_remote_forward")

# So many names of refused things are logged, each once: peers must not be able to fill the disk.
_LOGGED = 100


@dataclass(frozen=True)
class Refused:
    """Stands for a pickle that was refused, where upstream expects what it held.

    Attributes:
        error: what is raised when the value is used.
    """

    error: errors.RefusedError


@dataclass
class AllowList:
    """What peers may name.

    Attributes:
        worker: name of this worker, for texts.
        names: functions and classes as "module.qualname", operators as "aten::add".
        modules: modules of which everything that is defined there may be named.
    """

    worker: str
    names: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    _logged: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, entries: Iterable[str], worker: str) -> AllowList:
        """Look the entries up, which imports their modules.

        Args:
            entries: each a module ("service.api"), a function or class ("service.api.add"), or an
                operator ("aten::add").
            worker: name of this worker.

        Raises:
            ValueError: an entry names nothing that exists, or no such thing.
        """
        made = cls(worker, {_SCRIPTED_STEP})
        for entry in entries:
            made._add(entry)
        return made

    def _add(self, entry: str) -> None:
        if "::" in entry:
            if not torch._C._jit_get_schemas_for_operator(entry):
                raise ValueError(f"allow_list: torch has no operator {entry!r}")
            self.names.add(entry)
            return
        try:
            target = pkgutil.resolve_name(entry)
        except (ImportError, AttributeError, ValueError) as problem:
            raise ValueError(f"allow_list: {entry!r} names nothing here: {problem}") from problem
        if isinstance(target, ModuleType) and isinstance(
            getattr(target, "script", None), torch.jit.ScriptFunction
        ):
            target = target.script  # a remote function of torch_rpc_ext.scripting
        if isinstance(target, ModuleType):
            self.modules.add(target.__name__)
            for function in vars(target).values():
                self._add_operator(function)
            return
        if not callable(target):
            raise ValueError(
                f"allow_list: {entry!r} is a {type(target).__name__}; "
                "entries name modules, functions, classes and operators"
            )
        self.names.add(entry)
        self._add_operator(target)
        if isinstance(target, torch.jit.ScriptFunction):
            name = str(_qualified_name(target)).removeprefix("__torch__.")
            self.names.add(name if "." in name else f"__main__.{name}")
        elif _full_name(target):
            self.names.add(_full_name(target))
        if isinstance(target, type) and issubclass(target, torch.optim.Optimizer):
            # DistributedOptimizer sends another class in its place.
            from torch.distributed.optim.utils import functional_optim_map

            if target in functional_optim_map:
                self.names.add(_full_name(functional_optim_map[target]))

    def _add_operator(self, function: Any) -> None:
        if callable(function):
            operator = find_builtin(function)
            if operator is not None:
                self.names.add(operator)

    def find(self, module: str, name: str) -> Any:
        """Return what a pickle names.

        Args:
            module: as in the pickle.
            name: as in the pickle, with dots for what is inside of a class.

        Raises:
            RefusedError: it may not.
            ImportError, AttributeError: it does not exist.
        """
        if (module, name) == ("builtins", "getattr"):
            return self._method
        if module == "torch.distributed.rpc.rref_proxy" and name in self._rref_calls():
            return self._rref_calls()[name]
        if (module, name) == ("torch.distributed.nn.api.remote_module", "_instantiate_template"):
            return _instantiate_template
        if (
            name in _PROTOCOL.get(module, ())
            or name in _DATA.get(module, ())
            or f"{module}.{name}" in self.names
        ):
            return _lookup(module, name)
        if _is_harmless(module, name):
            return getattr(sys.modules[module], name)
        if module in self.modules:
            found = _lookup(module, name)
            # Not what the module has imported, nor what a name with dots reaches from there.
            if callable(found) and _full_name(found) == f"{module}.{name}":
                return found
        owner, _, method = name.rpartition(".")
        if owner and f"{module}.{owner}" in self.names:
            return self._method(_lookup(module, owner), method)
        raise self.refusal(f"{module}.{name}")

    def allows_class(self, cls: type) -> bool:
        """Whether the class is listed, itself or by its module."""
        return _full_name(cls) in self.names or cls.__module__ in self.modules

    def may_have_state(self, cls: type) -> bool:
        """Whether a pickle may set the attributes of an instance.

        Not those of classes and functions: that would change the service itself.
        """
        harmless = (OrderedDict, deque, defaultdict, *_protocol_classes())
        return cls in harmless or self.allows_class(cls) or _is_builtin_exception(cls)

    def _method(self, owner: Any, name: Any) -> Any:
        """Stand in for getattr, by which pickle names methods."""
        if owner is internal._InternalRPCPickler:
            if name in _RECEIVERS:
                return getattr(owner, name)
            # Loading TorchScript may run code of it.
            if name == "_script_module_receiver" and self.allows_class(torch.jit.ScriptModule):
                return getattr(owner, name)
        cls = owner if isinstance(owner, type) else type(owner)
        if not isinstance(name, str) or name.startswith("_") or not self.allows_class(cls):
            raise self.refusal(f"{_full_name(cls)}.{name}")
        # Of the class: what its instances hold is not what it offers.
        static = inspect.getattr_static(cls, name, None)
        if not (callable(static) or isinstance(static, (classmethod, staticmethod))):
            raise self.refusal(f"{_full_name(cls)}.{name}")
        return getattr(owner, name)

    def _rref_calls(self) -> dict[str, Callable[..., Any]]:
        """Stand in for what RRef.rpc_sync(), rpc_async() and remote() call at the owner."""

        def invoke(rref: Any, name: str, args: Any, kwargs: Any) -> Any:
            return self._method(rref.local_value(), name)(*args, **kwargs)

        return {"_local_invoke": invoke, "_local_invoke_async_execution": invoke}

    def refusal(self, what: str) -> errors.RefusedError:
        """Make the error, and tell the operator of this worker once."""
        if what not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add(what)
            logger.warning("refused a peer's request for %s: it %s", what, _NOT_ALLOWED)
        return errors.RefusedError(
            f'worker "{self.worker}" refused {what}: it {_NOT_ALLOWED}', worker=self.worker
        )

    def unpickler(self, file: Any) -> Any:
        """Stand in for pickle.Unpickler."""
        return _Unpickler(file, self)

    def deserialize(self, payload: bytes, tensors: Any) -> Any:
        """Stand in for upstream's internal.deserialize; Refused where a name is refused."""
        try:
            return internal._internal_rpc_pickler.deserialize(payload, tensors)
        except errors.RefusedError as error:
            return Refused(error)


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Reads a peer's pickle; the one in Python, because that in C lets nobody see BUILD."""

    dispatch = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: Any, allowed: AllowList) -> None:
        # Python 2's names would be exchanged for others after they have been checked.
        super().__init__(file, fix_imports=False)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Look a global up."""
        return self._allowed.find(module, name)

    def get_extension(self, code: int) -> None:
        """Look a global of copyreg up, past its cache, which is the whole process's."""
        module, name = vars(copyreg)["_inverted_registry"].get(code, ("copyreg", str(code)))
        self.append(self.find_class(module, name))

    def load_build(self) -> None:
        """Set the state of an object."""
        target = type(self.stack[-2])
        if not self._allowed.may_have_state(target):
            raise self._allowed.refusal(f"a change of a {_full_name(target)}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _full_name(target: Any) -> str:
    """Return "module.qualname", '' where it has none."""
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", None)
    return f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else ""


def _lookup(module: str, name: str) -> Any:
    return pkgutil.resolve_name(f"{module}:{name}")


def _is_harmless(module: str, name: str) -> bool:
    """Whether it is a value of torch, an exception of Python, or one of torch's templates."""
    there = sys.modules.get(module)
    found = vars(there).get(name) if there is not None else None
    if module == "torch":
        return isinstance(found, _CONSTANTS)
    if module == "builtins":
        return isinstance(found, type) and _is_builtin_exception(found)
    generated = module.startswith(_REMOTE_MODULE) and getattr(there, "__file__", None) is None
    return generated and name in _REMOTE_MODULE_FUNCTIONS and found is not None


def _is_builtin_exception(cls: type) -> bool:
    return cls.__module__ == "builtins" and issubclass(cls, Exception)


def _protocol_classes() -> tuple[type, ...]:
    from torch_rpc_ext._exceptions import RemoteType

    return (
        RemoteType,
        rpc.WorkerInfo,
        *(getattr(errors, name) for name in _PROTOCOL["torch_rpc_ext.errors"]),
    )


def _instantiate_template(interface: Any, *args: Any) -> None:
    """Upstream's, which writes the interface's name into code: only for a class."""
    from torch.distributed.nn.api import remote_module

    if not isinstance(interface, type):
        raise TypeError(f"a RemoteModule's interface must be a class, got {interface!r}")
    remote_module._instantiate_template(interface, *args)  # type: ignore[no-untyped-call]
