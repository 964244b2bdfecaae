"""Launches by numba, from Python: for tests and tools. Imports numba.

On a GPU they go to torch's current stream and return at once; in the simulator they are done when
they return, and tensors are the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from numba import cuda as _untyped_cuda

from torch_rpc_ext.kernels.memory import SIMULATED
from torch_rpc_ext.kernels.plan import Segment, StridedCopy, segment_table
from torch_rpc_ext.kernels.registry import KERNELS
from torch_rpc_ext.kernels.table import CHECKSUM_THREADS

__all__ = ["checksum", "segments", "strided"]

cuda: Any = _untyped_cuda

# The simulator makes a thread of the system for each thread of a block, so there are few here. That
# also lets small tensors go through the kernels' loops more than once.
_THREADS = 8 if SIMULATED else CHECKSUM_THREADS
_MAX_BLOCKS = 3 if SIMULATED else 4096
# So large that a block spends little of its time on the search for its segment.
_CHUNK = 32 if SIMULATED else 1 << 16


@cache
def _compiled(name: str) -> Any:
    return cuda.jit(KERNELS[name].function)


def _launch(device: torch.device, name: str, blocks: int, *arguments: Any) -> None:
    grid = max(1, min(blocks, _MAX_BLOCKS))
    if device.type == "cpu":
        _compiled(name)[grid, _THREADS](*arguments)
        return
    with torch.cuda.device(device), cuda.gpus[device.index]:
        stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
        _compiled(name)[grid, _THREADS, stream](*arguments)


def segments(device: torch.device, runs: Sequence[Segment], cast: str | None = None) -> None:
    """Copy or cast all runs by one launch.

    Args:
        device: where all of them are.
        runs: what to copy, in bytes; what to cast, in elements.
        cast: a value of plan.CAST_NAMES.
    """
    table, chunks = segment_table(runs, _CHUNK)
    if chunks == 0:
        return
    if device.type != "cpu":
        # From pinned memory the copy does not hold up the caller; torch keeps both allocations
        # until this stream has passed.
        table = table.pin_memory().to(device, non_blocking=True)
    name = "segments" if cast is None else f"segments_{cast}"
    _launch(device, name, chunks, table.data_ptr(), len(runs), chunks, _CHUNK)


def strided(device: torch.device, plan: StridedCopy, cast: str | None = None) -> None:
    """Copy or cast from one layout to another by one launch.

    Args:
        device: where both are.
        plan: of plan_strided().
        cast: a value of plan.CAST_NAMES, if the dtypes differ.
    """
    if plan.elements == 0:
        return
    _launch(
        device,
        f"strided_{cast or plan.source_width}",
        -(-plan.elements // _THREADS),
        plan.source,
        plan.destination,
        plan.elements,
        plan.sizes,
        plan.source_strides,
        plan.destination_strides,
    )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a contiguous tensor, int64, 0-dim, on its device."""
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    blocks = -(-tensor.nbytes // (8 * _THREADS))
    _launch(tensor.device, "checksum", blocks, tensor.data_ptr(), tensor.nbytes, result.data_ptr())
    return result
