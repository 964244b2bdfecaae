"""Functions that the tests call remotely, at module level, so that they are pickled by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd, rpc
from torch.futures import Future


def identity(value: Any) -> Any:
    return value


def fetch(rref: Any) -> Any:
    return rref.to_here()


def nothing(*_: Any) -> None:
    return None


def describe(tensor: Tensor) -> dict[str, Any]:
    """Describe a tensor argument as the callee sees it."""
    return {
        "type": type(tensor).__name__,
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()) if tensor.layout is torch.strided else None,
        "conj": tensor.is_conj(),
        "neg": tensor.is_neg(),
        "requires_grad": tensor.requires_grad,
    }


def fill(tensor: Tensor, value: float) -> Tensor:
    """Change the argument in place."""
    tensor.fill_(value)
    return tensor


def fill_first_look_at_second(first: Tensor, second: Tensor, value: float) -> Tensor:
    """Change one argument and return the other: do the two share memory at the callee?"""
    first.fill_(value)
    return second.clone()


def to_dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense()


def to_sparse(tensor: Tensor, layout: str) -> Tensor:
    return tensor.to_sparse() if layout == "coo" else tensor.to_sparse_csr()


def times(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor


def total(tensor: Tensor) -> float:
    """A checksum that needs little memory, however large the tensor is."""
    return float(
        sum(chunk.sum(dtype=torch.float64).item() for chunk in tensor.flatten().split(1 << 26))
    )


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def nested(depth: int, world_size: int) -> int:
    """Call this function on the next worker until ``depth`` is 0; return the number of calls
    made."""
    if depth == 0:
        return 0
    following = (rpc.get_worker_info().id + 1) % world_size
    return 1 + int(rpc.rpc_sync(f"worker{following}", nested, args=(depth - 1, world_size)))


def sleep(seconds: float, *_: object) -> float:
    time.sleep(seconds)
    return seconds


def begin_and_sleep(began: str, seconds: float) -> None:
    """Create the file ``began``, then sleep."""
    Path(began).touch()
    time.sleep(seconds)


def name_here() -> str:
    return str(rpc.get_worker_info().name)


def contexts() -> int:
    """How many distributed autograd contexts this worker has."""
    return int(autograd._get_debug_info()["num_autograd_contexts"])


def wait_for_contexts(count: int) -> None:
    end = time.monotonic() + 30
    while contexts() != count:
        assert time.monotonic() < end, f"{contexts()} autograd contexts instead of {count}"
        time.sleep(0.01)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unpicklable_result() -> Any:
    return lambda: None


class NeedsArguments(Exception):
    """An exception that cannot be built from one string, but from its ``args``, as pickle builds
    it."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(code, where)
        self.code, self.where = code, where


class ReducesItself(Exception):
    """An exception whose ``__reduce__`` says how to build it."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code, self.where = code, where

    def __reduce__(self) -> Any:
        return _build_reduces_itself, (self.code, self.where)


def _build_reduces_itself(code: int, where: str) -> ReducesItself:
    return ReducesItself(code, where=where)


class CannotBeBuilt(Exception):
    """An exception that neither its text nor its ``args`` can build."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")


class PlainError(Exception):
    """An exception that is built from one text, which is all that upstream's errors need."""


def raise_needs_arguments() -> None:
    raise NeedsArguments(7, "here")


def raise_reduces_itself() -> None:
    raise ReducesItself(7, where="here")


def raise_cannot_be_built() -> None:
    raise CannotBeBuilt(7, "here")


def raise_plain(text: str) -> None:
    raise PlainError(text)


def raise_value_error() -> None:
    raise ValueError("the value was wrong")


@torch.jit.script
def script_add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@torch.jit.script
def script_parts(values: list[Tensor], times: int = 2) -> tuple[Tensor, int]:
    return torch.stack(values) * times, times


@torch.jit.script
def script_nothing(a: Tensor) -> None:
    assert bool(a.sum() > 0), "it is not positive"


@torch.jit.script
def script_raise(text: str) -> None:
    raise RuntimeError(text)


@rpc.functions.async_execution
@torch.jit.script
def script_async_add(to: str, a: Tensor, b: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, script_add, (a, b))


@rpc.functions.async_execution
def async_add_on(worker: str, a: Tensor, b: Tensor) -> Any:
    return rpc.rpc_async(worker, torch.add, args=(a, b)).then(lambda future: future.value() + 1)


#: RRefs that a worker keeps between calls.
HELD: dict[str, Any] = {}


class Owned:
    """A class whose instance stays at the RRef's owner."""

    def hello(self) -> str:
        return "hello"


def hold_rrefs() -> None:
    """Create and keep two RRefs that worker1 owns: one to an object and one to a tensor."""
    HELD["owned"] = rpc.remote("worker1", Owned)
    assert HELD["owned"].rpc_sync().hello() == "hello"
    HELD["tensor"] = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    HELD["tensor"].to_here()
    for rref in HELD.values():
        # The message that confirms the creation of an RRef may come after the RRef's value. If the
        # user dies before that message, the RRef counts as never created.
        rref._get_future().wait()


def uses_of_held_rrefs() -> list[Callable[[], Any]]:
    """All ways to use the RRefs of hold_rrefs() that ask their owner."""
    owned, tensor = HELD["owned"], HELD["tensor"]
    return [
        owned.to_here,
        tensor.to_here,
        lambda: owned.rpc_sync().hello(),
        lambda: owned.rpc_async().hello().wait(),
        lambda: owned.remote().hello(),
    ]
