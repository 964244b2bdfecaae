"""The CUDA driver by dlopen: what is declared, what is missing, what its errors become."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import libcuda, native
from tests.support.backend import ROOT
from tests.support.libcuda import FakeCuda

ILLEGAL_ADDRESS, OUT_OF_MEMORY = 700, 2

# Each of our declarations beside NVIDIA's: the same number of parameters, passed in the same way.
ABI_CHECK = """
#include <cuda.h>
#include "cuda/driver_api.h"
#include <type_traits>
namespace ours = torch_rpc_ext::cuda;
template <typename A, typename B>
constexpr bool sameKind() {
  constexpr bool whole = (std::is_integral_v<A> || std::is_enum_v<A>) ==
      (std::is_integral_v<B> || std::is_enum_v<B>);
  return sizeof(A) == sizeof(B) && alignof(A) >= alignof(B) && whole &&
      std::is_pointer_v<A> == std::is_pointer_v<B> &&
      std::is_class_v<A> == std::is_class_v<B>;
}
template <typename A, typename B> struct Same : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
  requires(sizeof...(A) == sizeof...(B))
struct Same<R (*)(A...), S (*)(B...)>
    : std::bool_constant<sameKind<R, S>() && (sameKind<A, B>() && ...)> {};
#define CHECK(member, symbol, parameters) \\
  static_assert(Same<decltype(&::symbol), decltype(ours::DriverApi::member)>::value, #symbol);
TORCH_RPC_EXT_CUDA_FUNCTIONS(CHECK)
"""

VALUES = {
    "status::kSuccess": "CUDA_SUCCESS",
    "status::kInvalidDevice": "CUDA_ERROR_INVALID_DEVICE",
    "status::kOutOfMemory": "CUDA_ERROR_OUT_OF_MEMORY",
    "status::kDeinitialized": "CUDA_ERROR_DEINITIALIZED",
    "status::kNoDevice": "CUDA_ERROR_NO_DEVICE",
    "status::kPeerAccessUnsupported": "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    "status::kUnsupportedPtxVersion": "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "status::kNotPermitted": "CUDA_ERROR_NOT_PERMITTED",
    "status::kNotSupported": "CUDA_ERROR_NOT_SUPPORTED",
    "status::kSystemNotReady": "CUDA_ERROR_SYSTEM_NOT_READY",
    "status::kSystemDriverMismatch": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "kAttributeComputeCapabilityMajor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "kAttributeComputeCapabilityMinor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "kPointerBufferId": "CU_POINTER_ATTRIBUTE_BUFFER_ID",
    "kPointerIsLegacyIpcCapable": "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE",
    "kStreamNonBlocking": "CU_STREAM_NON_BLOCKING",
    "kEventDisableTiming": "CU_EVENT_DISABLE_TIMING",
    "kIpcLazyEnablePeerAccess": "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
    "kHostAllocPortable": "CU_MEMHOSTALLOC_PORTABLE",
    "kJitErrorLogBuffer": "CU_JIT_ERROR_LOG_BUFFER",
    "kJitErrorLogBufferBytes": "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES",
}


def compiles(text: str) -> str:
    """Compile a program for its errors only; returns them."""
    command = ["c++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    command += [f"-I{ROOT / 'csrc'}", f"-isystem{libcuda.needs_headers()}"]
    return subprocess.run(command, input=text, text=True, capture_output=True).stderr


def test_declarations_are_nvidias() -> None:
    checks = [f"static_assert(int(ours::{our}) == int({its}));" for our, its in VALUES.items()]
    assert compiles("\n".join([ABI_CHECK, *checks])) == ""
    # And would be noticed.
    wrong = "static_assert(Same<decltype(&::cuMemFree_v2), int (*)(int)>::value);"
    assert "static assertion failed" in compiles(ABI_CHECK + wrong)


@pytest.fixture
def driver(cuda: FakeCuda) -> Any:
    return native.cuda.load()


def test_devices(driver: Any) -> None:
    assert driver.version >= 12000
    assert [device.uuid for device in driver.devices] == [b"a" * 16, b"b" * 16]
    assert [(device.major, device.minor) for device in driver.devices] == [(9, 0)] * 2
    assert not any(device.is_mig for device in driver.devices)


def test_no_context_is_made_before_it_is_needed(cuda: FakeCuda, driver: Any) -> None:
    assert cuda.calls("cuDevicePrimaryCtxRetain") == []
    exporter = native.cuda.MemoryExporter(driver)
    with pytest.raises(ValueError, match="CUDA_ERROR"):
        exporter.export(1, 0, 1)
    assert cuda.calls("cuDevicePrimaryCtxRetain") == ["cuDevicePrimaryCtxRetain 1"]
    del exporter, driver


def test_contexts_are_given_back(cuda: FakeCuda) -> None:
    driver = native.cuda.load()
    address = cuda.allocate(64)
    cuda.forget_calls()
    native.cuda.copy(driver, 0, address, address + 32, 32, 0)
    native.cuda.copy(driver, 0, address, address + 32, 32, 0)
    assert cuda.calls("cuDevicePrimaryCtxRetain") == ["cuDevicePrimaryCtxRetain 0"]
    del driver
    assert cuda.calls("cuDevicePrimaryCtxRelease") == ["cuDevicePrimaryCtxRelease 0"]


def test_a_copy_goes_to_its_stream(cuda: FakeCuda, driver: Any) -> None:
    stream = cuda.stream(1)
    source, target = cuda.allocate(1 << 20, 1), cuda.allocate(1 << 20, 1)
    cuda.fill(source, 7, 1 << 20, stream, 1)
    cuda.forget_calls()
    native.cuda.copy(driver, 1, target, source, 1 << 20, stream)
    assert not [call for call in cuda.calls() if "ynchronize" in call]
    cuda.synchronize(stream, 1)
    assert libcuda.read(target, 1 << 20) == b"\x07" * (1 << 20)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (ILLEGAL_ADDRESS, "system: a copy of 8 bytes on cuda:0: CUDA_ERROR_ILLEGAL_ADDRESS"),
        (OUT_OF_MEMORY, r"overloaded: .*: CUDA_ERROR_OUT_OF_MEMORY \(out of memory\)"),
        (4242, "CUDA error 4242"),
    ],
)
def test_an_error_has_its_name(cuda: FakeCuda, driver: Any, status: int, text: str) -> None:
    address = cuda.allocate(64)
    cuda.fail("cuMemcpyAsync", status)
    with pytest.raises(ValueError, match=text):
        native.cuda.copy(driver, 0, address, address, 8, 0)
    native.cuda.copy(driver, 0, address, address, 8, 0)


def test_a_device_that_is_not_there(driver: Any) -> None:
    with pytest.raises(ValueError, match=r"there is no cuda:2 here, only 2 device"):
        native.cuda.copy(driver, 2, 0, 0, 0, 0)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_RPC_EXT_LIBCUDA", "libno_such_cuda.so.1")
    with pytest.raises(ValueError, match="unsupported: there is no CUDA driver here: libno_such"):
        native.cuda.load()


def test_a_driver_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-x", "c", "-", "-o", str(old)]
    subprocess.run(command, input="int cuInit(unsigned f) { return 0; }", text=True, check=True)
    with pytest.raises(ValueError, match=r"unsupported: .* lacks cuDriverGetVersion: update"):
        native.cuda.load(str(old))


def test_no_gpu(cuda: FakeCuda) -> None:
    cuda.fail("cuInit", 100)
    with pytest.raises(ValueError, match="unsupported: cuInit: CUDA_ERROR_NO_DEVICE"):
        native.cuda.load()
