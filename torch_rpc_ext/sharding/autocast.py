"""Autocast of the caller, on the stages.

Autocast is a state of a thread, which no call carries to another worker. So the caller sends its
state with each batch, and each stage computes under the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["Autocast", "current", "entered"]


@dataclass(frozen=True)
class Autocast:
    """torch.autocast with these arguments, enabled.

    Attributes:
        device_type: "cpu", "cuda" and so on.
        dtype: in which the operators of its lists compute.
        cache_enabled: whether casts of weights are kept until the end of the block.
    """

    device_type: str
    dtype: torch.dtype
    cache_enabled: bool


def current(device_types: Iterable[str]) -> tuple[Autocast, ...]:
    """Return where autocast is enabled in this thread.

    Args:
        device_types: of all devices that stages compute on.
    """
    return tuple(
        Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in sorted({"cpu", *device_types})
        if torch.is_autocast_enabled(kind)
    )


@contextlib.contextmanager
def entered(found: Iterable[Autocast], device: str) -> Iterator[None]:
    """Compute under the caller's autocast within the block.

    Args:
        found: what current() has returned on the caller.
        device: of the stage; autocast of other devices than this and the CPU has no effect here.
    """
    kinds = {"cpu", torch.device(device).type}
    with contextlib.ExitStack() as stack:
        for one in found:
            if one.device_type in kinds:
                stack.enter_context(
                    torch.autocast(one.device_type, one.dtype, cache_enabled=one.cache_enabled)
                )
        yield
