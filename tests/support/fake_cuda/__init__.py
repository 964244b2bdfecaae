"""A CUDA without a GPU: ``install()`` makes ``device="cuda:0"`` work on a torch for CPUs.

Device memory is host memory. A stream is a thread that works its queue off in order, each kernel
and copy late by a delay, so that what does not wait for a stream sees old bytes. Memory is
overwritten when a program may use it again: what still reads it then sees that. See runtime.h.

With TORCH_RPC_EXT_LIBCUDA, from libcuda.environment(), streams and device memory are those of the
driver of tests/support/fake_libcuda, so that what uses both c10 and the driver finds one CUDA.

A few operators are work on streams (kernels.cpp); all others wait for the device and run on the
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
#: So late is each kernel and copy unless a test says otherwise, s.
DELAY = 0.002

ops: Any = torch.ops.fake_cuda


@cache
def build() -> Path:
    """Return the library, compiled when its sources are newer."""
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
    """Give this process so many CUDA devices; for good.

    Args:
        devices: their number.
        delay: how late each kernel and copy is, s.
    """
    torch.ops.load_library(str(build()))
    ops.install(devices)
    set_delay(delay)
    cuda: Any = torch.cuda
    cuda._lazy_init = cuda.init = lambda: None
    cuda.is_available = lambda: devices > 0
    cuda.device_count = lambda: devices


def set_delay(seconds: float) -> None:
    """Make each kernel and copy from now on so late."""
    ops.set_delay(int(seconds * 1e6))


def counts() -> dict[str, int]:
    """Return how often what happened: synchronizations, host_to_device, device_to_host,
    device_to_device, pageable (copies of memory that is not pinned), foreach_copies."""
    return dict(ops.counts())


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Yield a dict that holds, after the block, what counts() grew by."""
    before, grown = counts(), {}
    yield grown
    grown.update({name: value - before[name] for name, value in counts().items()})


@contextlib.contextmanager
def stream(device: int, number: int) -> Iterator[None]:
    """Make a stream (0 is the default one) this thread's current one of a device."""
    before = ops.current_stream(device)
    ops.set_stream(device, number)
    try:
        yield
    finally:
        ops.set_stream(device, before)
