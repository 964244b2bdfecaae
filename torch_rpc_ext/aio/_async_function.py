"""The decorator for `async def` functions."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, overload

from torch.distributed import rpc as _untyped_rpc

from torch_rpc_ext._base.option_checks import UNSET_RPC_TIMEOUT, positive_int
from torch_rpc_ext._calls.event_loops import as_asyncio
from torch_rpc_ext._calls.remote_function import RemoteFunction, require_no_generator
from torch_rpc_ext.aio import _server

rpc: Any = _untyped_rpc  # upstream's functions have no types

P = ParamSpec("P")
T = TypeVar("T")

# A call is named by a random number that this process has drawn, and a count.
_process: int
_count: itertools.count[int]


def _draw_process_number() -> None:
    global _process, _count
    _process, _count = secrets.randbits(63), itertools.count()


_draw_process_number()
# Without a new number, two clients that were forked from one process would name their calls alike.
os.register_at_fork(after_in_child=_draw_process_number)


class AsyncFunction(RemoteFunction[P, T], _server.CoroutineFunction):
    """An `async def` function with methods that call it on other workers.

    ::

        @aio.remote(limit=1000)  # makes an AsyncFunction
        async def lookup(key: str) -> Tensor: ...

        await lookup.call("worker1", "a")  # on worker1
        await lookup("a")  # here

    All these functions of a callee share one event loop, thousands of calls at once: what a
    function does between two awaits holds up all other calls. Distributed autograd does not reach
    into the function.

    Args:
        function: an `async def` at the top level of its module.
        limit: how many calls run at once on a callee, the others wait there. Those that would take
            too much memory get OverloadedError at once. None for any number.
        reduce: makes one result of two, for map_reduce().

    Raises:
        TypeError: `function` is no such function, or the limit is no int.
        ValueError: a limit under 1.
    """

    def __init__(
        self,
        function: Callable[P, Coroutine[Any, Any, T]],
        *,
        limit: int | None = None,
        reduce: Callable[[T, T], T] | None = None,
    ) -> None:
        require_no_generator(function)
        if not inspect.iscoroutinefunction(function):
            raise TypeError(
                f"aio.remote is for async def functions, got {function!r}; use scripting.remote "
                "for others"
            )
        if limit is not None:
            positive_int("limit", limit)
        # mypy sees the coroutine; T is what the coroutine returns.
        super().__init__(function, reduce=reduce)  # type: ignore[arg-type]
        self.limit = limit

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:  # type: ignore[override]
        """Run the function here."""
        return await self.function(*args, **kwargs)  # type: ignore[misc,no-any-return]

    def _request(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return _server.run, (self, (_process, next(_count)), args, kwargs), {}

    async def call(
        self, to: Any, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
    ) -> T:
        """Call the function on a worker; for `await` in asyncio.

        When this call is cancelled (Task.cancel(), asyncio.timeout()), the callee is told: a call
        that waits there never begins, and a call that runs there gets asyncio.CancelledError at its
        next await.
        """
        target, request, _ = self._request(args, kwargs)
        future = rpc.rpc_async(to, target, request, timeout=rpc_timeout)
        try:
            result: T = await as_asyncio(future)
            return result
        except asyncio.CancelledError:
            if not future.done():
                with contextlib.suppress(RuntimeError):  # the callee is lost
                    rpc.rpc_async(to, _server.cancel, (request[1],))
            raise


@overload
def remote(function: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncFunction[P, T]: ...


@overload
def remote(
    *, limit: int | None = None, reduce: Callable[[T, T], T] | None = None
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], AsyncFunction[P, T]]: ...


def remote(
    function: Callable[..., Any] | None = None,
    /,
    *,
    limit: int | None = None,
    reduce: Callable[..., Any] | None = None,
) -> Any:
    """Give an `async def` function methods that call it on other workers; a decorator.

    Args:
        function: an `async def` at the top level of a module that callees can import.
        limit: how many calls run at once on a callee, the others wait there. Those that would take
            too much memory get OverloadedError at once. None for any number.
        reduce: makes one result of two, for map_reduce().

    Returns:
        An AsyncFunction; without `function`, a decorator that makes an AsyncFunction.

    Raises:
        TypeError: the function cannot be called remotely, or the limit is no int; the text says
            why.
        ValueError: a limit under 1.
    """
    if function is None:
        return lambda decorated: AsyncFunction(decorated, limit=limit, reduce=reduce)
    return AsyncFunction(function, limit=limit, reduce=reduce)
