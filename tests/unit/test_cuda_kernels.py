"""Kernels loaded and launched from C++: real PTX, and a driver whose launches do what the kernels
should."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from tests.support import libcuda, native
from tests.support.kernel_inputs import LAYOUTS, random_bits, start_random
from tests.support.libcuda import FakeCuda
from torch_rpc_ext.kernels import plan, ptx, reference

INVALID_PTX = 218


@pytest.fixture(autouse=True)
def _compiler() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        pytest.skip("NUMBA_ENABLE_CUDASIM is set: nothing is compiled")
    start_random()


@pytest.fixture
def kernels(cuda: FakeCuda) -> Any:
    return native.cuda.Kernels(native.cuda.load())


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def on_device(cuda: FakeCuda, tensor: torch.Tensor) -> int:
    """Copy a contiguous tensor to device memory."""
    address = cuda.allocate(max(1, tensor.nbytes))
    libcuda.write(address, as_bytes(tensor))
    return address


def from_device(address: int, like: torch.Tensor) -> torch.Tensor:
    if like.nbytes == 0:
        return torch.empty_like(like)
    data = bytearray(libcuda.read(address, like.nbytes))
    return torch.frombuffer(data, dtype=torch.uint8).view(like.dtype).view(like.shape)


def test_gather_and_scatter(cuda: FakeCuda, kernels: Any) -> None:
    tensors = [random_bits((size,), torch.uint8) for size in (1, 0, 17, 4096, 200_000)]
    places = [on_device(cuda, tensor) for tensor in tensors]
    offsets, end = plan.block_offsets(len(tensor) for tensor in tensors)
    block, stream = cuda.allocate(end), cuda.stream()
    runs = [(p, block + o, len(t)) for p, o, t in zip(places, offsets, tensors, strict=True)]
    cuda.forget_calls()
    kernels.segments(0, stream, runs)
    (launch,) = cuda.calls("cuLaunchKernel")
    # Chunks of 64 KiB: three of the largest, none of the empty one.
    assert launch.startswith("cuLaunchKernel segments grid 7 block 256:")
    assert launch.endswith(" 5 7 65536")  # rows, chunks, elements of a chunk
    assert cuda.calls("cuStreamSynchronize") == []
    cuda.synchronize(stream)
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert torch.equal(from_device(block + offset, tensor), tensor)
    back = [cuda.allocate(max(1, len(tensor))) for tensor in tensors]
    runs = [(block + o, p, len(t)) for p, o, t in zip(back, offsets, tensors, strict=True)]
    kernels.segments(0, stream, runs)
    cuda.synchronize(stream)
    for tensor, place in zip(tensors, back, strict=True):
        assert torch.equal(from_device(place, tensor), tensor)


def test_more_segments_than_a_table_has_rows(cuda: FakeCuda, kernels: Any) -> None:
    count = 5000
    source = random_bits((count * 4,), torch.uint8)
    begin, block, stream = on_device(cuda, source), cuda.allocate(count * 16), cuda.stream()
    kernels.segments(0, stream, [(begin + 4 * i, block + 16 * i, 4) for i in range(count)])
    assert len(cuda.calls("cuLaunchKernel")) == 3
    cuda.synchronize(stream)
    found = from_device(block, torch.empty(count, 16, dtype=torch.uint8))
    assert torch.equal(found[:, :4].flatten(), source)


def test_tables_are_used_again(cuda: FakeCuda, kernels: Any) -> None:
    source = random_bits((64,), torch.uint8)
    begin, target, stream = on_device(cuda, source), cuda.allocate(64), cuda.stream()
    for _ in range(20):
        kernels.segments(0, stream, [(begin, target, 64)])
        cuda.synchronize(stream)
    assert len(cuda.calls("cuMemHostAlloc")) == 1
    # While the device has not got to them they are not.
    other = cuda.stream()
    for _ in range(3):
        cuda.fill(target, 0, 1, other)
    for _ in range(3):
        kernels.segments(0, other, [(begin, target, 64)])
    cuda.synchronize(other)
    assert torch.equal(from_device(target, source), source)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.complex128])
@pytest.mark.parametrize("name", LAYOUTS)
def test_strided(cuda: FakeCuda, kernels: Any, name: str, dtype: torch.dtype) -> None:
    base = random_bits((4, 3, 6), dtype)
    view = LAYOUTS[name](base)
    begin = on_device(cuda, base)
    source = plan.layout_of(view)
    source = source._replace(address=begin + view.data_ptr() - base.data_ptr())
    target, stream = cuda.allocate(max(1, view.nbytes)), cuda.stream()
    kernels.strided(0, stream, as_native(source), as_native(plan.packed(target, view.shape, dtype)))
    cuda.synchronize(stream)
    assert libcuda.read(target, view.nbytes) == as_bytes(view)


def as_native(layout: plan.Layout) -> tuple[int, int, list[int], list[int]]:
    return layout.address, layout.dtype.itemsize, list(layout.shape), list(layout.strides)


def test_casts(cuda: FakeCuda, kernels: Any) -> None:
    # Exact in bfloat16: how it rounds is the business of tests/simulator.
    kept = torch.arange(-50, 50, dtype=torch.float32)
    begin, target, stream = on_device(cuda, kept), cuda.allocate(200), cuda.stream()
    back = cuda.allocate(400)
    kernels.segments(0, stream, [(begin, target, 100)], "float32_to_bfloat16")
    wide = plan.packed(back, kept.shape, kept.dtype)
    narrow = plan.packed(target, kept.shape, torch.bfloat16)
    kernels.strided(0, stream, as_native(narrow), as_native(wide), "bfloat16_to_float32")
    cuda.synchronize(stream)
    assert torch.equal(from_device(target, kept.bfloat16()), kept.bfloat16())
    assert torch.equal(from_device(back, kept), kept)
    names = [call.split()[1] for call in cuda.calls("cuLaunchKernel")]
    assert names == ["segments_float32_to_bfloat16", "strided_bfloat16_to_float32"]


@pytest.mark.parametrize("size", [0, 1, 8, 1001, 100_000])
def test_checksum(cuda: FakeCuda, kernels: Any, size: int) -> None:
    data = random_bits((size,), torch.uint8)
    begin, stream, result = on_device(cuda, data), cuda.stream(), cuda.allocate(8)
    libcuda.write(result, b"\xff" * 8)  # what was there before does not count
    kernels.checksum(0, stream, begin, size, result)
    cuda.synchronize(stream)
    found = from_device(result, torch.zeros(1, dtype=torch.int64))
    assert int(found) == int(reference.checksum(data))


def test_loaded_once_for_each_device(cuda: FakeCuda, kernels: Any) -> None:
    for device in (0, 1, 0, 1):
        kernels.prepare(device)
    assert len(cuda.calls("cuModuleLoadDataEx")) == 2
    place, stream = cuda.allocate(64, 1), cuda.stream(1)
    kernels.segments(1, stream, [(place, place + 32, 32)])
    cuda.synchronize(stream, 1)
    assert len(cuda.calls("cuModuleLoadDataEx")) == 2
    del kernels


def test_a_kernel_that_the_driver_refuses(cuda: FakeCuda, kernels: Any) -> None:
    cuda.fail("cuModuleLoadDataEx", INVALID_PTX)
    for _ in range(2):  # asked once, and remembered
        with pytest.raises(ValueError, match="loading kernel segments: CUDA_ERROR_INVALID_PTX"):
            kernels.prepare(0)
    assert len(cuda.calls("cuModuleLoadDataEx")) == 1
    kernels.prepare(0, "segments_float32_to_float16")


def test_the_log_of_the_driver_is_told(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ptx.CompiledKernel("nothing", "entry", (), (9, 0))
    monkeypatch.setattr(ptx, "compile_kernel", lambda *_: broken)
    with pytest.raises(ValueError, match="CUDA_ERROR_INVALID_PTX: ptxas: no version"):
        kernels.prepare(0)


def test_memory_may_be_there_later(cuda: FakeCuda, kernels: Any) -> None:
    cuda.fail("cuModuleLoadDataEx", 2)
    with pytest.raises(ValueError, match="overloaded: .*CUDA_ERROR_OUT_OF_MEMORY"):
        kernels.prepare(0)
    kernels.prepare(0)


def test_without_numba_cuda(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ptx.MissingCompilerError("kernels are compiled by numba-cuda: pip install ...")

    monkeypatch.setattr(ptx, "compile_kernel", refuse)
    with pytest.raises(ValueError, match="unsupported: kernels are compiled by numba-cuda"):
        kernels.prepare(0)


def test_a_failed_launch_is_told(cuda: FakeCuda, kernels: Any) -> None:
    place, stream = cuda.allocate(64), cuda.stream()
    for function in ("cuLaunchKernel", "cuMemcpyAsync", "cuMemHostAlloc"):
        cuda.fail(function, 700)
        fresh = native.cuda.Kernels(native.cuda.load())
        with pytest.raises(ValueError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            fresh.segments(0, stream, [(place, place + 32, 32)])
        fresh.segments(0, stream, [(place, place + 32, 32)])
        cuda.synchronize(stream)


def random_layouts() -> tuple[plan.Layout, plan.Layout]:
    """Two layouts of the same random shape: permuted, sliced, some dimensions of size 1 or 0."""
    dims = random.randint(0, 10)
    shape = [random.choice((1, 1, 2, 3, 4, 8)) for _ in range(dims)]
    if random.random() < 0.05 and dims:
        shape[random.randrange(dims)] = 0
    size = random.choice((1, 2, 4, 8, 16))
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
        size, torch.complex128
    )
    found = []
    for _ in range(2):
        order = random.sample(range(dims), dims) if random.random() < 0.4 else range(dims)[::-1]
        strides = [0] * dims
        step = size
        for dim in order:
            strides[dim] = step
            step *= max(1, shape[dim]) * random.choice((1, 1, 1, 2, 3))
        address = 4096 * random.randint(1, 9) + random.choice((0, 0, 1, 4, 8))
        found.append(plan.Layout(address, dtype, tuple(shape), tuple(strides)))
    return found[0], found[1]


def test_plans_are_those_of_python() -> None:
    refused = 0
    for seed in range(3000):
        random.seed(seed)
        source, target = random_layouts()
        wanted = plan.plan_strided(source, target)
        arguments = as_native(source), as_native(target)
        if wanted is None:
            refused += 1
            with pytest.raises(ValueError, match="unsupported: .* dimensions"):
                native.cuda.plan_strided(*arguments)
            continue
        elements, sizes, sources, targets, width = native.cuda.plan_strided(*arguments)
        assert (elements, tuple(sizes), width) == (
            wanted.elements,
            wanted.sizes,
            wanted.source_width,
        ), seed
        assert tuple(sources) == wanted.source_strides, seed
        assert tuple(targets) == wanted.destination_strides, seed
    assert refused > 0


@pytest.mark.parametrize(
    ("source", "target", "cast", "text"),
    [
        ((64, 4, [2], [4]), (64, 4, [3], [4]), "", "must have the same sizes"),
        ((64, 4, [2], [4]), (64, 2, [2], [2]), "", "must have one size"),
        ((64, 2, [2], [2]), (64, 2, [2], [2]), "float32_to_bfloat16", "of elements of 2 bytes"),
        ((66, 4, [2], [4]), (64, 2, [2], [2]), "float32_to_bfloat16", "unsupported: .* aligned"),
    ],
)
def test_bad_layouts(source: Any, target: Any, cast: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        native.cuda.plan_strided(source, target, cast)
