"""The kernels on a GPU: what the simulator and this CPU cannot show.

Without a GPU the tests themselves are tried in the simulator, in small, by
`NUMBA_ENABLE_CUDASIM=1 pytest tests/gpu/test_kernels.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.kernel_inputs import (
    CASTS,
    DISTINCT,
    DTYPES,
    LAYOUTS,
    random_bits,
    same_bits,
    start_random,
)
from torch_rpc_ext import kernels
from torch_rpc_ext.kernels import ptx, reference
from torch_rpc_ext.kernels.plan import Segment, segment_table

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "") not in ("", "0")
DEVICE = torch.device("cpu") if SIMULATED else torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(
    not (SIMULATED or torch.cuda.is_available()), reason="no CUDA device"
)
needs_gpu = pytest.mark.skipif(SIMULATED, reason="no CUDA device")


@pytest.fixture(autouse=True)
def _numba() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    start_random()


def on_device(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return random_bits(shape, dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_and_scatter(dtype: torch.dtype) -> None:
    sizes = (0, 1, 5, 300) if SIMULATED else (0, 1, 5, 300, 100_003, 5_000_000)
    tensors = [on_device((size,), dtype) for size in sizes] * (1 if SIMULATED else 40)
    offsets, end = kernels.block_offsets(tensor.nbytes for tensor in tensors)
    block = torch.zeros(end + 64, dtype=torch.uint8, device=DEVICE)
    expected = block.clone()
    kernels.gather(tensors, block, offsets)
    reference.gather(tensors, expected, offsets)
    assert torch.equal(block, expected)
    back = [torch.empty_like(tensor) for tensor in tensors]
    kernels.scatter(block, offsets, back)
    assert all(map(same_bits, back, tensors))


@pytest.mark.parametrize("difference", range(17))
def test_every_alignment(difference: int) -> None:
    source = on_device((3000,), torch.uint8)
    for begin in range(17):
        block = torch.zeros(3100, dtype=torch.uint8, device=DEVICE)
        part = source[begin : 100 if SIMULATED else -7]
        kernels.gather([part], block, [difference])
        end = difference + len(part)
        assert torch.equal(block[difference:end], part)
        assert not block[:difference].any() and not block[end:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_strided(name: str, dtype: torch.dtype) -> None:
    source = LAYOUTS[name](on_device((4, 3, 6), dtype))
    result = torch.empty(source.shape, dtype=dtype, device=DEVICE)
    kernels.copy(source, result)
    assert same_bits(result, source)
    if name in DISTINCT:
        back = LAYOUTS[name](torch.zeros_like(on_device((4, 3, 6), dtype)))
        kernels.copy(result, back)
        assert same_bits(back, source)


@pytest.mark.parametrize(("kept", "sent"), CASTS, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_casts(kept: torch.dtype, sent: torch.dtype, stride: int) -> None:
    source = on_device((400 if SIMULATED else 1 << 26,), kept)
    result = torch.empty(len(source[::stride]), dtype=sent, device=DEVICE)
    kernels.copy(source[::stride], result)
    # The reference on the CPU: torch's cast on a GPU is another program.
    assert same_bits(result.cpu(), reference.cast(source[::stride].cpu(), sent))


@pytest.mark.parametrize("begin", [0, 3])
def test_checksum(begin: int) -> None:
    data = on_device((1001 if SIMULATED else 100_000_001,), torch.uint8)[begin:]
    result = int(kernels.checksum(data))
    assert result == int(reference.checksum(data.cpu()))
    assert all(int(kernels.checksum(data)) == result for _ in range(3))


@needs_gpu
def test_more_than_two_to_the_32_elements() -> None:
    if torch.cuda.mem_get_info(DEVICE)[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free memory on the GPU")
    bits = torch.randint(0, 256, ((1 << 32) + 8,), dtype=torch.uint8, device=DEVICE)
    source = bits.view(2, -1).t()
    result = torch.empty(source.shape, dtype=torch.uint8, device=DEVICE)
    kernels.copy(source, result)
    assert torch.equal(result[-(1 << 20) :], source[-(1 << 20) :])
    block = torch.empty(result.numel(), dtype=torch.uint8, device=DEVICE)
    kernels.gather([result], block, [0])
    assert torch.equal(block.view(result.shape), result)


@needs_gpu
def test_on_the_current_stream_and_nothing_waits() -> None:
    stream = torch.cuda.Stream(DEVICE)
    source = on_device((1 << 24,), torch.float32)
    block = torch.zeros(source.nbytes, dtype=torch.uint8, device=DEVICE)
    kernels.gather([source], block, [0])  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        source.add_(1)
        kernels.gather([source], block, [0])
        assert not stream.query(), "the launch has waited for the work before it"
    stream.synchronize()
    assert same_bits(block.view(torch.float32), source)


@needs_gpu
def test_ptx_by_the_driver() -> None:
    """As an agent does it: cuModuleLoadData and cuLaunchKernel, every argument 8 bytes."""
    import numpy
    from cuda.bindings import driver

    def ok(answer: Any) -> Any:
        assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer[0]
        return answer[1] if len(answer) == 2 else None

    def launch(name: str, blocks: int, arguments: list[int]) -> None:
        kernel = ptx.compile_kernel(name, torch.cuda.get_device_capability(DEVICE))
        module = ok(driver.cuModuleLoadData(kernel.ptx.encode() + b"\0"))
        function = ok(driver.cuModuleGetFunction(module, kernel.entry.encode()))
        assert len(arguments) == sum(count for _, count in kernel.arguments)
        values = numpy.array(arguments, dtype=numpy.int64)
        places = values.ctypes.data + 8 * numpy.arange(len(arguments), dtype=numpy.uint64)
        stream = torch.cuda.current_stream(DEVICE).cuda_stream
        ok(
            driver.cuLaunchKernel(
                function, blocks, 1, 1, 256, 1, 1, 0, stream, places.ctypes.data, 0
            )
        )
        torch.cuda.synchronize()

    source = on_device((100_003,), torch.float32)
    result = torch.empty(source.shape, dtype=torch.bfloat16, device=DEVICE)
    run = Segment(source.data_ptr(), result.data_ptr(), source.numel())
    table, chunks = segment_table([run], 4096)
    table = table.to(DEVICE)
    launch("segments_float32_to_bfloat16", chunks, [table.data_ptr(), 1, chunks, 4096])
    assert same_bits(result.cpu(), reference.cast(source.cpu(), torch.bfloat16))

    checksum = torch.zeros((), dtype=torch.int64, device=DEVICE)
    launch("checksum", 50, [source.data_ptr(), source.nbytes, checksum.data_ptr()])
    assert int(checksum) == int(reference.checksum(source.cpu()))


def time_of(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the time of the work on the GPU, ms, the best of many."""
    best = float("inf")
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        events[1].synchronize()
        best = min(best, events[0].elapsed_time(events[1]))
    return best


@needs_gpu
def test_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """Against a copy of the same bytes by the driver; prints a table, `pytest -s`."""
    source = on_device((100_000_000,), torch.float32)
    target = torch.empty_like(source)
    half = torch.empty(source.shape, dtype=torch.bfloat16, device=DEVICE)
    block = target.view(torch.uint8)
    small = list(source[: 500 * 1024].split(1024))
    offsets, _ = kernels.block_offsets(t.nbytes for t in small)
    square, whole = source.view(10_000, 10_000), target.view(10_000, 10_000)
    cases: dict[str, Callable[[], object]] = {
        "copy by the driver, 400 MB": lambda: target.copy_(source),
        "gather of one tensor, 400 MB": lambda: kernels.gather([source], block, [0]),
        "every second row, 200 MB": lambda: kernels.copy(square[::2], whole[:5000]),
        "transposed, 400 MB": lambda: kernels.copy(square.t(), whole),
        "float32 to bfloat16, 400 MB": lambda: kernels.copy(source, half),
        "checksum, 400 MB": lambda: kernels.checksum(source),
        "gather of 500 x 4 KB": lambda: kernels.gather(small, block, offsets),
    }
    times = {name: time_of(work) for name, work in cases.items()}
    with capsys.disabled():
        for name, time in times.items():
            print(f"\n{name:32} {time:8.3f} ms", end="")
    ratio = times["copy by the driver, 400 MB"] / times["gather of one tensor, 400 MB"]
    assert ratio > 0.5, f"gather has {ratio:.2f} of the driver's bandwidth"
