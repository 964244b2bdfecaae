"""The codec: bytes that lie."""

from __future__ import annotations

import random
import struct
import time
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.test_wire import (
    BULK,
    INLINE,
    composite_cases,
    decode,
    encode,
    raw,
    wire,
)
from torch_rpc_ext._native import loader

VERSION = loader.load().WIRE_VERSION

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*"),
    pytest.mark.timeout(120),
]

# Places in the frame, see csrc/wire/call_frame.h.
VERSION_AT, KIND_AT, TYPE_AT, FEATURES_AT = 2, 3, 4, 7
TENSORS_AT, PAYLOAD_AT, STORAGES_AT, RECORDS_AT, TIMEOUT_AT = 12, 24, 32, 36, 40
HEADER = 44
BULK_BIT, BESIDE_BIT = 1 << 63, 1 << 62
PLACE_SHIFT = 48


def sample(threshold: int = INLINE) -> tuple[bytes, list[bytes]]:
    base = torch.arange(24, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        composite = [
            make()
            for name, make in composite_cases().items()
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


@pytest.mark.timeout(1200)  # thousands of messages, on a machine that may be loaded
@pytest.mark.parametrize(
    "threshold, step",
    # Most bits of a frame that contains the values are those of values, which mean nothing to the
    # codec: one bit in seven is flipped there. Each bit that describes a tensor is in the other.
    [(INLINE, 7), (BULK, 1)],
)
def test_every_bit(threshold: int, step: int) -> None:
    head, bulk = sample(threshold)
    for bit in range(0, len(head) * 8, step):
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


def test_so_many_indices_that_their_bytes_overflow() -> None:
    """2**61 numbers of 8 bytes would take 2**64 bytes, which is 0 for a computer."""
    count, claimed = 7919, 1 << 61
    # A value of one byte, so that the values alone may be so many.
    sparse = torch.sparse_coo_tensor(
        torch.zeros(1, count, dtype=torch.long), torch.ones(count, dtype=torch.uint8), (9,)
    )
    head, bulk = encode(sparse)
    for at in range(len(head) - 16):
        size, stride = struct.unpack_from("<qq", head, at)
        if size == count and stride in (0, 1):
            head = patched(patched(head, at, "<q", claimed), at + 8, "<q", 0)
    with pytest.raises(ValueError, match="more indices than it has brought"):
        decode(head, bulk)


AUTOGRAD, PROFILED, CALL = 0x10F, 0x115, 0x102
AUTOGRAD_ANSWER, ANSWER = 0x210, 0x203


def wrapped(payload: bytes, kind: int, begin: bytes = b"\x80\x02(M") -> bytes:
    """A payload as torch wraps it: the payload, a pickle with its message's type, its size."""
    added = begin + struct.pack("<H", kind) + b"t."
    return payload + added + struct.pack(">Q", len(added))


def decode_message(payload: bytes, kind: int) -> None:
    wire.decode_message(*wire.encode_message(payload, [], kind, 42, INLINE))


def test_wrapped_messages() -> None:
    """Autograd wraps a call, and a profiler wraps that."""
    decode_message(wrapped(b"x", CALL), AUTOGRAD)
    decode_message(wrapped(wrapped(b"x", CALL), AUTOGRAD), PROFILED)
    decode_message(wrapped(b"x", CALL, b"\x80\x02M"), PROFILED)  # a tuple of up to three
    decode_message(wrapped(b"x", ANSWER), AUTOGRAD_ANSWER)


@pytest.mark.parametrize("levels", [3, 10_000])
@pytest.mark.parametrize("kind", [AUTOGRAD, PROFILED, AUTOGRAD_ANSWER])
def test_messages_in_each_other(kind: int, levels: int) -> None:
    """torch unwraps them by recursion."""
    payload = b"x"
    for _ in range(levels):
        payload = wrapped(payload, kind)
    with pytest.raises(ValueError, match="in a way that torch does not use"):
        decode_message(payload, kind)


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"x", b"\0" * 8, b"x" + struct.pack(">Q", 2), b"x" + struct.pack(">Q", 1 << 63)),
        wrapped(b"x", CALL, b"\x80\x02(J\0\0"),  # a type in four bytes
        wrapped(b"x", CALL, b"\x80\x04(M"),
    ],
)
def test_what_is_inside_cannot_be_told(payload: bytes) -> None:
    with pytest.raises(ValueError, match="in a way that torch does not use"):
        decode_message(payload, AUTOGRAD)


def test_repeated_indices_of_the_user() -> None:
    indices = torch.zeros(1, 1, dtype=torch.long).expand(1, 5)
    sparse = torch.sparse_coo_tensor(indices, torch.arange(5.0), (3,), is_coalesced=False)
    (got,) = decode(*encode(sparse))
    assert torch.equal(got.to_dense(), sparse.to_dense())


def test_wrong_version_names_both() -> None:
    head, bulk = sample()
    with pytest.raises(ValueError, match=f"version {VERSION + 1} .* version {VERSION}$"):
        decode(patched(head, VERSION_AT, "<B", VERSION + 1), bulk)


@pytest.mark.parametrize("threshold", [INLINE, BULK])
@pytest.mark.parametrize(
    ("bits", "error"),
    [
        (1 << PLACE_SHIFT, "meant for cuda:0, which RPC does not use here"),
        (0xFE << PLACE_SHIFT, "meant for cuda:127, which RPC does not use here"),
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


META = 255


def test_meta_storages_that_lie() -> None:
    head, _ = encode(torch.empty(5, device="meta"), torch.ones(2), payload=b"")
    (word,) = struct.unpack_from("<Q", head, HEADER)
    assert word == META << PLACE_SHIFT | 20
    for bits in (BULK_BIT, BESIDE_BIT, 1 << 56):
        with pytest.raises(ValueError, match="bytes of a storage of the meta device travel"):
            decode(patched(head, HEADER, "<Q", word | bits), [])
    with pytest.raises(ValueError, match="reaches over 5 elements of Float in a storage of 19"):
        decode(patched(head, HEADER, "<Q", word - 1), [])
    with pytest.raises(ValueError, match="end before the frame"):
        decode(patched(head, HEADER, "<Q", 20), [])  # of the CPU: bytes that are not there
    with pytest.raises(ValueError, match="left over"):
        decode(patched(head, HEADER + 8, "<Q", META << PLACE_SHIFT | 8), [])


def test_sizes_whose_sum_overflows() -> None:
    """Storages of 2^64 bytes in all: as a sum in 64 bits, that is 0. The last one, for a device,
    makes the receiver keep a place for each storage."""
    head, _ = encode(torch.ones(()), payload=b"")
    sizes = [1 << 46] * (1 << 18) + [1 << PLACE_SHIFT]
    table = struct.pack(f"<{len(sizes)}Q", *sizes)
    lie = patched(head, STORAGES_AT, "<I", len(sizes))
    with pytest.raises(ValueError, match="exceeds the limit"):
        decode(lie[:HEADER] + table + lie[HEADER + 8 : -4], [])


@pytest.mark.parametrize("name", ["coo", "csr", "quint8"])
def test_parts_are_not_of_the_meta_device(name: str) -> None:
    head, _ = encode(composite_cases()[name](), payload=b"")
    (storages,) = struct.unpack_from("<I", head, STORAGES_AT)
    for number in range(storages):
        (word,) = struct.unpack_from("<Q", head, HEADER + 8 * number)
        changed = patched(head, HEADER + 8 * number, "<Q", word | META << PLACE_SHIFT)
        # Its bytes, which do not travel then, are cut out of those of all, which end the frame.
        sizes = [struct.unpack_from("<Q", head, HEADER + 8 * each)[0] for each in range(storages)]
        begin = len(head) - sum(sizes[number:])
        with pytest.raises(ValueError, match="meta device|not for the CPU"):
            decode(changed[:begin] + changed[begin + word :], [])


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
        (4, "<I", 1, "a tensor names storage 1 of 1"),
        (4, "<I", 0xFFFFFFFF, "a tensor names storage 4294967295 of 1"),
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


def test_a_response_with_a_timeout() -> None:
    head, bulk = encode(torch.ones(2))
    timed = patched(head, TIMEOUT_AT, "<I", 60_000)
    assert decode(timed, bulk)[0].tolist() == [1, 1]
    assert decode(patched(head, KIND_AT, "<B", 1), bulk)[0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="a response has a time-out"):
        decode(patched(timed, KIND_AT, "<B", 1), bulk)
