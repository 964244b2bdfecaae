"""The decorator for TorchScript remote functions."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext._base.option_checks import UNSET_RPC_TIMEOUT
from torch_rpc_ext._calls import group_calls
from torch_rpc_ext._calls.remote_function import needed_reduce

from . import _source
from ._types import NotScriptableError, check

__all__ = ["NotScriptableError", "ScriptRemoteFunction", "script"]

rpc: Any = _untyped_rpc  # upstream's functions have no types

P = ParamSpec("P")
T = TypeVar("T")


class ScriptRemoteFunction(types.ModuleType, Generic[P, T]):
    """A TorchScript function with methods that call it on other workers, which run it without GIL.

    ::

        @scripting.script  # makes a ScriptRemoteFunction
        def scale(x: Tensor, factor: float = 2.0) -> Tensor:
            return x * factor

        scale.sync("worker1", x, 3.0)  # in Python and within TorchScript
        scale.script(x)  # here, within TorchScript

    The methods work in Python, and all but call() and first_of() within TorchScript too. They take
    the function's arguments and then `rpc_timeout` (s, 0 for none, -1 for the options').

    This object is a Python module, so that TorchScript can compile `scale.sync(...)`: modules are
    the only objects on which TorchScript looks up attributes that are functions
    (torch/csrc/jit/python/python_sugared_value.cpp, toSugaredValue).

    Attributes:
        script: the TorchScript function, for a plain call within TorchScript, or rpc.rpc_sync().
        sync: ``sync(to, *args, rpc_timeout)`` calls the function on a worker and waits.
        async_: as sync, but returns a future.
        remote: as sync, but returns an RRef.
        call: as sync, for `await` in asyncio.
        gather: ``gather(workers, *args, rpc_timeout)`` returns a list; see scripting.gather().
        broadcast: call the function on all workers; see scripting.broadcast().
        first_of: the first result of several workers; see scripting.first_of().
        map_reduce: ``map_reduce(workers, items, *args, rpc_timeout)``, with items for the
            function's first argument; see scripting.map_reduce().

    Args:
        function: all arguments and the result have types that TorchScript knows.
        reduce: makes one result of two, for map_reduce(); TorchScript must be able to compile it.

    Raises:
        NotScriptableError: a type that TorchScript does not take, named.
        RuntimeError: TorchScript does not take the function's body; the text is torch's.
    """

    script: torch.jit.ScriptFunction[P, T]
    sync: Callable[..., T]
    async_: Callable[..., torch.futures.Future[T]]
    remote: Callable[..., Any]
    call: Callable[..., Any]
    gather: Callable[..., list[T]]
    broadcast: Callable[..., None]
    first_of: Callable[..., T]
    map_reduce: Callable[..., T]

    def __init__(
        self, function: Callable[P, T], *, reduce: Callable[[T, T], T] | None = None
    ) -> None:
        super().__init__(function.__name__, function.__doc__)
        self.signature = check(function)
        self.__module__ = function.__module__
        self.__qualname__ = function.__qualname__
        self.__wrapped__ = function
        self.reduce = reduce
        self.script = _compiled(function)
        for method, make in _METHODS.items():
            in_python = make(self)
            # TorchScript calls this attribute and compiles what it returns in place of in_python.
            in_python.__prepare_scriptable__ = _Prepare(self, method)
            setattr(self, method, in_python)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function here."""
        result: T = self.script(*args, **kwargs)
        return result

    def __reduce__(self) -> str:
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<TorchScript remote function {self.__module__}.{self.__qualname__}>"


@overload
def script(function: Callable[P, T], /) -> ScriptRemoteFunction[P, T]: ...


@overload
def script(
    *, reduce: Callable[[T, T], T] | None = None
) -> Callable[[Callable[P, T]], ScriptRemoteFunction[P, T]]: ...


def script(
    function: Callable[..., Any] | None = None, /, *, reduce: Callable[..., Any] | None = None
) -> Any:
    """Compile a function with TorchScript and give it methods that call it on other workers.

    Args:
        function: all arguments and the result have types that TorchScript knows. Callees must have
            imported the module of the function.
        reduce: makes one result of two, for map_reduce(); for map_reduce() within TorchScript,
            TorchScript must be able to compile it.

    Returns:
        A ScriptRemoteFunction; with `reduce` only, a decorator that makes a ScriptRemoteFunction.

    Raises:
        NotScriptableError: a type that TorchScript does not take, named.
        RuntimeError: TorchScript does not take the function's body; the text is torch's.
    """
    if function is None:
        return lambda decorated: ScriptRemoteFunction(decorated, reduce=reduce)
    return ScriptRemoteFunction(function, reduce=reduce)


class _Prepare:
    """Makes the TorchScript form of a method, when TorchScript asks for it.

    Source: torch/jit/_script.py, call_prepare_scriptable_func; _recursive.py, try_compile_fn.
    """

    def __init__(self, function: ScriptRemoteFunction[..., Any], method: str) -> None:
        self._function, self._method = function, method
        self._made: Any = None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> Any:
        function, method = self._function, self._method
        if method in _ONLY_IN_PYTHON:
            raise NotScriptableError(
                f"{function.__name__}.{method}() works in Python only: {_ONLY_IN_PYTHON[method]}"
            )
        reduce: Any = None
        if method == "map_reduce":
            reduce = needed_reduce(function)
            if not function.signature.parameters:
                raise NotScriptableError(f"{function.__name__} has no argument to map items to")
            reduce = getattr(reduce, "script", reduce)
        return _source.generate(method, function.script, function.signature, reduce)


# Methods that TorchScript cannot have, and why.
_ONLY_IN_PYTHON = {
    "call": "TorchScript has no await; use async_() and wait()",
    "first_of": "TorchScript cannot wait for the first of several futures",
}


def _compiled(function: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        # The user has chosen TorchScript; docs/scripting.md says what its deprecation means.
        # A DeprecationWarning up to torch 2.13, then a FutureWarning.
        warnings.filterwarnings("ignore", "`torch.jit.script`")
        return torch.jit.script(function)


def _sync(function: ScriptRemoteFunction[..., Any]) -> Any:
    def sync(to: Any, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any) -> Any:
        return rpc.rpc_sync(to, function.script, args, kwargs, rpc_timeout)

    return sync


def _async(function: ScriptRemoteFunction[..., Any]) -> Any:
    def async_(
        to: Any, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
    ) -> Any:
        return rpc.rpc_async(to, function.script, args, kwargs, rpc_timeout)

    return async_


def _remote(function: ScriptRemoteFunction[..., Any]) -> Any:
    def remote(
        to: Any, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
    ) -> Any:
        return rpc.remote(to, function.script, args, kwargs, rpc_timeout)

    return remote


def _call(function: ScriptRemoteFunction[..., Any]) -> Any:
    async def call(to: Any, /, *args: Any, **kwargs: Any) -> Any:
        from torch_rpc_ext.aio import as_asyncio

        return await as_asyncio(function.async_(to, *args, **kwargs))

    return call


def _on_all(group_call: Callable[..., Any]) -> Callable[[ScriptRemoteFunction[..., Any]], Any]:
    """Make gather(), broadcast() or first_of() of one function."""

    def make(function: ScriptRemoteFunction[..., Any]) -> Any:
        def on_all(
            workers: Any, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
        ) -> Any:
            return group_call(workers, function, args, kwargs, rpc_timeout)

        return on_all

    return make


def _map_reduce(function: ScriptRemoteFunction[..., Any]) -> Any:
    def map_reduce(
        workers: Any,
        items: Any,
        /,
        *args: Any,
        rpc_timeout: float = UNSET_RPC_TIMEOUT,
        **kwargs: Any,
    ) -> Any:
        reduce = needed_reduce(function)
        return group_calls.map_reduce(workers, function, items, reduce, args, kwargs, rpc_timeout)

    return map_reduce


# Plain functions, not bound methods: TorchScript compiles functions only.
_METHODS: dict[str, Callable[[ScriptRemoteFunction[..., Any]], Any]] = {
    "sync": _sync,
    "async_": _async,
    "remote": _remote,
    "call": _call,
    "gather": _on_all(group_calls.gather),
    "broadcast": _on_all(group_calls.broadcast),
    "first_of": _on_all(group_calls.first_of),
    "map_reduce": _map_reduce,
}
