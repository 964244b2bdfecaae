"""The decorator for plain Python functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from torch_rpc_ext._calls.remote_function import RemoteFunction, require_no_generator

P = ParamSpec("P")
T = TypeVar("T")


@overload
def remote(function: Callable[P, T], /) -> RemoteFunction[P, T]: ...


@overload
def remote(
    *, reduce: Callable[[T, T], T] | None = None
) -> Callable[[Callable[P, T]], RemoteFunction[P, T]]: ...


def remote(
    function: Callable[..., Any] | None = None, /, *, reduce: Callable[..., Any] | None = None
) -> Any:
    """Give a function methods that call it on other workers; a decorator.

    Args:
        function: at the top level of a module that callees can import.
        reduce: makes one result of two, for map_reduce().

    Returns:
        A RemoteFunction; with `reduce` only, a decorator that makes a RemoteFunction.

    Raises:
        TypeError: the function cannot be called remotely; the text says why.
    """
    if function is None:
        return lambda decorated: _made(decorated, reduce)
    return _made(function, reduce)


def _made(
    function: Callable[..., Any], reduce: Callable[..., Any] | None
) -> RemoteFunction[..., Any]:
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{function.__qualname__} is an async def: use torch_rpc_ext.aio.remote for it"
        )
    require_no_generator(function)
    return RemoteFunction(function, reduce=reduce)
