"""Which tensors can go from one worker to another without the CPU: those on devices that a device
map of the options names."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import rpc as _untyped_rpc

__all__ = ["arriving", "mapped"]

rpc: Any = _untyped_rpc  # upstream's functions have no types


def mapped(worker: str) -> dict[torch.device, torch.device]:
    """Return the device map of this worker's options for calls to another: device here -> there."""
    agent = rpc.api._get_current_rpc_agent()
    look_up = getattr(agent, "_get_device_map", None)
    found: dict[torch.device, torch.device] = (
        {} if look_up is None else look_up(agent.get_worker_info(worker))
    )
    return found


def arriving(worker: str) -> list[str]:
    """Return the devices of another worker whose tensors this worker can fetch as they are.

    A result comes back by the reverse of the map of the request.
    """
    return [str(device) for device in mapped(worker).values()]
