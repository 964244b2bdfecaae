"""Builds the fake CUDA driver (fake_libcuda/), which needs no GPU, and wraps its functions for
tests.

A process reads the FAKE_CUDA_* variables when it loads the driver. So a test that needs other
values starts a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import cxx
from tests.support.backend import ROOT

_SOURCES = ROOT / "tests" / "support" / "fake_libcuda"
_NON_BLOCKING = 1


def cuda_headers() -> Path | None:
    """Return the folder of NVIDIA's cuda.h, from a CUDA toolkit or from a wheel that numba-cuda
    depends on; None if there is no cuda.h."""
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    found = importlib.util.find_spec("nvidia")
    for place in (found.submodule_search_locations or []) if found else []:
        homes += sorted(Path(place).glob("cu[0-9]*"))
    folders = [home / "include" for home in homes]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


def needs_headers() -> Path:
    """Return cuda_headers(), or skip the test."""
    folder = cuda_headers()
    if folder is None:
        pytest.skip("there is no cuda.h: pip install 'numba-cuda[cu13]'")
    return folder


@functools.cache
def library() -> Path:
    """Build the driver and return its file, or skip the test."""
    flags = ["-O1", "-g", "-fPIC", "-shared", "-pthread", f"-isystem{needs_headers()}"]
    name = "libfake_cuda.so"
    programs = {name: sorted(_SOURCES.glob("*.cpp"))}
    return cxx.build(ROOT / "build" / "fake_libcuda", programs, compiler="c++", flags=flags)[name]


def environment(**fake: object) -> dict[str, str]:
    """Return the environment variables with which a process uses the fake driver. A keyword such as
    uuids="ab" sets FAKE_CUDA_UUIDS."""
    variables = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in fake.items()}
    return {"TORCH_RPC_EXT_LIBCUDA": str(library()), **variables}


class FakeCuda:
    """Calls the driver of this process directly, without our extension.

    Args:
        path: of the library; None means the one that TORCH_RPC_EXT_LIBCUDA names.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lib = ctypes.CDLL(str(path or os.environ["TORCH_RPC_EXT_LIBCUDA"]))
        self._lib.fakeCudaCalls.restype = ctypes.c_char_p
        self._ok("cuInit", 0)

    def allocate(self, size: int, device: int = 0) -> int:
        """Allocate device memory; return its address."""
        address = ctypes.c_uint64()
        with self._on(device):
            self._ok("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int, device: int = 0) -> None:
        """Free device memory."""
        with self._on(device):
            self._ok("cuMemFree_v2", ctypes.c_uint64(address))

    def stream(self, device: int = 0) -> int:
        """Return a new stream."""
        stream = ctypes.c_void_p()
        with self._on(device):
            self._ok("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def synchronize(self, stream: int, device: int = 0) -> None:
        """Wait until a stream has done all its work."""
        with self._on(device):
            self._ok("cuStreamSynchronize", ctypes.c_void_p(stream))

    def fill(self, address: int, value: int, size: int, stream: int, device: int = 0) -> None:
        """Queue work on a stream that fills device memory with a byte."""
        with self._on(device):
            self._ok(
                "cuMemsetD8Async",
                ctypes.c_uint64(address),
                ctypes.c_ubyte(value),
                ctypes.c_size_t(size),
                ctypes.c_void_p(stream),
            )

    def calls(self, name: str = "") -> list[str]:
        """Return the calls so far, of one function or of all functions."""
        lines: list[str] = self._lib.fakeCudaCalls().decode().splitlines()
        return [line for line in lines if not name or line.split()[0] == name]

    def forget_calls(self) -> None:
        """Make calls() start again with an empty list."""
        self._lib.fakeCudaForgetCalls()

    def fail(self, function: str, error: int, times: int = 1) -> None:
        """Make the next calls of a function return an error."""
        self._lib.fakeCudaFail(function.encode(), error, times)

    def hold(self, yes: bool) -> None:
        """Pause the streams of this process, or let them go on."""
        self._lib.fakeCudaHold(int(yes))

    def exportable(self, yes: bool) -> None:
        """Set whether memory that is allocated from now on can be exported."""
        self._lib.fakeCudaExportable(int(yes))

    def exaggerate(self, factor: int) -> None:
        """Make allocations claim to be `factor` times as large as they are."""
        self._lib.fakeCudaExaggerate(factor)

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        context = ctypes.c_void_p()
        self._ok("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._ok("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._ok("cuCtxPopCurrent_v2", ctypes.byref(context))

    def _ok(self, function: str, *arguments: Any) -> None:
        status = self._lib[function](*arguments)
        assert status == 0, f"{function} returned {status}"


def read(address: int, size: int) -> bytes:
    """Return the bytes in device memory now, without waiting for streams."""
    return ctypes.string_at(address, size)


def write(address: int, data: bytes) -> None:
    """Write to device memory now, without waiting for streams."""
    ctypes.memmove(address, data, len(data))
