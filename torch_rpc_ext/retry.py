"""Calling again what failed, for functions that may run more than once.

A call that has failed may have run, and only the author of the function knows whether it may run
twice. So nothing is called again unless the program asks for it::

    policy = RetryPolicy(attempts=5, deadline=30)
    policy.rpc_sync("ps", read, args=(key,))
    policy.rpc_async("ps", read, args=(key,)).wait()

    @policy
    def refresh() -> Tensor:  # as often as it takes, whatever it calls; an async def too
        return rpc.rpc_sync("ps", read, args=(key,))

With distributed autograd, decorate the function that opens the context, so that each attempt has a
context of its own: a failed call stays in its context's graph, and backward() would wait for the
call's gradient for ever.

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
from torch_rpc_ext._base import option_checks
from torch_rpc_ext._base.call_checks import require_call_timeout
from torch_rpc_ext._base.option_checks import UNSET_RPC_TIMEOUT
from torch_rpc_ext._calls import wire_dtype
from torch_rpc_ext._calls.attempts import begin
from torch_rpc_ext._group import sessions

rpc: Any = _untyped_rpc  # upstream's functions have no types

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["RetryPolicy"]

# Kinds of error after which another attempt may succeed.
TRANSIENT = (
    errors.PeerLostError,
    # A worker that leaves in order may be started again, as one that died.
    errors.ShutDownError,
    errors.NotInGroupError,
    errors.CallTimeoutError,
    errors.OverloadedError,
)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often to call again, after which errors and pauses.

    ::

        policy = RetryPolicy(attempts=5, wait=0.2, deadline=30)
        policy.rpc_sync("ps", read, args=(key,))

    Thread Safety: an object may be used by any number of threads at once.

    Args:
        attempts: calls in all, the first included; at least 1.
        wait: pause after the first failure, s. The pause doubles with each further failure.
        max_wait: longest pause, s; jitter not included.
        jitter: a random time up to this is added to each pause, s, so that callers that failed
            together do not come back together.
        deadline: no attempt begins later than this after the first, s, and no attempt has a longer
            time-out than what is left; None for no deadline.
        retry_on: a class of errors, or a tuple of classes as in an except clause, after which to
            call again; by default a worker that is lost, shuts down, or is not in the dynamic group
            (has left, or has still to join), a time-out and overload.
            An error of these classes counts also if the remote function raises it, or a call that
            the function makes: catch it there if the function must not run again. A ShutDownError
            because this worker shuts down is never one of them.

    Raises:
        ValueError: a value is out of range; the text names it.
        TypeError: a value is no number, or `retry_on` is no class of errors.
    """

    attempts: int = 3
    wait: float = 0.1
    max_wait: float = 5.0
    jitter: float = 0.1
    deadline: float | None = None
    retry_on: type[Exception] | tuple[type[Exception], ...] = TRANSIENT

    def __post_init__(self) -> None:
        option_checks.positive_int("attempts", self.attempts)
        for name in ("wait", "max_wait", "jitter"):
            if option_checks.seconds(name, getattr(self, name)) < 0:
                raise ValueError(f"{name} must be 0 s or more, got {getattr(self, name)!r}")
        if self.deadline is not None and option_checks.seconds("deadline", self.deadline) <= 0:
            raise ValueError(f"deadline must be more than 0 s, got {self.deadline!r}")
        classes = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        if not all(isinstance(one, type) and issubclass(one, BaseException) for one in classes):
            raise TypeError(f"retry_on must be a tuple of exception classes, got {self.retry_on!r}")

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
            to: name, rank or WorkerInfo. A name also finds a worker that was lost or has left, and
                has come back under that name.
            func: the function; it may run more than once.
            args: the function's arguments.
            kwargs: the function's keyword arguments.
            timeout: of each attempt, s; 0 for none, None for the options' rpc_timeout. No attempt
                waits longer than until the deadline.

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
        """Call as this class's rpc_sync() does, but do not wait.

        No thread waits for the call: the thread that receives a failed attempt's answer begins the
        next attempt, or hands the pause to a thread that ends the pauses of all calls. All attempts
        are in the wire_dtype() block that this call is in.

        Args:
            to: as in rpc_sync().
            func: as in rpc_sync().
            args: as in rpc_sync(). Tensors must not be changed until the future is done.
            kwargs: as in rpc_sync().
            timeout: as in rpc_sync().

        Returns:
            A future of what the function returns, or of the last attempt's error.
        """
        end = None if self.deadline is None else time.monotonic() + self.deadline
        block = wire_dtype.of_block()

        def attempt() -> Future[T]:
            # A block belongs to a thread, and later attempts begin on other threads.
            with wire_dtype.as_in_block(block):
                future: Future[T] = rpc.rpc_async(
                    to, func, args=args, kwargs=kwargs, timeout=_timeout(timeout, end)
                )
            return future

        return begin(self._arguments(), attempt)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate a function so that it runs again as the policy says.

        Decorating an `async def` gives an `async def`. The deadline cannot shorten an attempt that
        has begun: the calls within the function have their own time-outs. The decorated function
        raises what the last attempt raised.

        Raises:
            TypeError: `function` is a generator function, with `def` or `async def`.
        """
        if _is(function, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            # A call of it only makes the generator and cannot fail, so no attempt would follow.
            raise TypeError(
                "RetryPolicy cannot repeat a generator function, got "
                f"{getattr(function, '__qualname__', function)}: decorate the function that makes "
                "the call."
            )
        if _is(function, inspect.iscoroutinefunction):

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
        """Return the arguments of tenacity.Retrying."""
        stop: Any = tenacity.stop_after_attempt(self.attempts)
        if self.deadline is not None:
            # A pause that would end after the deadline is not begun.
            stop = tenacity.stop_any(stop, tenacity.stop_before_delay(self.deadline))
        session = sessions.current()

        def again(error: BaseException) -> bool:
            if isinstance(error, errors.ShutDownError) and _has_ended(session):
                return False  # this worker shuts down: no other attempt could succeed
            return isinstance(error, self.retry_on)

        return {
            "stop": stop,
            "wait": tenacity.wait_exponential(multiplier=self.wait, max=self.max_wait)
            + tenacity.wait_random(0, self.jitter),
            "retry": tenacity.retry_if_exception(again),
            "reraise": True,
        }


def _has_ended(session: sessions.Session | None) -> bool:
    """Return whether RPC on UCX has been or is being shut down here, and has not begun anew."""
    now = sessions.current()
    return session is not None and (now is None or bool(now.agent.stopped))


def _is(function: Callable[..., Any], *kinds: Callable[[Any], bool]) -> bool:
    """Return whether a function is of one of the kinds; it may be an object with __call__."""
    called = getattr(function, "__call__", None)  # noqa: B004  callable() would not tell its kind
    return any(is_kind(function) or is_kind(called) for is_kind in kinds)


def _timeout(timeout: float | None, end: float | None) -> float:
    """Return an attempt's time-out in upstream's terms: -1 for the default, 0 for none.

    Raises:
        ValueError: the time-out is negative or NaN.
        TypeError: the time-out is no number.
    """
    if timeout is None:
        timeout = UNSET_RPC_TIMEOUT
    require_call_timeout(timeout)
    if end is None:
        return timeout
    if timeout == UNSET_RPC_TIMEOUT:
        timeout = float(rpc.get_rpc_timeout())
    # At least 0.001, because 0 would mean no time-out.
    left = max(end - time.monotonic(), 0.001)
    return min(left, timeout) if timeout > 0 else left
