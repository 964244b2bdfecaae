"""What peers may call: the option allow_list.

A request is a pickle, and while a pickle is read it may call anything that it names. So every entry
is looked up once, at init. Afterwards a name in a pickle finds these objects and nothing else: no
module is imported, and no attribute of a module is read. An object is recognised by its identity,
not by its name or by ==, because a class can be made to claim anything. Builtin operators and
TorchScript functions are not pickled; C++ checks their names (csrc/agent/allow_list.h) against the
sets that are made here.

unpickling.py reads the pickles; protocol.py holds what they may name beside the entries.

Source: pickle's documentation, "Restricting Globals"; torch/distributed/rpc/internal.py.
"""

from __future__ import annotations

import io
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch._jit_internal import _qualified_name
from torch.distributed.rpc import internal as _untyped_internal
from torch.jit import _builtins as _untyped_builtins

from torch_rpc_ext import errors
from torch_rpc_ext._base.attributes import attribute_of
from torch_rpc_ext._base.printable import printable
from torch_rpc_ext._security import arrays, protocol
from torch_rpc_ext._security.entries import Entry, Request
from torch_rpc_ext._security.unpickling import Reader, full_name
from torch_rpc_ext._upstream import exceptions, payloads

logger = logging.getLogger(__name__)
# Upstream's functions have no types.
internal: Any = _untyped_internal
find_builtin: Any = _untyped_builtins._find_builtin

# Part of the text of every refusal; csrc/agent/allow_list.h has the same.
_NOT_ALLOWED = "is not in its allow_list (an option of UcxRpcBackendOptions)"

# DistributedOptimizer calls this TorchScript function, so it is allowed with any entries.
_SCRIPTED_STEP = "torch.distributed.optim.optimizer._script_local_optimizer_step"

# The profiler sends a function as an object of this class.
_TRACED = "torch_rpc_ext.profiler.recorder.Traced"

# At most so many refused names are logged, each once, so that a peer cannot fill the disk.
_LOGGED = 100
# At most so many characters of a refused name are shown: a peer has sent it.
_LONGEST_TOLD = 200


@dataclass
class AllowList:
    """What peers may name.

    Attributes:
        worker: name of this worker, for texts.
        names: for C++: TorchScript functions as "module.name" and operators as "aten::add". All
            other entries are in it too; they match no TorchScript function and no operator.
        modules: for C++: modules of which all TorchScript functions may run.
        getattr: stands for builtins.getattr, by which pickle names methods.
    """

    worker: str
    names: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    getattr: Entry = field(default_factory=lambda: Entry("builtins.getattr"))
    _entries: dict[str, Entry] = field(default_factory=dict)
    # id() -> listed class or function. By identity, because an object may claim any name and may be
    # equal to anything.
    _classes: dict[int, type] = field(default_factory=dict)
    _listed: dict[int, Any] = field(default_factory=dict)
    _methods: Entry = field(default_factory=lambda: Entry("_InternalRPCPickler"))
    _logged: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        entries: Iterable[str],
        worker: str,
        serving: Iterable[Callable[..., Any]] = (),
    ) -> AllowList:
        """Look the entries up, which imports their modules.

        Args:
            entries: each a module ("service.api"), a function or class ("service.api.add"), or an
                operator ("aten::add").
            worker: name of this worker.
            serving: functions of this package that peers may call whatever the entries are.

        Raises:
            ValueError: an entry names nothing that exists, or an object of another kind.
        """
        made = cls(worker, {_SCRIPTED_STEP})
        made._entries = protocol.entries(made, serving)
        made._entries["builtins.getattr"] = made.getattr
        made._entries["torch.distributed.rpc.internal._InternalRPCPickler"] = made._methods
        for entry in entries:
            made._add(entry)
        arrays.enter(made._entries)
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
            self._add_module(target)
            return
        if not callable(target):
            raise ValueError(
                f"allow_list: {entry!r} is a {type(target).__name__}; "
                "entries name modules, functions, classes and operators"
            )
        self._add_named(entry, target)
        self._add_operator(target)
        if isinstance(target, torch.jit.ScriptFunction):
            name = str(_qualified_name(target)).removeprefix("__torch__.")
            self.names.add(name if "." in name else f"__main__.{name}")
        elif full_name(target):
            self._add_named(full_name(target), target)
        if isinstance(target, type) and issubclass(target, torch.optim.Optimizer):
            # DistributedOptimizer sends a functional class in place of the optimizer's.
            from torch.distributed.optim.utils import functional_optim_map

            if target in functional_optim_map:
                functional = functional_optim_map[target]
                self._add_named(full_name(functional), functional)

    def _add_module(self, module: ModuleType) -> None:
        """Enter everything that a module defines, but nothing that it imports."""
        self.modules.add(module.__name__)
        # Operators only of torch's modules, which define them; other modules import them.
        if module.__name__ == "torch" or module.__name__.startswith("torch."):
            for function in list(vars(module).values()):
                self._add_operator(function)
        for name, target in list(vars(module).items()):
            full = f"{module.__name__}.{name}"
            if callable(target) and full_name(target) == full:
                self._add_named(full, target)

    def _add_named(self, name: str, target: Any) -> None:
        self.names.add(name)
        self._listed[id(target)] = target
        if not isinstance(target, type):
            # A callable object may serve requests, but a pickle cannot call it while it is read.
            build = target if isinstance(target, (FunctionType, BuiltinFunctionType)) else None
            self._entries[name] = Entry(name, target, build=build, serve=target)
            return
        self._entries[name] = protocol.of_class(target, serve=target)
        self._classes[id(target)] = target
        for inner in list(vars(target).values()):
            full = f"{full_name(target)}.{getattr(inner, '__name__', '')}"
            public = isinstance(inner, type) and not inner.__name__.startswith("_")
            if public and full_name(inner) == full and full not in self._entries:
                self._add_named(full, inner)

    def _add_operator(self, function: Any) -> None:
        if callable(function):
            operator = find_builtin(function)
            if operator is not None:
                self.names.add(operator)

    def find(self, module: str, name: str) -> Entry:
        """Return what a name in a pickle stands for.

        Args:
            module: as in the pickle.
            name: as in the pickle, with dots for what is inside of a class.

        Raises:
            RefusedError: a pickle may not name this.
            AttributeError: the module is listed, but has no such name.
        """
        full = f"{module}.{name}"
        entry = (
            self._entries.get(full)
            or protocol.constant(self._entries, module, name)
            or protocol.generated(module, name, self)
        )
        if entry is not None:
            return entry
        owner, _, method = name.rpartition(".")
        there = self._entries.get(f"{module}.{owner}") if owner else None
        if there is not None and self.allows_class(there.value):
            try:
                return self.attribute(there.value, method)
            except errors.RefusedError:
                raise self.refusal(full) from None
        if (
            module in self.modules
            and not owner
            and name not in vars(sys.modules.get(module, torch))
        ):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise self.refusal(full)

    def allows_class(self, cls: Any) -> bool:
        """Return whether the class, or its module, is listed."""
        return id(cls) in self._classes

    def may_have_state(self, cls: type) -> bool:
        """Return whether a pickle may set attributes of instances of the class.

        A pickle may not set attributes of classes and functions: that would change the service
        itself.
        """
        return id(cls) in self._classes or any(cls is known for known in protocol.STATEFUL)

    def listed(self, function: Any) -> Any:
        """Return the function, if an entry names it.

        Raises:
            RefusedError: no entry names the function.
        """
        if id(function) not in self._listed:
            raise self.refusal(full_name(function) or f"a {full_name(type(function))}")
        return function

    def traced(self, function: Any, named: Mapping[int, Entry]) -> Any:
        """Return the profiler's wrapper around a named function; None if it is something else."""
        cls = type(function)
        if not self.allows_class(cls) or full_name(cls) != _TRACED:
            return None
        inner = named.get(id(function.function))
        if inner is None or inner.serve is None:
            return None
        return cls(function.name, inner.serve, function.id, function.caller)

    def attribute(self, owner: Any, name: Any) -> Entry:
        """Return a method that a pickle names by getattr.

        The method is looked up in the class, because attributes of an instance may hold any object.

        Args:
            owner: a listed class, or an instance of a listed class.
            name: of a public method.

        Raises:
            RefusedError: `owner` or `name` is something else.
        """
        if owner is self._methods:
            return self._receiver(name)
        is_class = self.allows_class(owner)
        cls = owner if is_class else type(owner)
        if type(name) is not str or name.startswith("_") or not self.allows_class(cls):
            raise self.refusal(f"{full_name(cls)}.{name if type(name) is str else '?'}")
        full = f"{full_name(cls)}.{name}"
        static = attribute_of(cls, name)
        if isinstance(static, (classmethod, staticmethod)):
            bound: Any = static.__get__(None, cls)
            return Entry(full, bound, build=bound, serve=bound)
        if not isinstance(static, (FunctionType, MethodDescriptorType)):
            raise self.refusal(full)
        if not is_class:
            bound = static.__get__(owner, cls)
            return Entry(full, bound, serve=bound)

        def serve(receiver: Any, /, *args: Any, **kwargs: Any) -> Any:
            # Without this check the method could run with a class or a function as its object.
            if not isinstance(receiver, cls):
                raise TypeError(f"{full}() wants a {cls.__qualname__} first")
            return static(receiver, *args, **kwargs)

        return Entry(full, static, serve=serve)

    def _receiver(self, name: Any) -> Entry:
        """Return the Entry of a method of upstream's pickler: for tensors, RRefs, TorchScript."""
        build: Callable[..., Any] | None = {
            "_tensor_receiver": payloads._restore_tensor,
            "_py_rref_receiver": protocol.fork,
        }.get(name if type(name) is str else "")
        # Loading a TorchScript module may run its code, so its class must be listed.
        if name == "_script_module_receiver" and self.allows_class(torch.jit.ScriptModule):
            build = protocol.script_module
        full = f"torch.distributed.rpc.internal._InternalRPCPickler.{name}"
        if build is None:
            raise self.refusal(full)
        return Entry(full, build=build)

    def refusal(self, what: str) -> errors.RefusedError:
        """Return the error for a refusal, and log the refusal of this name once."""
        what = printable(what, _LONGEST_TOLD)
        if what not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add(what)
            logger.warning("refused a peer's request for %s: it %s", what, _NOT_ALLOWED)
        return errors.RefusedError(
            f'worker "{self.worker}" refused {what}: it {_NOT_ALLOWED}', worker=self.worker
        )

    def unpickler(self, file: Any) -> Reader:
        """Replace pickle.Unpickler."""
        return Reader(file, self)

    def deserialize(self, payload: bytes, tensors: Any) -> Any:
        """Replace upstream's internal.deserialize.

        Returns:
            A Request for a call; exceptions.Refused for a refused payload; an AttributeError where
            a listed module has no such function; else the value.
        """
        try:
            named = payloads.short_call(payload)
            if named is None:
                return payloads.deserialize(payload, tensors, self._read)
            entry = self.find(*named)
            if entry.serve is None:
                raise self.refusal(entry.name)
            return Request(entry.serve, tuple(tensors), {})
        except errors.RefusedError as error:
            return exceptions.Refused(error)
        except AttributeError as error:
            return error

    def _read(self, payload: bytes, tensors: Any) -> Any:
        reader = self.unpickler(io.BytesIO(payload))
        value = payloads.with_tensors(tensors, reader.load)
        return reader.request(value) if type(value) is internal.PythonUDF else value

    def run_function(self, request: Any) -> Any:
        """Replace upstream's internal._run_function: run what deserialize() has returned."""
        if type(request) not in (Request, exceptions.Refused, AttributeError):
            request = exceptions.Refused(self.refusal("a request that is no call"))
        return exceptions.run_function(request)
