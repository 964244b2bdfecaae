"""Synchronous calls, one after the other."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.backends.interface import Backend
from benchmarks.cases.interface import CallCase, Figures, Metric, Target
from benchmarks.functions import FUNCTIONS


@functools.cache
def elements(payload: int) -> Tensor:
    """Return a tensor of so many bytes; all cases share one of each size, to save memory."""
    return torch.arange(payload // 4, dtype=torch.float32)


class SyncCalls(CallCase):
    """Calls of one function with one tensor.

    Attributes:
        untimed: number of calls of a round that are not timed.

    Args:
        name: on the command line.
        title: in the table.
        function: name in functions.py.
        payload: size of the tensor argument, bytes; 0 for no argument.
        calls: in one round.
        rounds: by default.
        targets: of the time.
        long: measured only when asked for.
    """

    untimed = 0

    def __init__(
        self,
        name: str,
        title: str,
        function: str,
        payload: int,
        *,
        calls: int,
        rounds: int,
        targets: tuple[Target, ...] = (),
        long: bool = False,
    ) -> None:
        metrics = {"time": Metric(title, "s", targets)}
        super().__init__(name, metrics, rounds, frozenset({function}))
        self.function, self.payload, self.calls, self.long = function, payload, calls, long
        self.arguments: tuple[Any, ...] | None = None

    def measure(self, backend: Backend) -> Figures:
        call, clock, function = self._caller(backend), time.perf_counter, self.function
        if self.arguments is None:  # the first round, which is not counted
            self.arguments = self._make_arguments()
            self._check(call(1, function, *self.arguments))
        arguments = self.arguments
        times = []
        for _ in range(self.calls - self.untimed):
            start = clock()
            call(1, function, *arguments)
            times.append(clock() - start)
        return {"time": times}

    def _caller(self, backend: Backend) -> Callable[..., Any]:
        return backend.call

    def _make_arguments(self) -> tuple[Any, ...]:
        if not self.payload:
            return ()
        tensor = elements(self.payload)
        # Two tensors, not a tensor and a number: for a number torch finds the operator by catching
        # an exception, which takes longer than the call.
        return (tensor, tensor) if self.function == "add" else (tensor,)

    def _check(self, answer: Any) -> None:
        # A wrong answer that comes fast is not a result.
        assert self.arguments is not None
        if self.arguments:
            # A part is enough, because all functions are elementwise; all of 400 MB takes seconds.
            some = [argument[-1000:].clone() for argument in self.arguments]
            wanted = FUNCTIONS[self.function](*some)
            if answer.numel() != self.payload // 4 or not torch.equal(answer[-1000:], wanted):
                raise RuntimeError(f"{self.name}: the answer is wrong")


class AwaitedCalls(SyncCalls):
    """Asynchronous calls, each waited for at once; the arguments are those of SyncCalls."""

    def _caller(self, backend: Backend) -> Callable[..., Any]:
        call_async = backend.call_async
        return lambda *arguments: call_async(*arguments).wait()


class Operations(SyncCalls):
    """Calls whose time is mostly the function's; the first call of a round is not timed.

    The function's time differs by some percent between blocks of memory (docs/performance.md), and
    a back end that always used the same block would be lucky or unlucky. So the first answer of a
    round is kept for a while, and the other calls use other memory. It is not kept where a round
    has only one more call: to make a block of 400 MB takes a tenth of that call's time, and the
    first call of a round uses memory that was given back while other cases ran.

    The arguments are those of SyncCalls.
    """

    untimed = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: deque[Tensor] = deque(maxlen=5 if self.calls > 2 else 0)

    def measure(self, backend: Backend) -> Figures:
        if self.arguments is not None:  # not in the first round, which is not counted
            self.kept.append(backend.call(1, self.function, *self.arguments))
        return super().measure(backend)


class ManyTensors(CallCase):
    """One call with a list of tensors, which it returns."""

    calls = 20
    count, payload = 1000, 256

    def __init__(self) -> None:
        title = f"{self.count} tensors of {self.payload} B, one call"
        super().__init__("many-tensors", {"time": Metric(title)}, 10, frozenset({"identity_all"}))

    def measure(self, backend: Backend) -> Figures:
        tensors = [torch.full((self.payload // 4,), float(value)) for value in range(self.count)]
        times = []
        for _ in range(self.calls):
            start = time.perf_counter()
            answer = backend.call(1, "identity_all", tensors)
            times.append(time.perf_counter() - start)
        if not torch.equal(torch.stack(answer), torch.stack(tensors)):
            raise RuntimeError(f"{self.name}: the answer is wrong")
        return {"time": times}


def _cpu(at_least: float = 4, aim: float = 5) -> Target:
    return Target(at_least, aim, "cpu")


# At most 5 % slower than the limit, which takes the time of the function and the copies.
_OPERATIONS = (Target(1 / 1.05, against="limit"),)

_SMALL = [
    SyncCalls(
        "empty",
        "empty python call",
        "nothing",
        0,
        calls=200,
        rounds=20,
        targets=(Target(1.8, 2.5), _cpu()),
    ),
    SyncCalls(
        "builtin",
        "builtin add, 4 B",
        "add",
        4,
        calls=200,
        rounds=20,
        targets=(Target(3, 4), _cpu()),
    ),
    SyncCalls(
        "script",
        "TorchScript identity, 4 B",
        "script_identity",
        4,
        calls=200,
        rounds=20,
        targets=(Target(3.5, 4), _cpu()),
    ),
    AwaitedCalls(
        "async-builtin",
        "builtin add, rpc_async().wait()",
        "add",
        4,
        calls=200,
        rounds=20,
    ),
    SyncCalls(
        "python",
        "python identity, 4 B",
        "identity",
        4,
        calls=200,
        rounds=20,
        targets=(Target(2.5, 4), _cpu()),
    ),
    SyncCalls(
        "python-64k",
        "python identity, 64 KB",
        "identity",
        65536,
        calls=150,
        rounds=20,
        targets=(Target(2.5, 4),),
    ),
]

# The paper's matrix.
_LARGE = [
    SyncCalls(
        "python-4m",
        "python identity, 4 MB",
        "identity",
        4_000_000,
        calls=40,
        rounds=10,
        targets=(Target(4, 5),),
    ),
    SyncCalls(
        "script-4m",
        "TorchScript identity, 4 MB",
        "script_identity",
        4_000_000,
        calls=40,
        rounds=7,
    ),
    SyncCalls(
        "builtin-4m", "builtin identity, 4 MB", "builtin_identity", 4_000_000, calls=40, rounds=7
    ),
    SyncCalls(
        "python-400m",
        "python identity, 400 MB",
        "identity",
        400_000_000,
        calls=2,
        rounds=7,
        targets=(Target(12, 20), Target(90, 150, against="grpc")),
    ),
    SyncCalls(
        "script-400m",
        "TorchScript identity, 400 MB",
        "script_identity",
        400_000_000,
        calls=2,
        rounds=3,
    ),
    SyncCalls(
        "builtin-400m",
        "builtin identity, 400 MB",
        "builtin_identity",
        400_000_000,
        calls=2,
        rounds=3,
    ),
    *(
        Operations(
            f"{kind}-ops-{size}m",
            f"{title}, 200 ops, {size} MB",
            function,
            size * 1_000_000,
            calls=calls,
            rounds=rounds,
            targets=_OPERATIONS,
            long=size > 4,
        )
        for size, calls, rounds in ((4, 6, 20), (400, 2, 3))
        for kind, title, function in (
            ("python", "python", "operate"),
            ("script", "TorchScript", "script_operate"),
            ("builtin", "builtin", "builtin_operate"),
        )
    ),
]

CASES = [*_SMALL, *_LARGE, ManyTensors()]
