"""The decorator for functions that take many calls at once."""

from __future__ import annotations

import contextvars
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch.distributed import rpc as _untyped_rpc
from torch.futures import Future

from torch_rpc_ext import errors
from torch_rpc_ext._base import option_checks
from torch_rpc_ext._calls import current_call
from torch_rpc_ext._calls.current_call import CurrentCall, Held
from torch_rpc_ext._calls.device_futures import HandedOver, new_future
from torch_rpc_ext._calls.remote_function import RemoteFunction
from torch_rpc_ext._upstream import thread_state
from torch_rpc_ext.aio._answers import answer, fail

rpc: Any = _untyped_rpc  # upstream's functions have no types

T = TypeVar("T")


class BatchedFunction(RemoteFunction[..., T]):
    """A function of lists; its methods call it on other workers with one item for each list.

    ::

        @aio.batched(max_size=32, max_wait=0.005)  # makes a BatchedFunction
        def predict(inputs: list[Tensor]) -> Tensor:
            return model(torch.stack(inputs))  # a row for each call

        predict.sync("worker1", x)  # one item there, one row back
        predict([x, y])  # the function of lists, here

    The callee collects the calls of all callers and runs the function once for a batch, with one
    list for each argument. One result goes back to each caller.

    Args:
        function: takes one list or more, of equal length; returns as many results, in the same
            order, as a list, a tuple or a tensor's rows. A result that is an exception is raised
            for its caller alone; an exception that the function raises, for all callers of the
            batch.
        max_size: most calls in a batch.
        max_wait: how long the first call of a batch waits for others, s.
        max_queue: how many calls may wait; further calls get OverloadedError at once.

    Raises:
        TypeError: `function` is no such function, or a number has another type.
        ValueError: a number is out of range; the text names it.
    """

    def __init__(
        self,
        function: Callable[..., Iterable[T]],
        *,
        max_size: int,
        max_wait: float,
        max_queue: int,
    ) -> None:
        # mypy sees all results of a batch; T is the result of one call.
        super().__init__(function)  # type: ignore[arg-type]
        if inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{function.__qualname__} is an async def; a batch function runs in a thread of "
                "its own, so make it a plain one"
            )
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY or parameter.kind is parameter.VAR_KEYWORD:
                raise TypeError(
                    f"{function.__qualname__}: argument {parameter.name!r} is keyword-only; a "
                    "batch function takes lists by position"
                )
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise TypeError(
                    f"{function.__qualname__}: argument *{parameter.name} takes any number of "
                    "items; all calls of a batch need the same number, so name each argument"
                )
        self.max_size = option_checks.positive_int("max_size", max_size)
        self.max_wait = option_checks.seconds("max_wait", max_wait)
        self.max_queue = option_checks.positive_int("max_queue", max_queue)
        if self.max_wait < 0:
            raise ValueError(f"max_wait must be 0 or more, got {max_wait!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Iterable[T]:  # type: ignore[override]
        """Run the function of lists here."""
        results: Any = self.function(*args, **kwargs)
        return cast(Iterable[T], results)

    def _request(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return enqueue, (self, self._items(args, kwargs)), {}

    def _items(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return one item for each argument of the function.

        Raises:
            TypeError: the items do not fit the function.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__qualname__}(): {error}") from None
        # All calls of a batch need the same number of items, also those that leave out a default.
        bound.apply_defaults()
        return bound.args


def batched(
    *, max_size: int = 32, max_wait: float = 0.005, max_queue: int = 1024
) -> Callable[[Callable[..., Iterable[T]]], BatchedFunction[T]]:
    """Group concurrent calls of a function into one execution; a decorator.

    Args:
        max_size: most calls in a batch.
        max_wait: how long the first call of a batch waits for others, s.
        max_queue: how many calls may wait at a callee; further calls get OverloadedError at once,
            after which RetryPolicy calls again.

    Returns:
        A decorator that makes a BatchedFunction.

    Raises:
        TypeError: the function cannot take batches, or a number has another type; the text says
            which.
        ValueError: a number is out of range; the text names it.
    """
    return lambda function: BatchedFunction(
        function, max_size=max_size, max_wait=max_wait, max_queue=max_queue
    )


@dataclass
class _Call:
    args: HandedOver[tuple[Any, ...]]
    served: CurrentCall | None = field(default_factory=current_call.find)
    held: Held = field(default_factory=lambda: current_call.hold(None))
    future: Future[Any] = field(default_factory=new_future)
    arrived: float = field(default_factory=time.monotonic)


class _Batcher:
    """Collects the calls of one function at the callee and runs them.

    Owns: the queue and the thread that runs the function.
    Thread Safety: add() from any thread.
    """

    def __init__(self, function: BatchedFunction[Any]) -> None:
        self._function = function
        self._queue: deque[_Call] = deque()
        self._changed = threading.Condition()
        self.thread = threading.Thread(
            target=self._run, name=f"rpc-batch-{function.__name__}", daemon=True
        )
        self.thread.start()

    def add(self, args: tuple[Any, ...]) -> Future[Any]:
        function, call = self._function, _Call(HandedOver(args))
        with self._changed:
            waiting = len(self._queue)
            if waiting < function.max_queue:
                # A first call is not counted, so a function with many calls keeps out no other.
                if waiting != 0:
                    try:
                        call.held = current_call.hold(call.served)
                    except errors.OverloadedError as error:
                        fail(call.future, error)
                        return call.future
                self._queue.append(call)
                # The thread waits for the first call, then for the call that fills the batch.
                if waiting + 1 in (1, function.max_size):
                    self._changed.notify()
                return call.future
        worker = rpc.get_worker_info().name
        text = (
            f'worker "{worker}" has {waiting} calls of {function.__qualname__} waiting, its '
            "max_queue; call again later"
        )
        fail(call.future, errors.OverloadedError(text, worker=worker))
        return call.future

    def _run(self) -> None:
        while True:
            self._serve(self._next())

    def _serve(self, batch: list[_Call]) -> None:
        """Run a batch and answer its calls; nothing of the batch is held afterwards."""
        for call in batch:
            call.held.release()
        try:
            batch = self._wanted(batch)
            results = self._results(batch) if batch else []
        except BaseException as error:  # noqa: BLE001  SystemExit must not end the thread
            results = [error] * len(batch)
        for call, result in zip(batch, results, strict=True):
            # Not isinstance(), by which a result may say what it likes, and raise.
            respond = fail if issubclass(type(result), BaseException) else answer
            respond(call.future, result)

    def _next(self) -> list[_Call]:
        size = self._function.max_size
        with self._changed:
            while not self._queue:
                self._changed.wait()
            end = self._queue[0].arrived + self._function.max_wait
            while len(self._queue) < size:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            return [self._queue.popleft() for _ in range(min(size, len(self._queue)))]

    def _wanted(self, batch: list[_Call]) -> list[_Call]:
        """Return the calls whose callers still wait; fail the others."""
        wanted = []
        for call in batch:
            if call.served is not None and call.served.cancelled:
                fail(call.future, errors.RpcError("the caller had given up"))
            else:
                wanted.append(call)
        return wanted

    def _results(self, batch: list[_Call]) -> list[Any]:
        function = self._function
        columns = [
            list(column) for column in zip(*(call.args.take() for call in batch), strict=True)
        ]
        try:
            # In a new context, and with the state of a new thread afterwards, so that nothing that
            # the function sets there reaches the next batch.
            results = contextvars.Context().run(self._list, columns)
        finally:
            thread_state.take()
        if len(results) != len(batch):
            raise ValueError(
                f"batch function {function.__qualname__} returned {len(results)} results for "
                f"{len(batch)} calls; it must return one for each, in their order"
            )
        return results

    def _list(self, columns: list[list[Any]]) -> list[Any]:
        function = self._function
        returned = function.function(*columns)
        problem = (
            f"batch function {function.__qualname__} returned a {type(returned).__name__}; it must "
            "return a list of one result for each call"
        )
        if isinstance(returned, (str, bytes, bytearray, Mapping, Set)):
            raise TypeError(problem)  # these have items, but no item belongs to one call
        try:
            return list(returned)
        except TypeError as error:
            raise TypeError(problem) from error


_lock = threading.Lock()
_batchers: dict[BatchedFunction[Any], _Batcher] = {}


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def enqueue(function: Any, args: tuple[Any, ...]) -> Future[Any]:
    """Put a call into the next batch; called remotely.

    Args:
        function: the BatchedFunction.
        args: one item for each argument of the function.

    Returns:
        A future of the call's result; of an OverloadedError if too many calls wait, or those that
        wait take too much memory.

    Raises:
        TypeError: `function` is of another kind, or the number of arguments is wrong.
    """
    if not isinstance(function, BatchedFunction):
        raise TypeError(f"not a batched remote function: {function!r}")
    items = function._items(args, {})
    with _lock:
        batcher = _batchers.get(function)
        # After a fork the child has the object but not its thread.
        if batcher is None or not batcher.thread.is_alive():
            batcher = _batchers[function] = _Batcher(function)
    return batcher.add(items)
