"""The codec: every kind of tensor there and back, and bytes that lie."""

from __future__ import annotations

import gc
import random
import struct
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_rpc_ext import _native

wire = _native.load().wire
VERSION = _native.load().WIRE_VERSION

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*"),
    pytest.mark.timeout(120),
]

INLINE = 1 << 20
BULK = 0
THRESHOLDS = pytest.mark.parametrize("threshold", [INLINE, BULK, 64])

# Places in the frame, see csrc/wire/call_frame.h.
VERSION_AT, KIND_AT, TYPE_AT, FEATURES_AT = 2, 3, 4, 7
TENSORS_AT, PAYLOAD_AT, STORAGES_AT, RECORDS_AT = 12, 24, 32, 36
HEADER = 40
BULK_BIT, BESIDE_BIT = 1 << 63, 1 << 62
PLACE_SHIFT = 48

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


def _composite_cases() -> dict[str, Callable[[], torch.Tensor]]:
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
@pytest.mark.parametrize("name", list(_composite_cases()))
def test_composite(name: str, threshold: int) -> None:
    want = _composite_cases()[name]()
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
    cases = [make() for make in _composite_cases().values()]
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
    meta = torch.empty(3, device="meta")
    with pytest.raises(ValueError, match=r"tensor 1 .*device meta.*\.cpu\(\)"):
        encode(torch.ones(1), meta)
    with pytest.raises(ValueError, match="nested"):
        encode(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with pytest.raises(ValueError, match="65 exceeds the limit of 64"):
        encode(torch.ones([1] * 65))
    with pytest.raises(ValueError, match="cannot be sent"):
        encode(torch.ones(3).to_mkldnn())


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


# Bytes that lie.


def sample(threshold: int = INLINE) -> tuple[bytes, list[bytes]]:
    base = torch.arange(24, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        composite = [
            make()
            for name, make in _composite_cases().items()
            if name in ("coo", "csr", "bsr", "quint8", "per_channel")
        ]
    return encode(
        base.view(2, 3, 4),
        base[3:].requires_grad_(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.int64),
        torch.randn(1).expand(5),
        torch.empty(0),
        *composite,
        threshold=threshold,
    )


def use(tensors: list[torch.Tensor | None]) -> None:
    """Touches every byte that the tensors claim to have."""
    for tensor in tensors:
        # None is a tensor without a value. Expanded to more than memory is
        # legal, only not to be copied.
        if tensor is None or tensor.numel() > 1 << 16:
            continue
        if tensor.is_quantized:
            tensor.dequantize()
        elif tensor.layout == torch.sparse_coo:
            tensor.coalesce().to_dense()
        elif tensor.layout != torch.strided:
            tensor.to_dense()
        else:
            raw(tensor.resolve_conj().resolve_neg().clone())


def attack(head: bytes, bulk: list[bytes]) -> bool:
    """True if the bytes were accepted; anything but ValueError fails."""
    try:
        tensors = decode(head, bulk)
    except ValueError:
        return False
    try:
        use(tensors)
    except (RuntimeError, NotImplementedError, IndexError):
        pass  # torch lacks the operator for what this frame has become
    return True


@pytest.mark.parametrize("threshold", [INLINE, BULK])
def test_every_truncation(threshold: int) -> None:
    head, bulk = sample(threshold)
    assert attack(head, bulk)
    for size in range(len(head)):
        with pytest.raises(ValueError):
            decode(head[:size], bulk)
    with pytest.raises(ValueError, match="left over"):
        decode(head + b"x", bulk)


@pytest.mark.timeout(400)  # thousands of messages, on a machine that may be loaded
@pytest.mark.parametrize("threshold", [INLINE, BULK])
def test_every_bit(threshold: int) -> None:
    head, bulk = sample(threshold)
    for bit in range(len(head) * 8):
        flipped = bytearray(head)
        flipped[bit // 8] ^= 1 << (bit % 8)
        attack(bytes(flipped), bulk)


@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    flips=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=12),
    threshold=st.sampled_from([INLINE, BULK]),
)
def test_bit_flips(flips: list[int], threshold: int) -> None:
    head, bulk = sample(threshold)
    flipped = bytearray(head)
    for flip in flips:
        bit = flip % (len(head) * 8)
        flipped[bit // 8] ^= 1 << (bit % 8)
    attack(bytes(flipped), bulk)


@settings(max_examples=300, deadline=None)
@given(
    at=st.integers(0, 1 << 16),
    value=st.sampled_from(
        [
            0,
            1,
            2,
            0x7FFFFFFF,
            0xFFFFFFFF,
            1 << 31,
            1 << 40,
            1 << 46,
            1 << 56,
            1 << 62,
            (1 << 63) - 1,
            1 << 63,
            (1 << 64) - 1,
            BULK_BIT | 1,
        ]
    ),
    width=st.sampled_from([1, 2, 4, 8]),
)
def test_extreme_numbers(at: int, value: int, width: int) -> None:
    head, bulk = sample()
    at %= len(head) - 8
    number = value.to_bytes(8, "little")[:width]
    attack(head[:at] + number + head[at + width :], bulk)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(noise: bytes) -> None:
    attack(noise, [])
    attack(b"TR" + bytes([VERSION]) + noise, [])


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_hostile_indices_of_sparse_tensors(seed: int) -> None:
    """The metadata is right, the indices and scales are noise."""
    head, bulk = sample(BULK)
    rng = random.Random(seed)
    attack(head, [rng.randbytes(len(b)) for b in bulk])


def patched(head: bytes, at: int, fmt: str, value: int) -> bytes:
    return head[:at] + struct.pack(fmt, value) + head[at + struct.calcsize(fmt) :]


def test_a_few_bytes_that_claim_many_indices() -> None:
    """With strides of 0 they would fit; torch would look at each of them, for an hour."""
    count, claimed = 7919, 1 << 40
    sparse = torch.sparse_coo_tensor(
        torch.zeros(1, count, dtype=torch.long), torch.ones(count), (9,)
    )
    head, bulk = encode(sparse)
    for at in range(len(head) - 16):
        size, stride = struct.unpack_from("<qq", head, at)
        if size == count and stride in (0, 1):
            head = patched(patched(head, at, "<q", claimed), at + 8, "<q", 0)
    start = time.monotonic()
    with pytest.raises(ValueError, match="more indices than it has brought"):
        decode(head, bulk)
    assert time.monotonic() - start < 60


def test_repeated_indices_of_the_user() -> None:
    indices = torch.zeros(1, 1, dtype=torch.long).expand(1, 5)
    sparse = torch.sparse_coo_tensor(indices, torch.arange(5.0), (3,), is_coalesced=False)
    (got,) = decode(*encode(sparse))
    assert torch.equal(got.to_dense(), sparse.to_dense())


def test_wrong_version_names_both() -> None:
    head, bulk = sample()
    with pytest.raises(ValueError, match=f"version 9 .* this worker version {VERSION}"):
        decode(patched(head, VERSION_AT, "<B", 9), bulk)


@pytest.mark.parametrize("threshold", [INLINE, BULK])
@pytest.mark.parametrize(
    ("bits", "error"),
    [
        (1 << PLACE_SHIFT, "meant for cuda:0, which RPC does not use here"),
        (0xFF << PLACE_SHIFT, "meant for cuda:127, which RPC does not use here"),
        (BESIDE_BIT, "for the CPU travels beside|contradictory"),
        (BESIDE_BIT | BULK_BIT | 1 << PLACE_SHIFT, "contradictory"),
        (1 << 47, "contradictory"),
        (1 << 58, "contradictory"),
    ],
)
def test_wrong_places(bits: int, error: str, threshold: int) -> None:
    head, bulk = encode(torch.ones(4), payload=b"", threshold=threshold)
    word = struct.unpack_from("<Q", head, HEADER)[0] | bits
    with pytest.raises(ValueError, match=error):
        decode(patched(head, HEADER, "<Q", word), bulk)


def test_tensors_beside_a_frame_that_comes_from_elsewhere() -> None:
    head, _ = encode(torch.ones(4), payload=b"")
    word = struct.unpack_from("<Q", head, HEADER)[0] | BESIDE_BIT | 1 << PLACE_SHIFT
    besides = patched(head, HEADER, "<Q", word)[:-16]
    for note in (b"", b"note"):
        with pytest.raises(ValueError, match="does not use here"):
            decode(besides + struct.pack("<Q", len(note)) + note, [])
    with pytest.raises(ValueError, match="end before the frame does"):
        decode(besides + struct.pack("<Q", 5) + b"note", [])
    with pytest.raises(ValueError, match="note size 134217729 exceeds"):
        decode(besides + struct.pack("<Q", (1 << 27) + 1), [])


def test_wrong_magic_kind_and_reserved() -> None:
    head, bulk = sample()
    with pytest.raises(ValueError, match="magic"):
        decode(b"XX" + head[2:], bulk)
    for at in (KIND_AT, FEATURES_AT):
        with pytest.raises(ValueError, match="unknown kind or reserved"):
            decode(patched(head, at, "<B", 2), bulk)


@pytest.mark.parametrize("at", [TENSORS_AT, STORAGES_AT, RECORDS_AT])
@pytest.mark.parametrize("count", [0, 1000, 1 << 20, (1 << 20) + 1, 0xFFFFFFFF])
def test_wrong_counts(at: int, count: int) -> None:
    head, bulk = sample()
    with pytest.raises(ValueError):
        decode(patched(head, at, "<I", count), bulk)


@pytest.mark.parametrize("size", [1, 1 << 30, (1 << 40) + 1, (1 << 63) - 1, BULK_BIT | (1 << 39)])
def test_wrong_payload_size(size: int) -> None:
    head, bulk = sample()
    with pytest.raises(ValueError):
        decode(patched(head, PAYLOAD_AT, "<Q", size), bulk)


def one_tensor(threshold: int = INLINE) -> tuple[bytes, list[bytes], int]:
    """A frame with one tensor of 2 by 3 floats, and where its record is."""
    head, bulk = encode(torch.ones(2, 3), payload=b"", threshold=threshold)
    return head, bulk, HEADER + 8


@pytest.mark.parametrize(
    ("field", "fmt", "value", "message"),
    [
        (0, "<B", 8, "unknown tensor layout"),
        (0, "<B", 2, "do not match"),
        (1, "<B", 255, "unknown dtype"),
        (1, "<B", 12, "unknown dtype"),  # qint8 without a scale
        (1, "<B", 7, "reaches over 6 elements of Double"),
        (2, "<B", 2, "not complex"),
        (3, "<B", 255, "end before|exceeds the limit"),
        (3, "<B", 3, "end before|overflow"),
        (4, "<I", 1, "storage 1 of 1"),
        (4, "<I", 0xFFFFFFFF, "storage 4294967295 of 1"),
        (8, "<q", 1, "reaches over 7 elements"),
        (8, "<q", -1, "negative"),
        (8, "<q", (1 << 63) - 1, "overflow"),
        (16, "<q", -2, "negative"),
        (16, "<q", 3, "reaches over 9 elements"),
        (16, "<q", (1 << 63) - 1, "overflow"),
        (24, "<q", -3, "negative"),
        (24, "<q", 4, "reaches over 7 elements"),
        (24, "<q", 1 << 62, "reaches over"),
        (24, "<q", (1 << 63) - 1, "overflow"),
    ],
)
@pytest.mark.parametrize("threshold", [INLINE, BULK])
def test_lying_record(field: int, fmt: str, value: int, message: str, threshold: int) -> None:
    head, bulk, record = one_tensor(threshold)
    with pytest.raises(ValueError, match=message):
        decode(patched(head, record + field, fmt, value), bulk)


def test_requires_grad_on_integers() -> None:
    head, bulk = encode(torch.ones(2, dtype=torch.int64), payload=b"")
    with pytest.raises(ValueError, match="requires grad and is not floating"):
        decode(patched(head, HEADER + 8 + 2, "<B", 1), bulk)


def test_bulk_must_match() -> None:
    head, bulk, _ = one_tensor(BULK)
    for wrong in ([], bulk + [b""], [bulk[0][:-1]], [bulk[0] + b"x"]):
        with pytest.raises(ValueError, match="bulk"):
            decode(head, wrong)
    inline, _, _ = one_tensor()
    with pytest.raises(ValueError, match="bulk"):
        decode(inline, bulk)


def test_sparse_index_beyond_the_sizes() -> None:
    coo = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,))
    head, bulk = encode(coo, payload=b"", threshold=BULK)
    for index in (3, -1, 1 << 40):
        with pytest.raises(ValueError, match="index"):
            decode(head, [struct.pack("<qq", 0, index), *bulk[1:]])
    csr = torch.eye(3).to_sparse_csr()
    head, bulk = encode(csr, payload=b"", threshold=BULK)
    with pytest.raises(ValueError):
        decode(head, [bulk[0], struct.pack("<qqq", 0, 1, 9), bulk[2]])
