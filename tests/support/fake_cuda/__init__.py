"""A fake CUDA without a GPU: ``install()`` makes ``device="cuda:0"`` work on a torch for CPUs.

Device memory is host memory. A stream is a thread that does its queued work in order, and delays
each kernel and copy, so that code that does not wait for a stream sees old bytes. Memory is
overwritten as soon as a program may reuse it, so that code that still reads it sees wrong bytes.
See runtime.h.

If TORCH_RPC_EXT_LIBCUDA is set, by libcuda.environment(), the driver of tests/support/fake_libcuda
makes streams and device memory. Then code that uses both c10 and the driver finds the same CUDA.

A few operators run as work on streams (kernels.cpp). All others wait for the device and run on the
CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from tests.support import cxx

_HERE = Path(__file__).parent
_SOURCES = ("runtime.cpp", "guard.cpp", "kernels.cpp", "sparse.cpp")
#: The delay of each kernel and copy in seconds, unless a test sets another one.
DELAY = 0.002

ops: Any = torch.ops.fake_cuda


@cache
def build() -> Path:
    """Return the library. Compiles it if its sources are newer."""
    torch_libraries = Path(torch.__file__).parent / "lib"
    built = cxx.build(
        cxx.ROOT / "build" / "fake_cuda" / torch.__version__,
        {"libfake_cuda.so": [_HERE / source for source in _SOURCES]},
        compiler="g++",
        flags=[
            "-O1",
            "-fPIC",
            "-Wno-unused-parameter",
            *(f"-isystem {path}" for path in cpp_extension.include_paths()),
        ],
        libraries=[
            "-shared",
            f"-L{torch_libraries}",
            "-lc10",
            "-ltorch",
            "-ltorch_cpu",
            "-pthread",
        ],
    )
    return built["libfake_cuda.so"]


def install(devices: int = 2, delay: float = DELAY) -> None:
    """Give this process CUDA devices. This cannot be undone.

    Args:
        devices: the number of devices.
        delay: of each kernel and copy, in seconds.
    """
    torch.ops.load_library(str(build()))
    ops.install(devices)
    set_delay(delay)
    cuda: Any = torch.cuda
    cuda._lazy_init = cuda.init = lambda: None
    cuda.is_available = cuda.is_initialized = lambda: devices > 0
    cuda.device_count = lambda: devices
    cuda.synchronize = _synchronize


def _synchronize(device: Any = None) -> None:
    """Wait for the current stream of a device."""
    event = torch.Event(torch.device("cuda" if device is None else device))
    event.record()
    event.synchronize()


def set_delay(seconds: float) -> None:
    """Set the delay of each kernel and copy from now on, in seconds."""
    ops.set_delay(int(seconds * 1e6))


def counts() -> dict[str, int]:
    """Return how often each of these happened: synchronizations, host_to_device, device_to_host,
    device_to_device, pageable (copies to or from memory that is not pinned), foreach_copies."""
    return dict(ops.counts())


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Yield a dict that contains, after the block, by how much each value of counts() grew."""
    before, grown = counts(), {}
    yield grown
    grown.update({name: value - before[name] for name, value in counts().items()})


@contextlib.contextmanager
def stream(device: int, number: int) -> Iterator[None]:
    """Make a stream the current stream of this thread and a device. 0 is the default stream."""
    before = ops.current_stream(device)
    ops.set_stream(device, number)
    try:
        yield
    finally:
        ops.set_stream(device, before)
