"""RemoteFunction: a function with methods that call it on other workers.

The base of scripting.remote, aio.remote and aio.batched. On public APIs of torch.distributed.rpc
only, so it works over any back end.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from torch.distributed import rpc as _untyped_rpc
from torch.futures import Future

from torch_rpc_ext._calls import group_calls

if TYPE_CHECKING:
    from torch.distributed.rpc import RRef

rpc: Any = _untyped_rpc  # upstream's functions have no types

P = ParamSpec("P")
T = TypeVar("T")

#: As upstream has it: the time-out of the back end's options.
DEFAULT_TIMEOUT = -1.0
#: What the methods here are given beside the function's own arguments.
RESERVED = "rpc_timeout"


class RemoteFunction(Generic[P, T]):
    """A function of a module, with methods that call it on other workers.

    It travels by its name: callees import the module. Called itself, it runs here.
    All methods take the function's arguments and `rpc_timeout`: s, 0 for none, -1 for the
    back end's default, of each call. `to` is a name, a rank or a WorkerInfo.

    Args:
        function: it must stand at the top level of its module.
        reduce: for map_reduce(): makes one result of two.

    Raises:
        TypeError: no such function, or it has a parameter that is called rpc_timeout.
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
        """Run it here."""
        return self.function(*args, **kwargs)

    def _request(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return what is called there, and with what."""
        return self, args, kwargs

    def sync(
        self, to: Any, /, *args: Any, rpc_timeout: float = DEFAULT_TIMEOUT, **kwargs: Any
    ) -> T:
        """Call it there and wait.

        Returns:
            What it returns.

        Raises:
            Exception: what it raises, or what rpc.rpc_sync() raises.
        """
        target, args, kwargs = self._request(args, kwargs)
        result: T = rpc.rpc_sync(to, target, args, kwargs, rpc_timeout)
        return result

    def async_(
        self, to: Any, /, *args: Any, rpc_timeout: float = DEFAULT_TIMEOUT, **kwargs: Any
    ) -> Future[T]:
        """Call it there; return a future of what it returns."""
        target, args, kwargs = self._request(args, kwargs)
        future: Future[T] = rpc.rpc_async(to, target, args, kwargs, rpc_timeout)
        return future

    def remote(
        self, to: Any, /, *args: Any, rpc_timeout: float = DEFAULT_TIMEOUT, **kwargs: Any
    ) -> RRef[T]:
        """Call it there; return an RRef to what it returns, which stays there."""
        target, args, kwargs = self._request(args, kwargs)
        rref: RRef[T] = rpc.remote(to, target, args, kwargs, rpc_timeout)
        return rref

    async def call(
        self, to: Any, /, *args: Any, rpc_timeout: float = DEFAULT_TIMEOUT, **kwargs: Any
    ) -> T:
        """Call it there; for `await` in asyncio."""
        from torch_rpc_ext._calls.event_loops import as_asyncio

        return await as_asyncio(self.async_(to, *args, rpc_timeout=rpc_timeout, **kwargs))

    def gather(
        self,
        workers: Sequence[Any],
        /,
        *args: Any,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> list[T]:
        """Call it on all workers at once; see scripting.gather()."""
        return group_calls.gather(workers, self, args, kwargs, rpc_timeout)

    def broadcast(
        self,
        workers: Sequence[Any],
        /,
        *args: Any,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        """Call it on all workers at once and wait; see scripting.broadcast()."""
        group_calls.broadcast(workers, self, args, kwargs, rpc_timeout)

    def first_of(
        self,
        workers: Sequence[Any],
        /,
        *args: Any,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> T:
        """Call it on all workers at once, return the first result; see scripting.first_of()."""
        result: T = group_calls.first_of(workers, self, args, kwargs, rpc_timeout)
        return result

    def map_reduce(
        self,
        workers: Sequence[Any],
        items: Sequence[Any],
        /,
        *args: Any,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> T:
        """Call it with each item, somewhere, and reduce; see scripting.map_reduce().

        Raises:
            TypeError: it was made without `reduce`.
        """
        result: T = group_calls.map_reduce(
            workers, self, items, needed_reduce(self), args, kwargs, rpc_timeout
        )
        return result


def needed_reduce(function: Any) -> Callable[[Any, Any], Any]:
    """Return the function's `reduce`.

    Raises:
        TypeError: it has none.
    """
    if function.reduce is None:
        raise TypeError(
            f"{function.__name__}.map_reduce() needs to know how to make one result of two: give "
            "its decorator reduce=..."
        )
    reduce: Callable[[Any, Any], Any] = function.reduce
    return reduce
