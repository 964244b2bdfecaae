"""Remote functions of torch_rpc_ext.scripting and torch_rpc_ext.aio that the tests call."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.deaths import wait_for_file
from torch_rpc_ext import aio, scripting
from torch_rpc_ext.aio import _server

WORKERS = ["worker0", "worker1", "worker2", "worker3"]


class Pair(NamedTuple):
    first: Tensor
    second: int


def larger(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b)


@scripting.script(reduce=larger)
def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    if x.numel() == 3:
        raise ValueError("three are too many")
    return x * factor


@scripting.script
def split(pair: Pair, more: dict[str, list[int]], maybe: int | None = None) -> Pair:
    """Has arguments and results of many types."""
    extra = 0 if maybe is None else maybe
    return Pair(pair.first + 1, pair.second + len(more["a"]) + extra)


@scripting.script
def spin(x: Tensor, rounds: int) -> Tensor:
    for _ in range(rounds):
        x = x + 1
    return x


@scripting.script
def nothing(x: Tensor) -> None:
    return None


@scripting.script
def chance() -> float:
    return float(torch.rand(1, dtype=torch.float64))


@torch.jit.script
def scripted_twice(to: str) -> list[float]:
    """Make the same call twice: TorchScript must not merge the two calls."""
    return [chance.sync(to), chance.sync(to), chance.async_(to).wait(), chance.async_(to).wait()]


@torch.jit.script
def scripted_user(to: str, workers: list[str], x: Tensor) -> list[Tensor]:
    """Call remote functions in all ways, from within TorchScript."""
    nothing.broadcast(workers, x)
    future = scale.async_(to, x, 5.0)
    return [
        scale.sync(to, x, rpc_timeout=20.0),
        future.wait(),
        scale.remote(to, x).to_here(),
        scale.script(x, 7.0),
        torch.stack(scale.gather(workers, x, factor=3.0)),
        scale.map_reduce(workers, [x, x * 4, x * 2, x, x * 3], 10.0),
    ]


@scripting.script
def own_names(to: str, workers: list[str], items: int, rpc: int) -> str:
    """Has arguments whose names equal, or resemble, those that the methods of a remote function
    add."""
    return to + workers[0] + str(items + rpc)


@torch.jit.script
def scripted_own_names(to: str) -> list[str]:
    return own_names.gather([to], "a", ["b"], 1, 2)


@torch.jit.script
def scripted_gather(workers: list[str], x: Tensor, timeout: float) -> list[Tensor]:
    return scale.gather(workers, x, rpc_timeout=timeout)


@torch.jit.script
def scripted_spin(workers: list[str], x: Tensor, rounds: int, timeout: float) -> None:
    spin.broadcast(workers, x, rounds, rpc_timeout=timeout)


def add(a: Any, b: Any) -> Any:
    return a + b


@scripting.remote(reduce=add)
def whoami(prefix: str = "") -> str:
    return prefix + str(rpc.get_worker_info().name)


@scripting.remote
def fail_on(names: list[str], seconds: float = 0) -> str:
    """Raise on the workers in ``names``; on others, sleep and return."""
    name = str(rpc.get_worker_info().name)
    if name in names:
        raise LookupError(f"not on {name}")
    time.sleep(seconds)
    return name


@scripting.remote(reduce=add)
def characters(item: str, suffix: str) -> str:
    time.sleep(0.02 * (item == "a"))  # the first item takes longest
    if item == "?":
        raise ValueError("no such character")
    return item + suffix


def hold_gil(file: str) -> None:
    """Hold the GIL, make the file, and wait until the file is removed, for 100 s at most."""
    name = shlex.quote(file)
    command = f"touch {name}; for i in $(seq 1000); do [ -e {name} ] || break; sleep 0.1; done"
    # It is one call of a C function, between whose parts no other thread can take the GIL; unlike
    # CDLL, PyDLL keeps the GIL.
    assert ctypes.PyDLL(None).system(command.encode()) == 0


@contextlib.contextmanager
def gil_held(worker: str) -> Iterator[None]:
    """During the block another worker holds its GIL."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "held"
        holds = rpc.rpc_async(worker, hold_gil, (str(file),), timeout=0)
        wait_for_file(file)
        try:
            yield
        finally:
            file.unlink()
    holds.wait()


RAN: list[Any] = []


@aio.remote
async def nap(seconds: float, value: Any = None) -> Any:
    RAN.append(value)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        RAN.append(f"cancelled {value}")
        raise
    return value


@aio.remote
async def show_and_nap(begun: str, seconds: float, value: Any) -> Any:
    """As nap(), and make the file ``begun``."""
    Path(begun).touch()
    return await nap(seconds, value)


INSIDE: list[asyncio.Future[None]] = []


@aio.remote
async def meet(count: int, value: Any) -> Any:
    """Wait until ``count`` calls of this function are under way; return ``value``."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    INSIDE.append(waiter)
    if len(INSIDE) == count:
        for waiting in INSIDE:
            waiting.set_result(None)
        INSIDE.clear()
    await waiter
    return value


def inside() -> int:
    """How many calls of meet() are waiting for others."""
    return len(INSIDE)


@aio.remote(limit=1)
async def one_at_a_time(value: Any, gate: str = "") -> Any:
    """Return ``value``, after the file ``gate`` was made if one is named."""
    RAN.append(value)
    while gate and not Path(gate).exists():
        await asyncio.sleep(0.01)
    return value


def one_at_a_time_calls() -> int:
    """How many calls of one_at_a_time() run or wait here."""
    return _server._running_host()._calls[one_at_a_time]


@aio.remote
async def raise_async(text: str) -> None:
    await asyncio.sleep(0)
    RAN.append(text)
    raise KeyError(text)


@aio.remote
async def raise_value_error() -> None:
    f.raise_value_error()


@aio.remote
async def raise_needs_arguments() -> None:
    f.raise_needs_arguments()


@aio.remote
async def unpicklable_async() -> Any:
    return lambda: None


@aio.remote
async def exit_async() -> None:
    sys.exit(3)


@aio.batched(max_size=2, max_wait=0.01)
def exit_batch(inputs: list[int]) -> list[int]:
    sys.exit(3)


@scripting.remote
def stop() -> None:
    raise StopIteration("no more")


@aio.remote
async def thread_name() -> str:
    return threading.current_thread().name


@aio.remote
async def ask_next(hops: int) -> list[str]:
    """Call this function on the other worker, back and forth."""
    here = str(rpc.get_worker_info().name)
    other = "worker1" if here == "worker0" else "worker0"
    return [here, *(await ask_next.call(other, hops - 1) if hops else [])]


def ran() -> list[Any]:
    values, RAN[:] = RAN[:], []
    return values


@aio.batched(max_size=8, max_wait=0.05)
def double(inputs: list[Tensor]) -> Tensor:
    RAN.append(len(inputs))
    return torch.stack(inputs) * 2


@aio.batched(max_size=4, max_wait=1000.0)
def label(texts: list[str], numbers: list[int]) -> list[Any]:
    """A batched function that raises for some calls of a batch. A batch starts when it is full."""
    return [
        ValueError(f"{number} is odd") if number % 2 else f"{text}{number}"
        for text, number in zip(texts, numbers, strict=True)
    ]


@aio.batched(max_size=2, max_wait=0.01)
def miscount(inputs: list[int]) -> list[int]:
    return [*inputs, 0]


@aio.batched(max_size=2, max_wait=0.01)
def of_kind(kinds: list[str]) -> Any:
    return {"str": "a", "dict": {"a": 1}, "set": {"a"}}[kinds[0]]


@aio.batched(max_size=2, max_wait=0.01)
def no_list(inputs: list[int]) -> Any:
    return 7


@aio.batched(max_size=2, max_wait=0.01)
def raise_batch(inputs: list[int]) -> list[int]:
    raise KeyError(f"batch of {len(inputs)}")


_set_result = torch.futures.Future.set_result


def refuse_results(yes: bool) -> None:
    """Let futures refuse tensors here."""

    def set_result(self: Any, result: Any) -> None:
        if yes and isinstance(result, Tensor):
            raise RuntimeError("refused")
        _set_result(self, result)

    torch.futures.Future.set_result = set_result  # type: ignore[method-assign]


class Indescribable(Exception):
    """Raises where somebody looks at it."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        raise LookupError("no arguments")

    def __str__(self) -> str:
        raise LookupError("no text")


@aio.batched(max_size=2, max_wait=10.0)
def indescribable_one(inputs: list[int]) -> list[Any]:
    return [Indescribable() if number == 1 else number for number in inputs]


@aio.remote
async def raise_indescribable() -> None:
    raise Indescribable


@aio.batched(max_size=2, max_wait=float("inf"))
def two_at_a_time(inputs: list[int]) -> list[int]:
    return [len(inputs)] * len(inputs)


@aio.batched(max_size=2, max_wait=0.01)
def unpicklable_batch(inputs: list[int]) -> list[Any]:
    return [lambda: None for _ in inputs]


@aio.batched(max_size=1, max_wait=0, max_queue=3)
def slow_batch(inputs: list[int]) -> list[int]:
    """Wait until open_gate() is called."""
    RAN.extend(inputs)
    assert GATE.wait(60)
    return inputs


GATE = threading.Event()


def open_gate() -> None:
    GATE.set()
