"""Functions that replace upstream's where those know TensorPipeAgent only, or do too little.

They are installed while our agent runs and removed when it ends; other agents get upstream's own.

- api._wait_all_workers: upstream's rpc.shutdown() leaves a dynamic group only if the agent is a
  TensorPipeAgent. Here _lifecycle/shutdown.py says what happens.
- api._invoke_rpc: in upstream rpc_sync() waits for a future that another thread completes. Here the
  waiting thread takes the answer from the network itself: no hand-off between threads, and Ctrl-C
  ends the wait. While no profiler runs, the work for profilers is left out: 1 to 2 us of 33.
- api._invoke_rpc_torchscript: upstream copies the function's schema for each call. Here it does
  not.
- api._invoke_rpc_builtin, _python_udf: in upstream the future of a call holds a tensor as a Python
  object, so completing the future takes the GIL. Here the future holds a tensor
  (csrc/bindings/calls.cpp). And a thread in future.wait() takes the answer itself, as in rpc_sync()
  (csrc/bindings/call_future.h).
- api._invoke_rpc: in upstream torch.ops.name.op cannot be called, as it cannot be pickled. Here
  that is a call by the operator's schema, without the GIL at the callee (csrc/bindings/calls.cpp).
- api._invoke_remote_builtin, _torchscript, _python_udf: in upstream an RRef whose creation fails at
  once raises a RuntimeError with the error's text, and an RRef whose creation fails later marks
  another RRef as failed (csrc/compat/torch_compat.h). Here the error keeps its class, and the right
  RRef fails.
- api.remote, api._invoke_rpc: upstream takes args=(tensor), without the comma, for one argument per
  row. Here that is an error. So is a time-out that is negative or NaN, for rpc._set_rpc_timeout.
- rpc.RRef: in upstream a value that contains itself ends the process, and so does passing on an
  RRef to a tuple. Here the first is a TypeError, and the second passes the tuple on as a Python
  object (csrc/bindings/rrefs.cpp).
- internal._run_function, _handle_exception: in upstream a remote exception whose constructor takes
  more than a text arrives as RuntimeError (pytorch issue 45044). Here it keeps its class.
- internal._internal_rpc_pickler: the most frequent payloads have short forms (payloads.py), and the
  reducers lose less. In upstream an nn.Parameter leaves the graph of distributed autograd (pytorch
  issue 86525); here it stays in the graph. A result that is a compressed sparse tensor (CSR, CSC,
  BSR, BSC), whose storage upstream's C++ cannot get, travels here as its parts. Passing on an RRef
  whose owner has died and come back is an error here; in upstream the receiver waits without an
  end.
- rpc.PyRRef.to_here: if the RRef could not be created, upstream says "timed out" for each cause.
  Here the error is that of the creation.
- api._destroy_rref_context: stops the agent first. Upstream's C++ walks through its table of RRefs
  without a lock, and a request that deletes an RRef at that moment makes the process crash.
- instantiator._do_instantiate_remote_module_template: upstream's RemoteModule with an interface
  asks its worker twice at once for the module of generated functions. In upstream the second
  request gets that module while the first still compiles the functions, and forward() may find none
  ("attempted to get undefined function _remote_forward"). Here the second waits for the first.
- internal._unpickler, deserialize, _run_function, only with the option allow_list: they check what
  a pickle names and what is called.

Source: torch/distributed/rpc/api.py, internal.py; torch/distributed/nn/jit/instantiator.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import rpc as _untyped_rpc
from torch.distributed.nn.jit import instantiator as _untyped_instantiator
from torch.distributed.rpc import api as _untyped_api
from torch.distributed.rpc import internal as _untyped_internal

from torch_rpc_ext import errors
from torch_rpc_ext._base.call_checks import arguments, require_call_timeout
from torch_rpc_ext._base.option_checks import rpc_timeout
from torch_rpc_ext._native import loader
from torch_rpc_ext._upstream import exceptions, payloads
from torch_rpc_ext._upstream.operators import OPERATORS, qualified_name

logger = logging.getLogger(__name__)
# Upstream's functions have no types.
api: Any = _untyped_api
internal: Any = _untyped_internal
instantiator: Any = _untyped_instantiator
rpc: Any = _untyped_rpc

_SYNC = api.RPCExecMode.SYNC
_UNSET: float = api.UNSET_RPC_TIMEOUT
_find_builtin: Any = torch.jit._builtins._find_builtin

# Held while functions of a RemoteModule are generated. An RLock, because that imports the module of
# the interface, which may do anything.
_generating = threading.RLock()

# Held while the agent stops and upstream's table of RRefs ends, and while the agent's C++ object is
# shut down. An RLock, because an RRef's value may end RPC when it is dropped.
_destroying = threading.RLock()
_DESTROY_PATIENCE = 10.0  # s; longer than a stop() waits for anything

# Name of a function that is replaced -> (upstream's module, upstream's function).
_originals: dict[str, tuple[Any, Callable[..., Any]]] = {}
# The agent of the running session.
_agent: Any = None


def install(
    agent: Any, wait_all_workers: Callable[[Callable[..., Any], float], None], allowed: Any = None
) -> None:
    """Put the hooks in. Idempotent.

    Args:
        agent: the agent that runs.
        wait_all_workers: called in place of api._wait_all_workers; gets upstream's function and the
            time-out.
        allowed: what peers may call (_security.allow_list.AllowList); None for everything.
    """
    global _agent
    if _originals:
        return
    _agent = agent
    _replace(api, "_wait_all_workers", _waiting_by(wait_all_workers, api._wait_all_workers))
    _replace(api, "_destroy_rref_context", functools.wraps(api._destroy_rref_context)(_destroy))
    _replace(api, "_invoke_rpc", functools.wraps(api._invoke_rpc)(_invoke_rpc))
    _replace(api, "_invoke_rpc_builtin", _invoke_rpc_builtin)
    _replace(api, "_invoke_rpc_torchscript", _invoke_rpc_torchscript)
    _replace(api, "_invoke_rpc_python_udf", loader.load().invoke_function)
    _replace(api, "remote", functools.wraps(api.remote)(_remote))
    rpc.remote = api.remote
    _replace(rpc, "_set_rpc_timeout", functools.wraps(rpc._set_rpc_timeout)(_set_rpc_timeout))
    _replace(api, "_invoke_remote_builtin", _typed(api._invoke_remote_builtin, 2))
    _replace(api, "_invoke_remote_torchscript", _typed(_invoke_remote_torchscript, 2))
    _replace(api, "_invoke_remote_python_udf", _typed(api._invoke_remote_python_udf, 3))
    _replace(rpc.PyRRef, "to_here", _saying_why(rpc.PyRRef.to_here))
    rpc.RRef.__init__ = _make_rref
    template = "_do_instantiate_remote_module_template"
    _replace(instantiator, template, _one_at_a_time(getattr(instantiator, template)))
    # torch's C++ looks these two up by name when a session first needs them.
    run_function = exceptions.run_function if allowed is None else allowed.run_function
    _replace(internal, "_run_function", run_function)
    _replace(internal, "_handle_exception", exceptions.handle_exception)
    if allowed is not None:
        _replace(internal, "_unpickler", allowed.unpickler)
        _replace(internal, "deserialize", allowed.deserialize)
    payloads.install(agent)


def uninstall() -> None:
    """Take the hooks out. Idempotent."""
    global _agent
    if not _originals:
        return
    _agent = None
    for name, (module, original) in _originals.items():
        setattr(module, name, original)
    _originals.clear()
    rpc.remote = api.remote
    del rpc.RRef.__init__  # so that PyRRef's is found again
    payloads.uninstall()


def _replace(module: Any, name: str, hook: Callable[..., Any]) -> None:
    _originals[name] = (module, getattr(module, name))
    setattr(module, name, hook)


def _original(module: Any, name: str) -> Callable[..., Any]:
    """Return upstream's function, whether a hook replaces it or not."""
    found: Callable[..., Any] = _originals.get(name, (module, getattr(module, name)))[1]
    return found


def _waiting_by(
    wait_all_workers: Callable[[Callable[..., Any], float], None], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def _wait_all_workers(timeout: float = 0) -> None:
        wait_all_workers(original, timeout)

    return _wait_all_workers


def _destroy(*args: Any, **kwargs: Any) -> None:
    agent, original = _agent, _original(api, "_destroy_rref_context")
    with one_at_a_time():
        try:
            if agent is not None:  # else another thread has ended RPC meanwhile
                agent.stop()
        finally:  # also after Ctrl-C: otherwise the RRefs would keep their values for ever
            original(*args, **kwargs)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Run a step of ending RPC while no other thread runs one.

    Two threads that end RPC at once would both join the same thread of torch. The wait for the
    other thread has an end, because its agent.stop() may wait for this very thread.
    """
    mine = _destroying.acquire(timeout=_DESTROY_PATIENCE)
    try:
        yield
    finally:
        if mine:
            _destroying.release()


def _invoke_rpc(
    to: Any,
    func: Callable[..., Any],
    rpc_type: Any,
    args: Any = None,
    kwargs: Any = None,
    rpc_timeout: float = _UNSET,
) -> Any:
    if type(args) is not tuple:
        args = arguments(args)
    if rpc_timeout != _UNSET:
        # csrc checks the time-out too, but later, when RRefs among the arguments have been pickled:
        # such an RRef would wait for the call for ever.
        require_call_timeout(rpc_timeout)
    set_synchronous = loader.load().set_synchronous
    before = False
    try:
        # The former value is kept and set back, because this call may be made while the arguments
        # of another call are pickled. It stands within the `try`, because the handler of a signal
        # may raise between any two lines.
        before = set_synchronous(rpc_type is _SYNC)
        if api._get_should_profile() and not isinstance(func, OPERATORS):
            invoke = _original(api, "_invoke_rpc")
            future = invoke(to, func, rpc_type, args, kwargs, rpc_timeout)
        else:
            future = _invoke(to, func, args, kwargs or {}, rpc_timeout)
    finally:
        set_synchronous(before)
    return future


def _remote(
    to: Any,
    func: Any,
    args: Any = None,
    kwargs: Any = None,
    timeout: float = _UNSET,
) -> Any:
    if type(args) is not tuple:
        args = arguments(args)
    return _original(api, "remote")(to, func, args, kwargs, timeout)


def _set_rpc_timeout(seconds: float) -> None:
    rpc_timeout("rpc_timeout", seconds)
    _original(rpc, "_set_rpc_timeout")(seconds)


def _invoke(to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
    """Call as upstream's _invoke_rpc does while no profiler runs."""
    if not callable(func):
        raise TypeError("function should be callable.")
    operator = func if isinstance(func, OPERATORS) else _find_builtin(func)
    if operator is not None:
        return api._invoke_rpc_builtin(api._to_worker_info(to), operator, timeout, *args, **kwargs)
    is_async = hasattr(func, "_wrapped_async_rpc_function")
    if is_async and isinstance(func._wrapped_async_rpc_function, torch.jit.ScriptFunction):
        func = func._wrapped_async_rpc_function
    if isinstance(func, torch.jit.ScriptFunction):
        to = to if isinstance(to, str) else api._to_worker_info(to).name
        return api._invoke_rpc_torchscript(to, func, args, kwargs, timeout, is_async)
    to = api._to_worker_info(to)  # first, because an RRef that is pickled has to be sent
    payload, tensors = api._default_pickler.serialize(api.PythonUDF(func, args, kwargs))
    return api._invoke_rpc_python_udf(to, payload, tensors, timeout, is_async)


def _invoke_rpc_builtin(to: Any, name: Any, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    if isinstance(name, OPERATORS):  # upstream passes the name of an operator of its own
        native = loader.load()
        return native.invoke_operator(to, *qualified_name(name), args, kwargs, timeout)
    invoke = _original(api, "_invoke_rpc_builtin")
    future = loader.load().invoke_builtin(to, name, timeout, *args, **kwargs)
    return invoke(to, name, timeout, *args, **kwargs) if future is None else future


def _invoke_rpc_torchscript(
    to: str, function: Any, args: Any, kwargs: Any, timeout: float, is_async: bool
) -> Any:
    if not isinstance(function, str):  # upstream's _invoke_rpc passes the function's name
        future = loader.load().invoke_script(to, function, args, kwargs, timeout, is_async)
        if future is not None:
            return future
        function = torch._jit_internal._qualified_name(function)
    invoke = _original(api, "_invoke_rpc_torchscript")
    return invoke(to, function, args, kwargs, timeout, is_async)


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _generating:
            return function(*args, **kwargs)

    return locked


def _make_rref(self: Any, value: Any, type_hint: Any = None) -> None:
    loader.load().require_finite(value)
    rpc.PyRRef.__init__(self, value, type_hint)


def _invoke_remote_torchscript(
    to: Any, name: str, timeout: float, is_async: bool, /, *args: Any, **kwargs: Any
) -> Any:
    loader.load().require_script_arguments(args, kwargs)
    invoke = _original(api, "_invoke_remote_torchscript")
    return invoke(to, name, timeout, is_async, *args, **kwargs)


def _saying_why(to_here: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyRRef.to_here() with the error of the RRef's creation, for which torch says "timed
    out", whatever it was."""

    @functools.wraps(to_here)
    def to_here_or_why(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return to_here(self, *args, **kwargs)
        except RuntimeError:
            loader.load().raise_if_not_created(self)
            raise

    return to_here_or_why


def _typed(invoke: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a function that makes an RRef as `invoke` does; an error keeps its class.

    Args:
        invoke: a function of api that makes an RRef.
        place: index of the time-out among its arguments.
    """

    def invoke_typed(*args: Any, **kwargs: Any) -> Any:
        require_call_timeout(args[place])  # before the RRef is made, as in _invoke_rpc()
        native = loader.load()
        native.forget_creation_failure()
        try:
            rref = invoke(*args, **kwargs)
        except RuntimeError:
            try:
                native.raise_creation_failure()
            except errors.RpcError as typed:
                raise typed from None
            raise
        native.watch_creation(rref)
        return rref

    return invoke_typed
