"""The codec: every kind of tensor there and back."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_rpc_ext._native import loader

wire = loader.load().wire

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*"),
    pytest.mark.timeout(120),
]

INLINE = 1 << 20
BULK = 0
THRESHOLDS = pytest.mark.parametrize("threshold", [INLINE, BULK, 64])

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float16, torch.float32, torch.float64, torch.bfloat16,
    torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
    torch.bits8, torch.bits16, torch.float4_e2m1fn_x2,
]  # fmt: skip


def encode(
    *tensors: torch.Tensor, payload: bytes = b"payload", threshold: int = INLINE
) -> tuple[bytes, list[bytes]]:
    return wire.encode_message(payload, list(tensors), 0x102, 42, threshold)


def decode(head: bytes, bulk: list[bytes]) -> list[torch.Tensor]:
    return wire.decode_message(head, bulk)[1]


def round_trip(*tensors: torch.Tensor, threshold: int = INLINE) -> list[torch.Tensor]:
    head, bulk = encode(*tensors, threshold=threshold)
    payload, result, message_type, call_id = wire.decode_message(head, bulk)
    assert payload == b"payload"
    assert (message_type, call_id) == (0x102, 42)
    assert len(result) == len(tensors)
    return result


def raw(tensor: torch.Tensor) -> bytes:
    """The elements as bytes: comparable for dtypes that have no `==`."""
    assert not tensor.is_conj() and not tensor.is_neg()
    return bytes(tensor.contiguous().untyped_storage())


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert type(got) is torch.Tensor
    assert (got.dtype, got.layout, got.shape) == (
        want.dtype, want.layout, want.shape,
    )  # fmt: skip
    assert got.requires_grad == want.requires_grad
    assert got.is_leaf
    if want.layout == torch.strided and not want.is_quantized:
        assert got.stride() == want.stride()
        assert got.is_conj() == want.is_conj()
        assert got.is_neg() == want.is_neg()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@THRESHOLDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(dtype: torch.dtype, threshold: int) -> None:
    data = torch.randint(0, 2, (24 * 16,), dtype=torch.uint8)
    tensor = data.view(dtype).view(2, -1)
    (got,) = round_trip(tensor, threshold=threshold)
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert got.stride() == tensor.stride()
    assert bytes(got.untyped_storage()) == bytes(tensor.untyped_storage())


def _strided_cases() -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "scalar": lambda: torch.tensor(3.5),
        "vector": lambda: torch.arange(10),
        "matrix": lambda: torch.randn(3, 4),
        "transposed": lambda: torch.randn(3, 4).t(),
        "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "slice": lambda: torch.randn(10, 10)[2:8:2, 1:9:3],
        "expanded": lambda: torch.randn(3, 1).expand(3, 1000),
        "expanded_huge": lambda: torch.randn(1).expand(1 << 40)[:3],
        "empty": lambda: torch.empty(0),
        "empty_2d": lambda: torch.empty(3, 0, 5),
        "empty_slice": lambda: torch.randn(10)[10:],
        "empty_corner": lambda: torch.randn(3, 4)[3:, 4:],
        "dims_64": lambda: torch.ones([1] * 64),
        "overlapping": lambda: torch.arange(10.0).as_strided((5, 3), (1, 2)),
        "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
        "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        "conj_neg": lambda: torch._neg_view(torch.randn(3, dtype=torch.complex64).conj()),
        "real": lambda: torch.randn(3, dtype=torch.complex64).real,
        "requires_grad": lambda: torch.randn(3, requires_grad=True),
        "requires_grad_complex": lambda: torch.randn(3, dtype=torch.complex128, requires_grad=True),
        "nan": lambda: torch.tensor([float("nan"), float("inf")]),
        "large": lambda: torch.randn(600_000),
    }


@THRESHOLDS
@pytest.mark.parametrize("name", list(_strided_cases()))
def test_strided(name: str, threshold: int) -> None:
    want = _strided_cases()[name]()
    (got,) = round_trip(want, threshold=threshold)
    assert_same(got, want)


def composite_cases() -> dict[str, Callable[[], torch.Tensor]]:
    dense = torch.tensor([[0.0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 4, 5]])
    blocks = torch.arange(16.0).view(4, 4)
    return {
        "coo": lambda: dense.to_sparse(),
        "coo_uncoalesced": lambda: torch.sparse_coo_tensor(
            [[0, 0, 1], [1, 1, 0]], [1.0, 2, 3], (2, 2)
        ),
        "coo_hybrid": lambda: torch.sparse_coo_tensor([[0, 2]], torch.randn(2, 5), (3, 5)),
        "coo_empty": lambda: torch.sparse_coo_tensor(size=(3, 4)),
        "coo_scalar": lambda: torch.sparse_coo_tensor(
            torch.empty(0, 1, dtype=torch.long), torch.ones(1), ()
        ),
        "coo_int": lambda: dense.to(torch.int32).to_sparse(),
        "coo_grad": lambda: dense.to_sparse().requires_grad_(),
        "coo_bfloat16": lambda: dense.to(torch.bfloat16).to_sparse(),
        "csr": lambda: dense.to_sparse_csr(),
        "csr_int32": lambda: torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2], dtype=torch.int32),
            torch.tensor([1, 0], dtype=torch.int32),
            torch.tensor([1.0, 2]),
            (2, 2),
        ),
        "csr_batch": lambda: torch.stack([dense, dense]).to_sparse_csr(),
        "csr_grad": lambda: dense.to_sparse_csr().requires_grad_(),
        "csr_empty": lambda: torch.zeros(2, 3).to_sparse_csr(),
        "csc": lambda: dense.to_sparse_csc(),
        "bsr": lambda: blocks.to_sparse_bsr((2, 2)),
        "bsc": lambda: blocks.to_sparse_bsc((2, 2)),
        "quint8": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 10, torch.quint8),
        "qint8": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.25, -3, torch.qint8).t(),
        "qint32": lambda: torch.quantize_per_tensor(torch.randn(7), 0.01, 0, torch.qint32),
        "quint4x2": lambda: torch.quantize_per_channel(
            torch.randn(3, 5),
            torch.rand(3) + 0.1,
            torch.zeros(3),
            0,
            torch.quint4x2,
        ),
        "per_channel": lambda: torch.quantize_per_channel(
            torch.randn(3, 4),
            torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64),
            torch.tensor([0, 1, 2]),
            0,
            torch.qint8,
        ),
        "per_channel_float": lambda: torch.quantize_per_channel(
            torch.randn(3, 4),
            torch.tensor([0.1, 0.2, 0.3, 0.4]),
            torch.tensor([0.0, 1.0, 2.0, 0.5]),
            1,
            torch.quint8,
        ),
    }


@THRESHOLDS
@pytest.mark.parametrize("name", list(composite_cases()))
def test_composite(name: str, threshold: int) -> None:
    want = composite_cases()[name]()
    (got,) = round_trip(want, threshold=threshold)
    if want.is_quantized:
        assert got.qscheme() == want.qscheme()
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got.dequantize(), want.dequantize())
        return
    if want.layout == torch.sparse_coo:
        assert got.is_coalesced() == want.is_coalesced()
        assert torch.equal(got._indices(), want._indices())
    assert_same(got, want)


def test_mixed_order() -> None:
    cases = [make() for make in composite_cases().values()]
    cases = [t for sparse in cases for t in (sparse, torch.randn(2))]
    for got, want in zip(round_trip(*cases, threshold=16), cases, strict=True):
        assert (got.layout, got.dtype, got.shape) == (
            want.layout, want.dtype, want.shape,
        )  # fmt: skip


@THRESHOLDS
def test_views_alias(threshold: int) -> None:
    base = torch.arange(12.0).view(3, 4)
    other = torch.ones(2)
    a, b, c, d = round_trip(base, base.t(), other, base[1:], threshold=threshold)
    a[2, 3] = 100
    assert b[3, 2] == 100 and d[1, 3] == 100 and c[0] == 1
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert a.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
    assert c.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()


def test_aliasing_among_many_storages() -> None:
    bases = [torch.full((4,), float(i)) for i in range(100)]
    tensors = [t for base in bases for t in (base, base[1:])]
    got = round_trip(*tensors)
    for i in range(100):
        got[2 * i][1] = -1
        assert got[2 * i + 1][0] == -1
        assert got[2 * i][0] == i


def test_small_view_of_large_storage_travels_alone() -> None:
    base = torch.randn(100_000)
    head, bulk = encode(base[10:20], base[5:10].requires_grad_(), threshold=64)
    assert len(head) < 1000 and not bulk
    a, b = decode(head, bulk)
    assert torch.equal(a, base[10:20]) and torch.equal(b.detach(), base[5:10])
    assert b.requires_grad and b.is_leaf and not a.requires_grad


def test_half_of_a_storage_keeps_it() -> None:
    base = torch.randn(10_000)
    head, bulk = encode(base[:6000], base[3000:], threshold=64)
    assert [len(b) for b in bulk] == [40_000]
    a, b = decode(head, bulk)
    a[3000] = 7
    assert b[0] == 7


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 20, (1 << 20) + 1, 5 << 20])
def test_payload_sizes(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    for threshold in (BULK, 4096, 1 << 30):
        head, bulk = encode(torch.ones(2), payload=payload, threshold=threshold)
        assert (payload in bulk) == (size > threshold)
        got, tensors, _, _ = wire.decode_message(head, bulk)
        assert got == payload
        assert torch.equal(tensors[0], torch.ones(2))


def test_no_tensors() -> None:
    assert wire.decode_message(*wire.encode_message(b"", [], 0, 0, 0)) == (
        b"", [], 0, 0,
    )  # fmt: skip


def test_call_id_is_64_bits() -> None:
    frame = wire.encode_message(b"", [], 0x3FF, (1 << 63) - 1, 0)
    assert wire.decode_message(*frame)[2:] == (0x3FF, (1 << 63) - 1)


@THRESHOLDS
def test_ten_thousand_tensors(threshold: int) -> None:
    want = [torch.full((i % 7,), float(i)) for i in range(10_000)]
    got = round_trip(*want, threshold=threshold)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_parameter() -> None:
    want = torch.nn.Parameter(torch.randn(3))
    (got,) = round_trip(want)
    assert got.requires_grad and torch.equal(got, want)
    (got,) = round_trip(want.data)
    assert not got.requires_grad


def test_tensor_with_history_arrives_as_leaf() -> None:
    want = torch.randn(3, requires_grad=True) * 2
    (got,) = round_trip(want)
    assert got.requires_grad and got.is_leaf


def test_zerotensor() -> None:
    want = torch._efficientzerotensor((2, 3))
    (got,) = round_trip(want)
    assert torch.equal(got, torch.zeros(2, 3))


def test_subclass_arrives_as_plain_tensor() -> None:
    class Mine(torch.Tensor):
        pass

    want = torch.randn(3).as_subclass(Mine)
    (got,) = round_trip(want)
    assert type(got) is torch.Tensor
    assert torch.equal(got, want.as_subclass(torch.Tensor))


@THRESHOLDS
def test_received_tensor_is_ordinary(threshold: int) -> None:
    (got,) = round_trip(torch.randn(500_000), threshold=threshold)
    first = got[:10].clone()
    got.add_(1)
    got.resize_(1_000_000)
    assert torch.equal(got[:10], first + 1)
    got.set_(torch.ones(3))
    (again,) = round_trip(torch.ones(300_000), threshold=threshold)
    again.share_memory_()
    assert again.is_shared() and again.sum() == 300_000
    (grad,) = round_trip(torch.ones(3, requires_grad=True), threshold=threshold)
    (grad * 2).sum().backward()
    assert torch.equal(grad.grad, torch.full((3,), 2.0))


def test_memory_is_held_until_the_frame_is_gone() -> None:
    head, bulk = encode(torch.randn(4, 4).to_sparse() * 2, threshold=BULK)
    gc.collect()
    (got,) = decode(head, bulk)
    assert got.is_sparse


def test_sender_errors_name_the_tensor() -> None:
    meta = torch.empty(3, layout=torch.sparse_coo, device="meta")
    with pytest.raises(ValueError, match="tensor 1 .*device meta and not an ordinary strided"):
        encode(torch.ones(1), meta)
    with pytest.raises(ValueError, match="nested"):
        encode(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with pytest.raises(ValueError, match="65 exceeds the limit of 64"):
        encode(torch.ones([1] * 65))
    with pytest.raises(ValueError, match="cannot be sent"):
        encode(torch.ones(3).to_mkldnn())


def test_meta_tensors_are_only_described() -> None:
    base = torch.empty(1 << 30, 3, device="meta")
    tensors = [base.t(), torch.ones(2), base[5:, 1].requires_grad_(), torch.ones(3)]
    head, bulk = encode(*tensors, threshold=BULK)
    assert len(head) < 300 and [len(each) for each in bulk] == [7, 8, 12]
    got = round_trip(*tensors)
    for one, want in zip(got, tensors, strict=True):
        assert (one.device, one.dtype, one.shape) == (want.device, want.dtype, want.shape)
        assert (one.stride(), one.storage_offset()) == (want.stride(), want.storage_offset())
        assert one.requires_grad == want.requires_grad
    assert got[0].untyped_storage()._cdata == got[2].untyped_storage()._cdata
    assert torch.equal(got[3], torch.ones(3)) and (got[0] + 1).is_meta


def test_sender_refuses_a_device_that_it_does_not_know() -> None:
    class Strange(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (3,), device="xla:0")

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    with pytest.raises(ValueError, match=r"tensor 1 .* on device xla:0 and not a CUDA .*\.cpu\(\)"):
        encode(torch.ones(1), Strange())


def test_sender_refuses_a_freed_storage() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="beyond the 0 bytes of its storage"):
        encode(tensor)


def test_sender_refuses_a_wrapper_subclass() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (3,))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    with pytest.raises(ValueError, match="tensor 0"):
        encode(Wrapper())


def test_expanded_so_far_that_its_bytes_overflow() -> None:
    wide = torch.zeros(4096)[:1].expand(1 << 62)
    (got,) = round_trip(wide)
    assert got.shape == wide.shape and got.stride() == (0,)
