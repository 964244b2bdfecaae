"""Calling again what failed, for functions that may run more than once.

Nothing is called again unless it is asked for here: a call that has failed may have run, and
whether it may run twice only its author knows::

    policy = RetryPolicy(attempts=5, deadline=30)
    policy.rpc_sync("ps", read, args=(key,))
    policy.rpc_async("ps", read, args=(key,)).wait()

    @policy
    def refresh() -> Tensor:  # as often as it takes, whatever it calls; an async def too
        return rpc.rpc_sync("ps", read, args=(key,))

Within distributed autograd, call the function again that opens the context (`@policy` on it): a
call that failed stays in its context's graph, and backward() would wait for its gradient for ever.

The loop, the waiting times and the conditions are tenacity's.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

try:
    import tenacity
except ImportError as problem:
    raise ImportError(
        "torch_rpc_ext.retry needs tenacity: pip install 'torch-rpc-ext[retry]'"
    ) from problem
from torch.distributed import rpc as _untyped_rpc
from torch.futures import Future

from torch_rpc_ext import errors
from torch_rpc_ext._calls.attempts import begin

rpc: Any = _untyped_rpc  # upstream's functions have no types

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["RetryPolicy"]

# Kinds of error after which another attempt may succeed.
TRANSIENT = (errors.PeerLostError, errors.CallTimeoutError, errors.OverloadedError)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often, when and after what to call again.

    Thread Safety: an object may be used by any number of threads at once.

    Args:
        attempts: calls in all, the first included; at least 1.
        wait: pause after the first failure, s. It doubles with each one.
        max_wait: longest pause, s; jitter not included.
        jitter: up to so much is added to each pause at random, s, so that callers that failed
            together do not come back together.
        deadline: the end of it all, s from the start, whatever attempts are left; None for none.
            Each attempt gets a time-out of at most what is left.
        retry_on: classes of errors after which to call again; by default a lost worker, a
            time-out and overload. What the remote function raises is not among them.

    Raises:
        ValueError: a value out of range, named.
    """

    attempts: int = 3
    wait: float = 0.1
    max_wait: float = 5.0
    jitter: float = 0.1
    deadline: float | None = None
    retry_on: tuple[type[Exception], ...] = TRANSIENT

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts!r}")
        for name in ("wait", "max_wait", "jitter"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 s or more, got {getattr(self, name)!r}")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline must be more than 0 s, got {self.deadline!r}")

    def rpc_sync(
        self,
        to: Any,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> T:
        """Call as torch.distributed.rpc.rpc_sync does, and again as the policy says.

        Args:
            to: name, rank or WorkerInfo. A name finds a worker that has come back under it.
            func: the function; it must bear to run more than once.
            args: its arguments.
            kwargs: its keyword arguments.
            timeout: of each attempt, s; 0 for none, None for the options' rpc_timeout. The
                deadline bounds it in any case.

        Returns:
            What the function returns.

        Raises:
            Exception: what the last attempt raised.
        """
        end = None if self.deadline is None else time.monotonic() + self.deadline
        result: T = tenacity.Retrying(**self._arguments())(
            lambda: rpc.rpc_sync(to, func, args=args, kwargs=kwargs, timeout=_timeout(timeout, end))
        )
        return result

    def rpc_async(
        self,
        to: Any,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Future[T]:
        """Call as rpc_sync() here, but do not wait.

        No thread belongs to the call: an attempt that fails leads to the next one from where its
        answer arrives, and one thread of the process ends the pauses of all.

        Args:
            to: as rpc_sync().
            func: as rpc_sync().
            args: as rpc_sync(). Tensors must stay as they are until the future is done.
            kwargs: as rpc_sync().
            timeout: as rpc_sync().

        Returns:
            A future of what the function returns. Its error has the type of the last attempt's.
        """
        end = None if self.deadline is None else time.monotonic() + self.deadline
        return begin(
            self._arguments(),
            lambda: rpc.rpc_async(
                to, func, args=args, kwargs=kwargs, timeout=_timeout(timeout, end)
            ),
        )

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Make a function that is run again as the policy says; a decorator.

        Of an `async def` it makes an `async def`. The deadline ends the attempts, but cannot
        shorten one: calls within the function have their own time-outs.
        """
        if _is_async(function):

            async def run_again(*args: P.args, **kwargs: P.kwargs) -> Any:
                retrying = tenacity.AsyncRetrying(**self._arguments())
                return await retrying(cast(Any, function), *args, **kwargs)

            retried_async: Any = functools.wraps(function)(run_again)
            return cast(Callable[P, T], retried_async)

        @functools.wraps(function)
        def retried(*args: P.args, **kwargs: P.kwargs) -> T:
            return tenacity.Retrying(**self._arguments())(function, *args, **kwargs)

        return retried

    def _arguments(self) -> dict[str, Any]:
        """Return what tenacity's loops are made with."""
        stop: Any = tenacity.stop_after_attempt(self.attempts)
        if self.deadline is not None:
            # A pause that would end after the deadline is not begun.
            stop = tenacity.stop_any(stop, tenacity.stop_before_delay(self.deadline))
        return {
            "stop": stop,
            "wait": tenacity.wait_exponential(multiplier=self.wait, max=self.max_wait)
            + tenacity.wait_random(0, self.jitter),
            "retry": tenacity.retry_if_exception_type(self.retry_on),
            "reraise": True,
        }


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of it makes a coroutine; of an object with an `async def __call__` too."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  its kind is asked for
    )


def _timeout(timeout: float | None, end: float | None) -> float:
    """Return the time-out of an attempt as upstream has it: -1 for default, 0 for none."""
    if end is None:
        return -1.0 if timeout is None else timeout
    # Never 0, which would mean none.
    left = max(end - time.monotonic(), 0.001)
    if timeout is None:
        default = float(rpc.get_rpc_timeout())
        return min(left, default) if default > 0 else left
    return min(left, timeout) if timeout > 0 else left
