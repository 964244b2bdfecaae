"""The functions of torch_rpc_ext.kernels where no kernel runs: plain torch, and bad input."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from tests.support import script
from tests.support.kernel_inputs import CASTS, DTYPES, LAYOUTS, random_bits, same_bits, start_random
from torch_rpc_ext import kernels
from torch_rpc_ext.kernels import plan, reference


@pytest.fixture(autouse=True)
def _no_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    start_random()


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_gather_and_scatter_every_dtype() -> None:
    tensors = [random_bits((3, 5), dtype).t() for dtype in DTYPES]
    offsets, end = kernels.block_offsets(t.numel() * t.itemsize for t in tensors)
    block = torch.zeros(end, dtype=torch.uint8)
    kernels.gather(tensors, block, offsets)
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert raw(block[offset : offset + tensor.nbytes]) == raw(tensor)
    back = [torch.empty_like(tensor) for tensor in tensors]
    kernels.scatter(block, offsets, back)
    assert all(map(same_bits, back, tensors))


@pytest.mark.parametrize(("kept", "sent"), CASTS, ids=str)
def test_casts_are_torch_s_but_for_nan(kept: torch.dtype, sent: torch.dtype) -> None:
    source = random_bits((100_000,), kept)
    result = torch.empty(source.shape, dtype=sent)
    kernels.copy(source, result)
    number = ~source.isnan()
    assert not number.all() and same_bits(result[number], source[number].to(sent))
    assert result[~number].isnan().all()
    assert torch.equal(result[~number].signbit(), source[~number].signbit())


def test_one_element_with_a_stride() -> None:
    one = torch.arange(4.0).view(1, 4)[:, 2]
    assert one.is_contiguous() and one.stride() == (4,)
    block = torch.zeros(4, dtype=torch.uint8)
    kernels.gather([one], block, [0])
    assert block.view(torch.float32).item() == 2
    assert kernels.checksum(one) == kernels.checksum(torch.tensor([2.0]))


def test_parameters_that_require_grad() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    block = torch.zeros(48, dtype=torch.uint8)
    kernels.gather([weight], block, [0])
    assert raw(block) == raw(weight.detach())
    kernels.scatter(torch.zeros_like(block), [0], [weight])
    assert not weight.any() and weight.grad_fn is None


def test_without_numba_cuda() -> None:
    # Even with the simulator asked for, plain torch serves.
    ended = script.python(
        """
        import sys
        sys.modules["numba"] = sys.modules["numba_cuda"] = sys.modules["llvmlite"] = None
        import torch
        from torch_rpc_ext import kernels
        block = torch.zeros(8, dtype=torch.uint8)
        kernels.gather([torch.arange(8, dtype=torch.uint8)], block, [0])
        print(block.tolist())
        from torch_rpc_ext.kernels import ptx
        try:
            ptx.compile_kernel("segments", (9, 0))
        except RuntimeError as error:
            print(error)
        """,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
    )
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in ended.out, ended
    assert "pip install 'torch-rpc-ext[cuda]'" in ended.out, ended


@pytest.mark.parametrize("simulated", ["", "0", "1"])
def test_who_is_served_by_kernels(simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba_cuda")
    monkeypatch.setitem(os.environ, "NUMBA_ENABLE_CUDASIM", simulated)
    assert kernels._use_kernels(torch.ones(1)) == (simulated == "1")


BLOCK = torch.zeros(64, dtype=torch.uint8)
ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([ONE], torch.zeros(64), [0]), r"block must be uint8.* got torch.float32, shape \(64,\)"),
        (([ONE], BLOCK.view(8, 8), [0]), r"one-dimensional.*\(8, 8\)"),
        (([ONE], BLOCK[::2], [0]), r"contiguous.*strides \(2,\)"),
        (([ONE], BLOCK, [0, 8]), "1 tensors need as many offsets, got 2"),
        (([ONE, ONE], BLOCK, [0, 60]), r"tensors\[1\] at 60 to 68 is beyond the block's 64"),
        (([ONE], BLOCK, [-1]), r"tensors\[0\] at -1"),
        (([ONE.to("meta")], BLOCK, [0]), r"tensors\[0\] is on meta, the block on cpu"),
        (([ONE.int()], BLOCK, [0], torch.float16), "no cast from torch.int32 to torch.float16"),
        (([torch.ones(1, dtype=torch.cfloat).conj()], BLOCK, [0]), "resolve_conj"),
        (([ONE.to_sparse()], BLOCK, [0]), "layout torch.sparse_coo"),
    ],
)
def test_bad_input_of_gather(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kernels.gather(*arguments)


def test_bad_input_of_the_others() -> None:
    with pytest.raises(ValueError, match=r"tensors\[0\] is expanded"):
        kernels.scatter(BLOCK, [0], [torch.zeros(1).expand(4)])
    with pytest.raises(ValueError, match="no cast from torch.float16 to torch.bfloat16"):
        kernels.scatter(BLOCK, [0], [ONE.bfloat16()], torch.float16)
    with pytest.raises(ValueError, match=r"cannot copy \(2,\) on cpu to \(3,\) on cpu"):
        kernels.copy(ONE, torch.ones(3))
    with pytest.raises(ValueError, match="destination is expanded"):
        kernels.copy(ONE, torch.ones(1).expand(2))
    with pytest.raises(ValueError, match=r"contiguous tensor, got strides \(2,\)"):
        kernels.checksum(BLOCK[::2])


def test_a_layout_s_elements_are_all_reached() -> None:
    """The plan, followed in Python: every piece of every element, once, and nothing else."""
    for name, layout in LAYOUTS.items():
        source = layout(random_bits((4, 3, 6), torch.float32))
        target = plan.packed(1 << 20, source.shape, torch.float32)
        found = plan.plan_strided(plan.layout_of(source), target)
        assert found is not None and found.elements == math.prod(found.sizes)
        assert found.elements * found.source_width == source.numel() * 4, name
        reached = set()
        for index in range(found.elements):
            offset = 0
            for size, stride in zip(found.sizes, found.destination_strides, strict=True):
                offset += index % size * stride
                index //= size
            reached.add(offset)
        assert reached == set(range(0, source.numel() * 4, found.source_width)), name


def test_a_plan_merges_and_widens() -> None:
    def widths(tensor: torch.Tensor) -> tuple[int, int, bool]:
        target = plan.packed(0, tensor.shape, tensor.dtype)
        found = plan.plan_strided(plan.layout_of(tensor), target)
        assert found is not None
        used = sum(size > 1 for size in found.sizes)
        return found.source_width, used, found.as_segment() is not None

    base = random_bits((4, 6, 8), torch.float32)
    assert widths(base) == (16, 1, True)
    assert widths(base[1:3]) == (16, 1, True)
    assert widths(base[:, 1:3]) == (16, 2, False)
    assert widths(base[:, :, 2:4]) == (8, 1, False)
    assert widths(base[:, :, 1:2]) == (4, 1, False)
    assert widths(base.permute(2, 0, 1)) == (4, 2, False)
    assert widths(base.view(torch.uint8)[:, :, 1:4]) == (1, 2, False)


def test_casting_what_is_misaligned_is_refused() -> None:
    source = random_bits((4,), torch.float32, misaligned=2)
    with pytest.raises(ValueError, match="elements must be aligned to their size"):
        plan.plan_strided(plan.layout_of(source), plan.packed(0, (4,), torch.bfloat16))


@pytest.mark.parametrize("chunk", [0, -16, 8, 24])
def test_chunks_keep_the_alignment(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 16, got {chunk}"):
        plan.segment_table([], chunk)


def test_the_table_counts_chunks() -> None:
    runs = [plan.Segment(100 * i, 200 * i, n) for i, n in enumerate((0, 16, 17, 0, 33))]
    table, chunks = plan.segment_table(runs, 16)
    assert chunks == 6 and table[:, 3].tolist() == [0, 0, 1, 3, 3]
    assert table[2].tolist() == [200, 400, 17, 1]
    empty, none = plan.segment_table([], 16)
    assert none == 0 and empty.shape == (0, 4)


def test_a_checksum_has_a_fixed_value() -> None:
    # Workers of two versions compare them.
    assert int(reference.checksum(torch.arange(5, dtype=torch.uint8))) == 79623217695701551
