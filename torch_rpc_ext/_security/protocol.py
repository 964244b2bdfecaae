"""What every pickle may name, with any allow_list: plain data, and the library's own calls.

Each of these is harmless whatever its arguments are, or is replaced here by a form that is. Two
kinds are kept apart: functions that build data while a pickle is read, and functions that serve a
request. The latter never run while a pickle is read, and a pickle never gets them: it gets an Entry
in their place.

Source: torch/distributed/rpc/internal.py, api.py, rref_proxy.py; torch/distributed/nn/api
/remote_module.py; torch/distributed/optim/optimizer.py.
"""

from __future__ import annotations

import builtins
import datetime
import functools
import importlib
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch
from torch._C import _distributed_rpc as _untyped_native_rpc
from torch.distributed import rpc as _untyped_rpc
from torch.distributed.rpc import api as _untyped_api
from torch.distributed.rpc import internal as _untyped_internal

from torch_rpc_ext import errors
from torch_rpc_ext._calls import current_call
from torch_rpc_ext._security.entries import Allowed, Entry
from torch_rpc_ext._security.unpickling import check_arguments
from torch_rpc_ext._upstream import exceptions, payloads

# Upstream's functions have no types.
api: Any = _untyped_api
internal: Any = _untyped_internal
native_rpc: Any = _untyped_native_rpc
rpc: Any = _untyped_rpc

_DATA: tuple[Any, ...] = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list),
    *(range, set, slice, str, tuple, OrderedDict, deque, PosixPath, PurePosixPath),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
)
# Classes of torch whose values are pickled by name.
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_ERRORS: tuple[type[BaseException], ...] = tuple(getattr(errors, name) for name in errors.__all__)
# Exceptions that any worker may raise.
EXCEPTIONS: tuple[type[BaseException], ...] = (
    *(
        value
        for value in vars(builtins).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ),
    *_ERRORS,
)
# Classes whose instances a pickle may give attributes: torch.nn.Module.state_dict() sets some on an
# OrderedDict.
STATEFUL: tuple[type, ...] = (OrderedDict, *EXCEPTIONS)

_INTERNAL = "torch.distributed.rpc.internal"
_REMOTE_MODULE = "torch.distributed.nn.api.remote_module"
_OPTIMIZER = "torch.distributed.optim.optimizer"
# Limits for the type of an RRef's value, a text that torch parses by recursion.
_LONGEST_TYPE = 4096
_MOST_NESTED_TYPE = 64
# Limit for exception groups inside of each other.
_MOST_NESTED_GROUPS = 100


def entries(allowed: Allowed, serving: Iterable[Callable[..., Any]]) -> dict[str, Entry]:
    """Return "module.qualname" -> Entry of what may be named and needs no import.

    Args:
        allowed: the allow-list.
        serving: functions of this package that peers may call; they check their arguments.
    """
    classes: tuple[type, ...] = (*_DATA, *EXCEPTIONS)
    made = {f"{cls.__module__}.{cls.__qualname__}": of_class(cls) for cls in classes}
    for path in (PosixPath, PurePosixPath):
        # Python 3.13 alone names these classes by the second module, and workers of the group may
        # run on several versions.
        for module in ("pathlib", "pathlib._local"):
            made[f"{module}.{path.__qualname__}"] = of_class(path)
    # It indexes tensors, as slices do. No opcode can call it or give it attributes.
    made["builtins.Ellipsis"] = Entry("builtins.Ellipsis", Ellipsis)
    for name, value in vars(torch).items():
        if isinstance(value, _CONSTANTS):
            made[f"torch.{name}"] = Entry(f"torch.{name}", value)
    builders: dict[str, tuple[Any, Callable[..., Any]]] = {
        "collections.defaultdict": (defaultdict, _new_defaultdict),
        "torch.Size": (torch.Size, torch.Size),
        "torch.device": (torch.device, torch.device),
        "torch.serialization._get_layout": (None, _layout),
        "torch._C._distributed_rpc.WorkerInfo": (native_rpc.WorkerInfo, _worker_info),
        f"{payloads.__name__}._restore_tensor": (None, payloads._restore_tensor),
        f"{payloads.__name__}._restore_parameter": (None, payloads._restore_parameter),
        f"{payloads.__name__}._restore_compressed": (None, payloads._restore_compressed),
        f"{_REMOTE_MODULE}._remote_module_receiver": (None, _remote_module),
    }
    for name, (value, build) in builders.items():
        made[name] = Entry(name, value, build=build)
    for name, build, cls in (
        (f"{_INTERNAL}.PythonUDF", internal.PythonUDF, internal.PythonUDF),
        (f"{_INTERNAL}.RemoteException", _remote_exception, None),
        (f"{exceptions.__name__}.RemoteType", _remote_type, None),
    ):
        made[name] = Entry(name, cls, build=build, new=build)
    for name, serve in _serving(allowed).items():
        made[name] = Entry(name, serve=serve)
    for function in serving:
        name = f"{function.__module__}.{function.__qualname__}"
        made[name] = Entry(name, serve=function)
    return made


def of_class(cls: type, serve: Callable[..., Any] | None = None) -> Entry:
    """Return the Entry of a class of which a pickle may make instances."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    metaclass: Any = type(cls)
    if any(base.__name__ == "pybind11_type" for base in metaclass.__mro__):
        # Not without __init__: such an instance has no C++ object, and its use reads stray memory.
        return Entry(name, cls, build=cls, serve=serve)
    return Entry(name, cls, build=cls, new=functools.partial(cls.__new__, cls), serve=serve)


def constant(known: Mapping[str, Entry], module: str, name: str) -> Entry | None:
    """Return the Entry of a dtype or the like, None where the name is none of these.

    pickle names such a value by the first module in which it finds it, such as
    "torch._utils.torch.channels_last", so the module can be any.
    """
    if not module.startswith("torch."):
        return None
    entry = known.get(f"torch.{name.removeprefix('torch.')}")
    return entry if entry is not None and isinstance(entry.value, _CONSTANTS) else None


def generated(module: str, name: str, allowed: Allowed) -> Entry | None:
    """Return the Entry of a function that torch has generated for RemoteModule, else None."""
    if not module.startswith("_remote_module_"):
        return None
    from torch.distributed.nn.jit import instantiator

    there = sys.modules.get(module)
    loader = getattr(getattr(there, "__spec__", None), "loader", None)
    if type(loader) is not instantiator._StringLoader:
        return None
    function = vars(there).get(name)
    full = f"{module}.{name}"
    if name in ("forward", "forward_async"):
        # A method of a pickled RemoteModule.
        return _Generated(full, method=function)
    if name == "_remote_forward" and not isinstance(function, torch.jit.ScriptFunction):
        return Entry(full, serve=functools.partial(_remote_forward, allowed, function))
    return None


class _Generated(Entry):
    """A generated method; only _remote_module() can use it."""

    __slots__ = ("method",)

    def __init__(self, name: str, method: Any) -> None:
        super().__init__(name)
        object.__setattr__(self, "method", method)


# ---- functions that build data while a pickle is read -----------------------


def fork(data: Any) -> Any:
    """Make an RRef from its pickled form."""
    _check_fork(data)
    return rpc.PyRRef._deserialize(data)


def _check_fork(data: Any) -> None:
    """Raise ValueError unless `data` has the form of a pickled RRef; makes no RRef."""
    if (
        type(data) is not tuple
        or len(data) != 7
        or type(data[6]) is not str
        or not all(type(number) is int for number in data[:6])
        or len(data[6]) > _LONGEST_TYPE
        or max(data[6].count("["), data[6].count("(")) > _MOST_NESTED_TYPE
    ):
        raise ValueError("not what an RRef is pickled as")


def script_module(data: Any) -> Any:
    """Load a TorchScript module."""
    if type(data) is not bytes:
        raise ValueError("not what a ScriptModule is pickled as")
    return internal._InternalRPCPickler._script_module_receiver(data)


def _new_defaultdict(factory: Any = None, *items: Any) -> Any:
    if factory is not None and not any(factory is cls for cls in _DATA):
        raise errors.RefusedError(f"a defaultdict of {factory!r}: its factory must be a data type")
    return defaultdict(factory, *items)


def _layout(name: Any) -> Any:
    if type(name) is not str:
        raise TypeError("the name of a layout must be a str")
    find: Any = torch.serialization._get_layout
    return find(name)


def _worker_info(name: Any, rank: Any) -> Any:
    return native_rpc.WorkerInfo(name, rank)


def _remote_exception(text: Any, made_of: Any) -> Any:
    if type(text) is not str or type(made_of) is not exceptions.RemoteType:
        raise TypeError("not what an exception is sent as")
    return internal.RemoteException(text, made_of)


def _remote_type(parts: Any) -> Any:
    _check_parts(parts, _MOST_NESTED_GROUPS)
    return exceptions.RemoteType(parts)


def _check_parts(parts: Any, most_nested: int) -> None:
    """Raise TypeError unless `parts` is plain data in the form of exception_parts.Parts.

    The pickles within `parts` are read later, with the same checks as any pickle.
    """
    if most_nested and type(parts) is tuple and len(parts) == 6:
        classes, whole, args, attributes, fields, inner = parts
        names = (attributes, fields)
        if (
            all(type(each) is tuple for each in (classes, args, inner))
            and all(type(each) is dict for each in names)
            and all(type(each) is bytes for each in (whole, *classes, *args))
            and all(type(each) is bytes for each in (*attributes.values(), *fields.values()))
            and all(type(name) is str and name[:2] != "__" for each in names for name in each)
        ):
            for each in inner:
                _check_parts(each, most_nested - 1)
            return
    raise TypeError("not what an exception is sent as")


def _remote_module(*attributes: Any) -> Any:
    from torch.distributed.nn.api import remote_module

    on, device, is_mapped, is_scriptable, methods, rref = attributes
    if not all(type(method) is _Generated for method in methods) or not all(
        type(text) is str for text in (on, device)
    ):
        raise TypeError("not what a RemoteModule is pickled as")
    _check_fork(rref)  # _remote_module_receiver() makes the RRef; a fork can be made only once
    functions = [method.method for method in methods]
    receive: Any = remote_module._remote_module_receiver
    return receive(on, device, bool(is_mapped), bool(is_scriptable), functions, rref)


# ---- functions that serve requests ------------------------------------------


def _serving(allowed: Allowed) -> dict[str, Callable[..., Any]]:
    """Return name -> function for the calls that the library makes itself."""
    guarded: dict[str, Callable[..., Any]] = {
        "torch.distributed.rpc.api._rref_typeof_on_owner": _typeof,
        "torch.distributed.rpc.rref_proxy._local_invoke": _invoke,
        "torch.distributed.rpc.rref_proxy._local_invoke_async_execution": _invoke,
        f"{_REMOTE_MODULE}._create_module": _create_module,
        f"{_REMOTE_MODULE}._create_module_with_interface": _create_with_interface,
        f"{_REMOTE_MODULE}._instantiate_template": _instantiate_template,
        f"{_REMOTE_MODULE}._param_rrefs": _param_rrefs,
        "torch.distributed.rpc.api._gather_to_leader": _gather,
        "torch_rpc_ext.aio._server.cancel": _cancel_async,
        "torch_rpc_ext.aio._server.run": _run_async,
        "torch_rpc_ext.aio._batch.enqueue": _enqueue,
    }
    # From torch 2.14 on the functional optimizers are used in place of the scripted ones.
    for name, base in (
        ("_new_local_optimizer", torch.optim.Optimizer),
        ("_new_script_local_optimizer", object),
        ("_new_functional_local_optimizer", object),
    ):
        guarded[f"{_OPTIMIZER}.{name}"] = functools.partial(_new_optimizer, name, base)
    for name, kind in (
        ("_local_optimizer_step", "_LocalOptimizer"),
        ("_functional_local_optimizer_step", "_FunctionalLocalOptimizer"),
    ):
        guarded[f"{_OPTIMIZER}.{name}"] = functools.partial(_optimizer_step, name, kind)
    serving: dict[str, Callable[..., Any]] = {
        name: functools.partial(serve, allowed) for name, serve in guarded.items()
    }
    serving["torch.distributed.rpc.api._broadcast_to_followers"] = _broadcast
    return serving


def _broadcast(*args: Any, **kwargs: Any) -> None:
    api._broadcast_to_followers(*args, **kwargs)


def _value(rref: Any) -> Any:
    """Return the local value of an RRef. The class is checked: a forged RRef could run anything."""
    if type(rref) is not rpc.PyRRef and type(rref) is not rpc.RRef:
        raise TypeError(f"expected an RRef, got a {type(rref).__qualname__}")
    return rref.local_value()


def _typeof(allowed: Allowed, rref: Any, blocking: bool = True) -> Any:
    del blocking  # the caller waits on its side
    cls = type(_value(rref))
    if not allowed.allows_class(cls):
        raise allowed.refusal(f"the type {cls.__module__}.{cls.__qualname__}")
    return cls


def _invoke(allowed: Allowed, rref: Any, name: Any, args: Any, kwargs: Any) -> Any:
    check_arguments(args, kwargs)
    method: Any = allowed.attribute(_value(rref), name).serve
    return method(*args, **kwargs)


def _listed_class(allowed: Allowed, cls: Any, base: type) -> Any:
    if not allowed.allows_class(cls):
        raise allowed.refusal(f"a call of {cls!r}")
    if not issubclass(cls, base):
        raise TypeError(f"expected a class of {base.__qualname__}, got {cls.__qualname__}")
    return cls


def _create_module(allowed: Allowed, cls: Any, args: Any, kwargs: Any, device: Any) -> Any:
    from torch.distributed.nn.api import remote_module

    check_arguments(args, kwargs)
    create: Any = remote_module._create_module
    return create(_listed_class(allowed, cls, torch.nn.Module), args, kwargs, device)


def _create_with_interface(
    allowed: Allowed, cls: Any, args: Any, kwargs: Any, device: Any, interface: Any
) -> Any:
    from torch.distributed.nn.api import remote_module

    check_arguments(args, kwargs)
    if interface is not None:
        _listed_class(allowed, interface, object)
    create: Any = remote_module._create_module_with_interface
    return create(_listed_class(allowed, cls, torch.nn.Module), args, kwargs, device, interface)


def _instantiate_template(allowed: Allowed, interface: Any, moving: Any) -> None:
    """Do what upstream does. Upstream writes the interface's name into code, so the interface must
    be listed."""
    from torch.distributed.nn.api import remote_module

    instantiate: Any = remote_module._instantiate_template
    instantiate(_listed_class(allowed, interface, object), bool(moving))


def _param_rrefs(allowed: Allowed, rref: Any, recurse: Any) -> Any:
    parameters: Any = allowed.attribute(_value(rref), "parameters").serve
    return [rpc.RRef(parameter) for parameter in parameters(bool(recurse))]


def _remote_forward(
    allowed: Allowed,
    function: Any,
    rref: Any,
    device: Any,
    is_mapped: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    allowed.attribute(_value(rref), "forward")
    if type(device) is not str:
        raise TypeError("a RemoteModule's device must be a str")
    return function(rref, device, bool(is_mapped), *args, **kwargs)


def _check_rrefs(rrefs: Any) -> None:
    if type(rrefs) not in (list, tuple):
        raise TypeError("an optimizer's parameters must be a list of RRefs")
    for rref in rrefs:
        _value(rref)


def _new_optimizer(
    name: str, base: type, allowed: Allowed, cls: Any, rrefs: Any, /, *args: Any, **kwargs: Any
) -> Any:
    optimizer: Any = importlib.import_module(_OPTIMIZER)
    _check_rrefs(rrefs)
    make = getattr(optimizer, name)
    return make(_listed_class(allowed, cls, base), rrefs, *args, **kwargs)


def _optimizer_step(name: str, kind: str, allowed: Allowed, rref: Any, context: Any) -> Any:
    del allowed
    optimizer: Any = importlib.import_module(_OPTIMIZER)
    if type(_value(rref)) is not getattr(optimizer, kind) or type(context) is not int:
        raise TypeError("expected an RRef to a local optimizer, and the id of an autograd context")
    return getattr(optimizer, name)(rref, context)


def _gather(
    allowed: Allowed, sequence: Any, worker: Any, gathered: Any, workers: Any = None
) -> None:
    call = current_call.find()
    if call is not None and call.caller != worker:
        raise allowed.refusal(f"what {call.caller} gave in the name of another worker")
    if type(sequence) is not str or type(workers) not in (set, type(None)):
        raise TypeError("not what _all_gather sends")
    api._gather_to_leader(sequence, worker, gathered, workers)


def _check_call_id(call: Any) -> None:
    if type(call) is not tuple or [type(number) for number in call] != [int, int]:
        raise TypeError("the id of an async call must be two numbers")


def _cancel_async(allowed: Allowed, call: Any) -> None:
    from torch_rpc_ext.aio import _server

    del allowed
    _check_call_id(call)
    _server.cancel(call)


def _run_async(allowed: Allowed, function: Any, call: Any, args: Any, kwargs: Any) -> Any:
    from torch_rpc_ext.aio import _server

    _check_call_id(call)
    check_arguments(args, kwargs)
    return _server.run(allowed.listed(function), call, args, kwargs)


def _enqueue(allowed: Allowed, function: Any, args: Any) -> Any:
    from torch_rpc_ext.aio import _batch

    check_arguments(args, {})
    return _batch.enqueue(allowed.listed(function), args)
