"""Workers and devices as RemoteModule writes them: "worker1", "worker1/cuda:0", "rank:1/cpu"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import rpc as _untyped_rpc
from torch.distributed.remote_device import _remote_device

__all__ = ["Place", "places"]

rpc: Any = _untyped_rpc  # upstream's functions have no types


@dataclass(frozen=True)
class Place:
    """The place of a stage: the name of its worker, and a device of that worker."""

    worker: str
    device: str

    def __str__(self) -> str:
        return self.worker if self.device == "cpu" else f"{self.worker}/{self.device}"


def places(workers: Sequence[str]) -> list[Place]:
    """Return the place that each text names.

    Raises:
        TypeError: `workers` is a single text, or holds something that is no text.
        ValueError: a text cannot be read, or names a worker that is not in the group.
    """
    if isinstance(workers, str):
        raise TypeError(f"workers must be a list of texts, got the text {workers!r}")
    by_rank = {info.id: info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()}
    return [_place(index, text, by_rank) for index, text in enumerate(workers)]


def _place(index: int, text: str, by_rank: dict[int, str]) -> Place:
    if not isinstance(text, str):
        raise TypeError(f"workers[{index}] must be a text, got {text!r}")
    try:
        read: Any = _remote_device(text)
    except (RuntimeError, ValueError) as problem:
        raise ValueError(
            f"workers[{index}] is {text!r}: write 'worker1' or 'worker1/cuda:0' ({problem})"
        ) from None
    if read.rank() is not None:
        name = by_rank.get(read.rank())
    else:
        name = read.worker_name() or rpc.get_worker_info().name
    if name not in by_rank.values():
        raise ValueError(
            f"workers[{index}] is {text!r}, which is not in the group: "
            f"{', '.join(sorted(by_rank.values()))}"
        )
    return Place(str(name), str(read.device()))
