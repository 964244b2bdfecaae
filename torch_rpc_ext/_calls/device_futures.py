"""Values with tensors of devices that go from one thread to another.

A device computes a tensor in the order of a stream, after the thread that asked for it has gone on.
The current streams of another thread do not wait for that stream by themselves. A future of torch
lets them wait, for the devices that it was made with.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import torch
from torch.futures import Future
from torch.utils import _pytree as pytree

cuda: Any = torch.cuda  # torch's functions have no types

T = TypeVar("T")


class _InterruptibleFuture(Future[Any]):
    """A future whose wait() Ctrl-C ends; torch's own hears no signal while it waits."""

    def wait(self) -> Any:
        # Handlers of signals run on the main thread only.
        if not self.done() and threading.current_thread() is threading.main_thread():
            done = threading.Event()
            self.add_done_callback(lambda _: done.set())
            done.wait()
        return super().wait()


def new_future() -> Future[Any]:
    """Return a future whose value may have tensors on any device of this process."""
    # torch pickles the value of a future that has devices, to find the tensors in the value. That
    # takes time, so the future gets devices only where this process uses CUDA.
    if not cuda.is_initialized():
        return _InterruptibleFuture()
    return _InterruptibleFuture(
        devices=[torch.device("cuda", at) for at in range(cuda.device_count())]
    )


def leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class HandedOver(Generic[T]):
    """A value that one thread leaves to another.

    Args:
        value: its tensors, in tuples, lists and dicts, may be computed later by the current streams
            of this thread.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._computed: Future[list[torch.Tensor]] | None = None
        if not cuda.is_initialized():
            return  # without CUDA, no call has to pay for the search below
        if there := [tensor for tensor in leaves(value) if tensor.is_cuda]:
            self._computed = Future(devices=list({tensor.device for tensor in there}))
            self._computed.set_result(there)

    def take(self) -> T:
        """Return the value; the current streams of this thread can use its tensors.

        torch keeps the memory of the tensors for as long as these streams use them.
        """
        if self._computed is not None:
            self._computed.wait()
        return self._value
