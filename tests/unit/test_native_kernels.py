"""The kernels as numba-cuda compiles them, run on this CPU: tests/support/native_kernel.py.

Many numbers, and indices beyond 32 bits, which the simulator is too slow for, or too kind to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from tests.support.kernel_inputs import CASTS, random_bits, same_bits, start_random
from tests.support.sparse import sparse_tensor
from torch_rpc_ext.kernels import reference
from torch_rpc_ext.kernels.plan import (
    CAST_NAMES,
    Segment,
    layout_of,
    packed,
    plan_strided,
    segment_table,
)

THREADS = 4


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        pytest.skip("NUMBA_ENABLE_CUDASIM is set: nothing is compiled")
    start_random()
    yield


@cache
def native(name: str) -> Any:
    from tests.support.native_kernel import NativeKernel
    from torch_rpc_ext.kernels.registry import KERNELS

    return NativeKernel(KERNELS[name])


def cast_native(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a contiguous tensor by the kernel `segments_...`."""
    result = torch.empty(source.shape, dtype=dtype)
    run = Segment(source.data_ptr(), result.data_ptr(), source.numel())
    table, chunks = segment_table([run], 1 << 16)
    name = f"segments_{CAST_NAMES[source.dtype, dtype]}"
    native(name).launch(3, THREADS, table.data_ptr(), 1, chunks, 1 << 16)
    return result


@pytest.mark.parametrize(("kept", "sent"), CASTS[:2], ids=str)
def test_rounding_of_millions_of_floats(kept: torch.dtype, sent: torch.dtype) -> None:
    # Each upper half of a float, with lower halves around a tie for both formats, and random ones.
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7000):
        source = (upper | lower).view(kept)
        assert same_bits(cast_native(source, sent), reference.cast(source, sent)), hex(lower)
    source = random_bits((1 << 20,), kept)
    assert same_bits(cast_native(source, sent), reference.cast(source, sent))


@pytest.mark.parametrize(("sent", "kept"), CASTS[2:], ids=str)
def test_every_half_and_bfloat16(sent: torch.dtype, kept: torch.dtype) -> None:
    source = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(sent)
    result = cast_native(source, kept)
    assert same_bits(result, reference.cast(source, kept))
    number = ~source.isnan()
    assert same_bits(result[number], source[number].to(kept))


@pytest.mark.parametrize("misaligned", [0, 1, 2, 4, 8])
def test_segments(misaligned: int) -> None:
    sources = [random_bits((n,), torch.uint8, misaligned) for n in (0, 1, 31, 1000, 100_003)]
    targets = [random_bits((len(s),), torch.uint8) for s in sources]
    runs = [
        Segment(s.data_ptr(), t.data_ptr(), s.numel())
        for s, t in zip(sources, targets, strict=True)
    ]
    table, chunks = segment_table(runs, 4096)
    native("segments").launch(5, THREADS, table.data_ptr(), len(runs), chunks, 4096)
    assert all(map(same_bits, sources, targets))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128], ids=str
)
def test_strided(dtype: torch.dtype) -> None:
    source = random_bits((31, 17, 40), dtype)[::2, :, 3:38].permute(2, 0, 1)
    result = torch.empty(source.shape, dtype=dtype)
    plan = plan_strided(layout_of(source), layout_of(result))
    assert plan is not None and plan.source_width == dtype.itemsize
    launch_strided(f"strided_{plan.source_width}", plan, 7, 0)
    assert same_bits(result, source)


@pytest.mark.parametrize(("kept", "sent"), CASTS, ids=str)
def test_strided_cast(kept: torch.dtype, sent: torch.dtype) -> None:
    source = random_bits((50, 60), kept).t()
    result = torch.empty(source.shape, dtype=sent)
    plan = plan_strided(layout_of(source), layout_of(result))
    launch_strided(f"strided_{CAST_NAMES[kept, sent]}", plan, 7, 0)
    assert same_bits(result, reference.cast(source, sent))


# A barrier is nothing here, so a block has one thread.
@pytest.mark.parametrize("misaligned", [0, 3])
def test_checksum(misaligned: int) -> None:
    for size in (0, 1, 8, 12, 1_000_003):
        data = random_bits((size,), torch.uint8, misaligned)
        result = torch.zeros((), dtype=torch.int64)
        native("checksum").launch(9, 1, data.data_ptr(), size, result.data_ptr())
        assert result == reference.checksum(data), size


def launch_strided(name: str, plan: Any, blocks: int, first_block: int) -> None:
    """Run the blocks from the first one on; a grid so large that no thread has a second element."""
    native(name).launch(
        blocks,
        THREADS,
        plan.source,
        plan.destination,
        plan.elements,
        plan.sizes,
        plan.source_strides,
        plan.destination_strides,
        first_block=first_block,
    )


@pytest.mark.parametrize("index", [(1 << 31) - 2, (1 << 31) + 5, (1 << 32) + 7, (1 << 33) - 9])
def test_elements_beyond_two_to_the_31(index: int) -> None:
    # 2**33 elements, all the same few bytes at the source; only the last block is run.
    destination = sparse_tensor(1 << 33, torch.uint8)
    values = random_bits((64,), torch.uint8)
    source = values[::2].expand(1 << 28, 32)
    plan = plan_strided(
        layout_of(source), packed(destination.data_ptr(), source.shape, torch.uint8)
    )
    assert plan is not None and plan.elements == 1 << 33
    block = index // THREADS
    launch_strided("strided_1", plan, block + 1, block)
    begin = block * THREADS
    written = destination[begin : begin + THREADS]
    assert torch.equal(written, torch.stack([values[i % 32 * 2] for i in range(begin, begin + 4)]))
    assert not destination[begin - 4096 : begin].any()
    assert not destination[begin + THREADS : begin + THREADS + 4096].any()


@pytest.mark.parametrize(("kept", "sent"), [(None, None), *CASTS[:1], *CASTS[2:3]], ids=str)
def test_a_segment_of_more_than_two_to_the_32_elements(
    kept: torch.dtype | None, sent: torch.dtype | None
) -> None:
    elements = (1 << 32) + 1024
    from_bytes, to_bytes = (d.itemsize if d else 1 for d in (kept, sent))
    source = sparse_tensor(elements * from_bytes, kept or torch.uint8)
    destination = sparse_tensor(elements * to_bytes, sent or torch.uint8)
    tail = random_bits((1024,), source.dtype)
    source[-1024:] = tail
    run = Segment(source.data_ptr(), destination.data_ptr(), elements)
    table, chunks = segment_table([run], 1024)
    name = "segments" if kept is None or sent is None else f"segments_{CAST_NAMES[kept, sent]}"
    native(name).launch(chunks, THREADS, table.data_ptr(), 1, chunks, 1024, first_block=chunks - 1)
    assert same_bits(destination[-1024:], reference.cast(tail, destination.dtype))
    assert not destination[-4096:-1024].view(torch.uint8).any()


def test_a_checksum_of_more_than_two_to_the_31_words() -> None:
    # Only the last block of the largest grid is run: it takes the last word of each half.
    blocks = (1 << 31) - 1
    size = 8 * 2 * blocks
    words = sparse_tensor(size, torch.int64)
    last = torch.tensor([blocks - 1, 2 * blocks - 1])
    words[last] = random_bits((2,), torch.int64)
    result = torch.zeros((), dtype=torch.int64)
    native("checksum").launch(
        blocks, 1, words.data_ptr(), size, result.data_ptr(), first_block=blocks - 1
    )
    # No block 0 was there to add the length.
    terms = reference._mix(words[last] + (last + 1) * reference.CHECKSUM_GAMMA)
    assert result == terms.sum()
