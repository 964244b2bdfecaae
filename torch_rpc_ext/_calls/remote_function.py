"""RemoteFunction: a function with methods that call it on other workers.

The base of scripting.remote, aio.remote and aio.batched. It uses public APIs of
torch.distributed.rpc only, so it works over any back end.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from torch.distributed import rpc as _untyped_rpc
from torch.futures import Future

from torch_rpc_ext._base.option_checks import UNSET_RPC_TIMEOUT
from torch_rpc_ext._calls import group_calls

if TYPE_CHECKING:
    from torch.distributed.rpc import RRef

    from torch_rpc_ext._calls.group_calls import To

rpc: Any = _untyped_rpc  # upstream's functions have no types

P = ParamSpec("P")
T = TypeVar("T")

#: The one argument that the methods take for themselves. It is not called `timeout`, because the
#: function's own arguments stand beside it, and one of these may be called so.
RESERVED = "rpc_timeout"


def require_no_generator(function: Callable[..., Any]) -> None:
    """Raise where a call would only make a generator, which cannot be sent.

    Raises:
        TypeError: `function` is a generator function, with `def` or `async def`.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        name = getattr(function, "__qualname__", function)
        raise TypeError(
            f"{name} cannot be a remote function, because it yields: return a list, or make a call "
            "for each item"
        )


class RemoteFunction(Generic[P, T]):
    """A function of a module, with methods that call it on other workers.

    ::

        @scripting.remote  # makes a RemoteFunction
        def length(text: str) -> int:
            return len(text)

        length.sync("worker1", "four", rpc_timeout=10)  # 4, from worker1
        length.async_("worker1", "four").wait()
        length("four")  # runs here

    Only the function's name travels: callees import the module. All methods take the function's
    arguments and `rpc_timeout`, the time-out of each call: s, 0 for none, -1 for the options'
    rpc_timeout. `to` is a name, a rank or a WorkerInfo.

    Args:
        function: a function at the top level of its module.
        reduce: makes one result of two, for map_reduce().

    Raises:
        TypeError: `function` is no such function, or has a parameter that is called rpc_timeout.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self, function: Callable[P, T], *, reduce: Callable[[T, T], T] | None = None
    ) -> None:
        if not inspect.isfunction(function):
            raise TypeError(f"a remote function is made of a function, got {function!r}")
        if "<locals>" in function.__qualname__:
            raise TypeError(
                f"{function.__qualname__} cannot be a remote function: callees look it up by its "
                "name, so define it at the top level of a module"
            )
        self.signature = inspect.signature(function)
        if RESERVED in self.signature.parameters:
            raise TypeError(
                f"{function.__qualname__}: the name of its argument {RESERVED!r} is taken: "
                "it is the time-out of a call"
            )
        functools.update_wrapper(self, function)
        self.function: Callable[P, T] = function
        self.reduce = reduce

    def __reduce__(self) -> str:
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<remote function {self.__module__}.{self.__qualname__}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function here."""
        return self.function(*args, **kwargs)

    def _request(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function that the callee runs, its arguments and its keyword arguments."""
        return self, args, kwargs

    # The arguments of the methods below are Any: ParamSpec has no form for a function's arguments
    # with a keyword between *args and **kwargs (PEP 612).

    def sync(
        self, to: To, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
    ) -> T:
        """Call the function on a worker and wait.

        Returns:
            What the function returns.

        Raises:
            Exception: what the function or rpc.rpc_sync() raises.
        """
        target, args, kwargs = self._request(args, kwargs)
        result: T = rpc.rpc_sync(to, target, args, kwargs, rpc_timeout)
        return result

    def async_(
        self, to: To, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
    ) -> Future[T]:
        """Call the function on a worker; return a future of what the function returns."""
        target, args, kwargs = self._request(args, kwargs)
        future: Future[T] = rpc.rpc_async(to, target, args, kwargs, rpc_timeout)
        return future

    def remote(
        self, to: To, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
    ) -> RRef[T]:
        """Call the function on a worker; return an RRef to its result, which stays there."""
        target, args, kwargs = self._request(args, kwargs)
        rref: RRef[T] = rpc.remote(to, target, args, kwargs, rpc_timeout)
        return rref

    async def call(
        self, to: To, /, *args: Any, rpc_timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
    ) -> T:
        """Call the function on a worker; for `await` in asyncio."""
        from torch_rpc_ext._calls.event_loops import as_asyncio

        return await as_asyncio(self.async_(to, *args, rpc_timeout=rpc_timeout, **kwargs))

    def gather(
        self,
        workers: Sequence[To],
        /,
        *args: Any,
        rpc_timeout: float = UNSET_RPC_TIMEOUT,
        **kwargs: Any,
    ) -> list[T]:
        """Call the function on all workers at once; see scripting.gather()."""
        return group_calls.gather(workers, self, args, kwargs, rpc_timeout)

    def broadcast(
        self,
        workers: Sequence[To],
        /,
        *args: Any,
        rpc_timeout: float = UNSET_RPC_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        """Call the function on all workers at once and wait; see scripting.broadcast()."""
        group_calls.broadcast(workers, self, args, kwargs, rpc_timeout)

    def first_of(
        self,
        workers: Sequence[To],
        /,
        *args: Any,
        rpc_timeout: float = UNSET_RPC_TIMEOUT,
        **kwargs: Any,
    ) -> T:
        """Call the function on all workers, return the first result; see scripting.first_of()."""
        result: T = group_calls.first_of(workers, self, args, kwargs, rpc_timeout)
        return result

    def map_reduce(
        self,
        workers: Sequence[To],
        items: Sequence[object],
        /,
        *args: Any,
        rpc_timeout: float = UNSET_RPC_TIMEOUT,
        **kwargs: Any,
    ) -> T:
        """Call the function with each item and reduce; see scripting.map_reduce().

        Raises:
            TypeError: the remote function was made without `reduce`.
        """
        result: T = group_calls.map_reduce(
            workers, self, items, needed_reduce(self), args, kwargs, rpc_timeout
        )
        return result


def needed_reduce(function: Any) -> Callable[[Any, Any], Any]:
    """Return the `reduce` of a remote function.

    Raises:
        TypeError: the remote function has none.
    """
    if function.reduce is None:
        raise TypeError(
            f"{function.__name__}.map_reduce() needs to know how to make one result of two: give "
            "its decorator reduce=..."
        )
    reduce: Callable[[Any, Any], Any] = function.reduce
    return reduce
