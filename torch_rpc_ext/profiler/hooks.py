"""Functions that replace upstream's where calls begin, to record the calls.

They are installed while this worker records; at other times upstream's functions are unchanged.

- api._invoke_rpc: rpc_sync and rpc_async, of all kinds of functions.
- api._to_worker_info: finds the callee, directly before the message is made.
- api.PythonUDF: the message of a Python function. Where the callee records too, the call's id is
  added (recorder.Traced); for other callees the message is not changed.
- api._invoke_rpc_python_udf, _builtin, _torchscript: give the message's number at our agent, and
  the size of a Python function's request.
- api._invoke_remote_python_udf, _builtin, _torchscript: rpc.remote.

Calls that begin in C++ are not seen here: RRef.to_here() and the messages of distributed autograd.
Source: torch/distributed/rpc/api.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed.rpc import api as _untyped_api

from torch_rpc_ext._upstream.operators import OPERATORS, qualified_name
from torch_rpc_ext.profiler.records import Call, tensor_bytes

__all__ = ["Recorder", "install", "name_of", "remove"]

api: Any = _untyped_api  # upstream's functions have no types

_SYNC = api.RPCExecMode.SYNC
# Functions of the profiler begin so; their calls are not recorded.
_OURS = "torch_rpc_ext.profiler."

# Functions of ours that run the user's function, which is their first argument; the same names are
# in csrc/agent/call_label.cpp.
_BEFORE_FUNCTION = ("torch_rpc_ext.aio._server.run", "torch_rpc_ext.aio._batch.enqueue")

# .call: the call that this thread is sending; .callee: name of the callee, once it is known.
_thread = threading.local()
_installed: dict[str, tuple[Any, Any]] = {}  # name -> (upstream's function, ours)


class Recorder(Protocol):
    """The methods of recorder.Recorder that the hooks call."""

    #: Names of the workers that record.
    recorded: frozenset[str]
    #: Name of this worker.
    worker: str
    #: Returns the number of this thread's last call of a function; 0 before the first.
    last_number: Callable[[], int]

    def new_call(self, kind: str, function: str, to: str) -> Call:
        """Begin a call."""

    def add_call(self, call: Call, error: str = "") -> None:
        """Keep a call that ends now."""

    def follow_call(self, call: Call, future: Any) -> None:
        """Keep a call that ends when its future is done."""


def install(recorder: Recorder, traced: Callable[..., Any]) -> None:
    """Put the hooks in.

    Args:
        recorder: gets the calls.
        traced: recorder.Traced, which is sent in place of a function.
    """
    hooks: dict[str, Callable[..., Any]] = {
        "_invoke_rpc": _invoke_rpc,
        "_to_worker_info": _to_worker_info,
        "PythonUDF": _python_udf,
        "_invoke_rpc_python_udf": _invoke_rpc_python_udf,
        "_invoke_rpc_builtin": _send,
        "_invoke_rpc_torchscript": _send,
        "_invoke_remote_python_udf": _invoke_remote_python_udf,
        "_invoke_remote_builtin": _invoke_remote_other,
        "_invoke_remote_torchscript": _invoke_remote_other,
    }
    for name, hook in hooks.items():
        original = getattr(api, name)
        more = (traced,) if hook is _python_udf else ()
        ours = functools.partial(hook, original, recorder, *more)
        _installed[name] = (original, ours)
        setattr(api, name, ours)


def remove() -> None:
    """Take the hooks out. Idempotent."""
    for name, (original, ours) in _installed.items():
        # Not if the name holds another function by now, as after the end of the agent.
        if getattr(api, name) is ours:
            setattr(api, name, original)
    _installed.clear()


def name_of(function: Any, args: Any = ()) -> str:
    """Return a function's name with its module; for a call through an RRef the method's name."""
    operator = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if operator is not None:
        return str(operator)
    if isinstance(function, OPERATORS):
        return qualified_name(function)[0]
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function)).removeprefix("__torch__.")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if name.startswith("_local_invoke") and len(args or ()) > 1:
        return f"RRef.{args[1]}"
    full_name = f"{getattr(function, '__module__', None)}.{name}"
    return name_of(args[0]) if full_name in _BEFORE_FUNCTION and args else full_name


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_OURS)


def _invoke_rpc(
    original: Any,
    recorder: Recorder,
    to: Any,
    func: Any,
    rpc_type: Any,
    args: Any = None,
    kwargs: Any = None,
    *more: Any,
    **named: Any,
) -> Any:
    if _is_ours(func) or not callable(func):
        return original(to, func, rpc_type, args, kwargs, *more, **named)
    callee = api._to_worker_info(to).name
    call = recorder.new_call(rpc_type.value, name_of(func, args), callee)
    call = call._replace(sent_bytes=tensor_bytes((args, kwargs)))
    outer, _thread.call = getattr(_thread, "call", None), call
    try:
        future = original(to, func, rpc_type, args, kwargs, *more, **named)
    except BaseException as problem:
        recorder.add_call(call, type(problem).__name__)
        raise
    finally:
        # The hooks of sending have put a call with more facts there.
        call, _thread.call = _thread.call or call, outer
    if rpc_type is not _SYNC:
        recorder.follow_call(call, future)
        return future
    error = ""
    try:
        future.wait()
    except Exception as problem:  # noqa: BLE001  rpc_sync waits again, and raises the error
        error = type(problem).__name__
    recorder.add_call(call, error)
    return future


def _to_worker_info(original: Any, recorder: Recorder, to: Any) -> Any:
    info = original(to)
    _thread.callee = info.name
    return info


def _python_udf(
    original: Any, recorder: Recorder, traced: Any, func: Any, args: Any, kwargs: Any
) -> Any:
    if _is_ours(func):
        return original(func, args, kwargs)
    call: Call | None = getattr(_thread, "call", None)
    if call is None:  # a call of rpc.remote; the hook that sends it adds the callee
        call = _thread.remote = recorder.new_call("remote", name_of(func, args), "")
    callee = call.to or getattr(_thread, "callee", "")
    if callee in recorder.recorded:
        func = traced(call.function, func, call.id, recorder.worker)
    return original(func, args, kwargs)


def _invoke_rpc_python_udf(
    original: Any, recorder: Recorder, to: Any, pickled: bytes, tensors: Any, *more: Any
) -> Any:
    call: Call | None = getattr(_thread, "call", None)
    if call is not None:
        _thread.call = call._replace(sent_bytes=len(pickled) + tensor_bytes(tensors))
    return _send(original, recorder, to, pickled, tensors, *more)


def _send(original: Any, recorder: Recorder, /, *args: Any, **kwargs: Any) -> Any:
    call: Call | None = getattr(_thread, "call", None)
    if call is None:
        return original(*args, **kwargs)
    before = recorder.last_number()
    future = original(*args, **kwargs)
    _thread.call = call._replace(number=_new_number(recorder, before))
    return future


def _new_number(recorder: Recorder, before: int) -> int:
    number = recorder.last_number()
    return 0 if number == before else number  # the same number: the call failed before it was sent


def _invoke_remote_python_udf(
    original: Any, recorder: Recorder, to: Any, pickled: bytes, tensors: Any, *more: Any
) -> Any:
    call: Call | None = getattr(_thread, "remote", None)
    _thread.remote = None
    if call is None:
        return original(to, pickled, tensors, *more)
    call = call._replace(to=to.name, sent_bytes=len(pickled) + tensor_bytes(tensors))
    return _follow_remote(recorder, call, lambda: original(to, pickled, tensors, *more))


def _invoke_remote_other(
    original: Any, recorder: Recorder, to: Any, name: str, /, *more: Any, **kwargs: Any
) -> Any:
    callee = getattr(to, "name", to)
    call = recorder.new_call("remote", name.removeprefix("__torch__."), callee)
    call = call._replace(sent_bytes=tensor_bytes((more, kwargs)))
    return _follow_remote(recorder, call, lambda: original(to, name, *more, **kwargs))


def _follow_remote(recorder: Recorder, call: Call, send: Callable[[], Any]) -> Any:
    before = recorder.last_number()
    try:
        rref = send()
    except BaseException as problem:
        recorder.add_call(call, type(problem).__name__)
        raise
    call = call._replace(number=_new_number(recorder, before))
    # The future is done when the owner has confirmed that the value exists.
    recorder.follow_call(call, rref._get_future())
    return rref
