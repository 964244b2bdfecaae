"""The codec with the options wire_dtype and integrity, and frames that lie about either."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from tests.support import native
from torch_rpc_ext._native import loader
from torch_rpc_ext.kernels import reference

wire = loader.load().wire

BFLOAT16, FLOAT16 = 1, 2  # csrc/wire/call_frame.h, WireDtype
TORCH = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
INLINE = 1 << 20
THRESHOLDS = pytest.mark.parametrize("threshold", [INLINE, 0, 300])

# Places in the frame, see csrc/wire/call_frame.h.
ANSWER_AT, FEATURES_AT, STORAGES_AT, RECORDS_AT = 6, 7, 32, 36
HEADER = 44
BULK_BIT, BESIDE_BIT = 1 << 63, 1 << 62
DTYPE_SHIFT = 56


def encode(
    *tensors: torch.Tensor, threshold: int = INLINE, dtype: int = 0, checked: bool = False
) -> tuple[bytes, list[bytes]]:
    return wire.encode_message(b"payload", list(tensors), 0x102, 42, threshold, dtype, checked)


def decode(head: bytes, bulk: list[bytes]) -> list[torch.Tensor]:
    return wire.decode_message(head, bulk)[1]


def size_of(head: bytes, bulk: list[bytes]) -> int:
    return len(head) + sum(map(len, bulk))


@DTYPES
@THRESHOLDS
@pytest.mark.parametrize("size", [1, 7, 100, 300_000])
def test_there_and_back(dtype: int, threshold: int, size: int) -> None:
    tensor = torch.randn(size)
    frame = encode(tensor, threshold=threshold, dtype=dtype)
    (got,) = decode(*frame)
    assert got.dtype == torch.float32
    assert torch.equal(got, tensor.to(TORCH[dtype]).float())
    assert size_of(*encode(tensor, threshold=threshold)) - size_of(*frame) == 2 * size
    got.resize_(2 * size)  # as every tensor that is received


def test_a_storage_may_become_small_enough_for_the_frame() -> None:
    head, bulk = encode(torch.randn(100), threshold=200, dtype=BFLOAT16)
    assert bulk == [] and decode(head, bulk)[0].shape == (100,)


@pytest.mark.parametrize("bytes_", [1, 2, 3, 5])
def test_a_storage_of_no_whole_floats_travels_as_it_is(bytes_: int) -> None:
    storage = torch.zeros(400 + bytes_, dtype=torch.uint8)
    tensor = storage[:400].view(torch.float32).fill_(1 / 3)
    (got,) = decode(*encode(tensor, dtype=BFLOAT16))
    assert torch.equal(got, tensor)


def test_the_callers_tensor_is_untouched() -> None:
    tensor = torch.randn(100)
    before = tensor.clone()
    for threshold in (0, INLINE):
        encode(tensor, threshold=threshold, dtype=FLOAT16)
    assert torch.equal(tensor, before)


def word_of(head: bytes, index: int = 0) -> int:
    return struct.unpack_from("<Q", head, HEADER + 8 * index)[0]


def with_word(head: bytes, word: int) -> bytes:
    return head[:HEADER] + struct.pack("<Q", word) + head[HEADER + 8 :]


def test_lies_about_the_dtype() -> None:
    head, bulk = encode(torch.randn(8), dtype=BFLOAT16)
    word = word_of(head)
    assert word >> DTYPE_SHIFT == BFLOAT16 and word & 0xFFFF == 16
    for text, wrong in (
        ("unknown dtype", word | 3 << DTYPE_SHIFT),
        ("a storage of 15 bytes", word - 1),
        ("exceeds the limit", (1 << 46) | BULK_BIT | BFLOAT16 << DTYPE_SHIFT),
        ("reaches over 8 elements", word & ~(3 << DTYPE_SHIFT)),
        ("reserved", word | 1 << 58),
    ):
        with pytest.raises(ValueError, match=text):
            decode(with_word(head, wrong), bulk)
    for at, value in ((ANSWER_AT, 4), (FEATURES_AT, 2)):
        with pytest.raises(ValueError, match="unknown|reserved"):
            decode(head[:at] + bytes([value]) + head[at + 1 :], bulk)


def test_memory_for_both_is_counted() -> None:
    """Twice as much is needed as the transport announces."""
    head, _ = encode(torch.empty(0))
    huge = 1 << 44
    word = huge | BULK_BIT | BFLOAT16 << DTYPE_SHIFT
    # Only the sizes are looked at: nothing of it can be sent in a test.
    with pytest.raises(ValueError, match="the bulk that the transport announces"):
        decode(with_word(head, word), [b"x"])


# ---- checksums -------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 65, 1000, 100_003])
def test_the_checksum_is_that_of_the_kernels(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    here = native.base.checksum(data.numpy())
    assert here == int(reference.checksum(data)) % (1 << 64)
    # At any alignment.
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert native.base.checksum(shifted.numpy()) == here


@THRESHOLDS
@pytest.mark.parametrize("dtype", [0, BFLOAT16])
def test_checked_frames(threshold: int, dtype: int) -> None:
    tensors = [torch.randn(100), torch.arange(5), torch.empty(0), torch.eye(4).to_sparse()]
    frame = encode(*tensors, threshold=threshold, dtype=dtype, checked=True)
    plain = encode(*tensors, threshold=threshold, dtype=dtype)
    assert len(frame[0]) == len(plain[0]) + 8 * (5 + 2)  # storages, payload, head
    for one, other in zip(decode(*frame), decode(*plain), strict=True):
        assert torch.equal(one.to_dense(), other.to_dense())


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("threshold", [INLINE, 100])
@pytest.mark.parametrize("dtype", [0, FLOAT16])
def test_every_changed_bit_is_noticed(threshold: int, dtype: int) -> None:
    """Also in sizes, strides, flags and ids; only who sent it and why are not looked at."""
    tensors = [torch.randn(40).view(8, 5).t(), torch.arange(3), torch.randn(4, requires_grad=True)]
    head, bulk = encode(*tensors, threshold=threshold, dtype=dtype, checked=True)
    accepted = []
    for bit in range(8 * len(head)):
        try:
            decode(flipped(head, bit), bulk)
        except ValueError:
            continue
        accepted.append(bit)
    assert accepted == []
    for i, data in enumerate(bulk):
        for bit in random.sample(range(8 * len(data)), 50):
            changed = [*bulk[:i], flipped(data, bit), *bulk[i + 1 :]]
            with pytest.raises(ValueError, match="tensor 0 of the message changed on its way"):
                decode(head, changed)


def test_what_changed_is_named() -> None:
    tensors = [torch.arange(4), torch.eye(3).to_sparse(), torch.ones(2, 2)]
    head, bulk = encode(*tensors, threshold=0, checked=True)
    assert bulk[0] == b"payload"
    names = ["the payload", "tensor 0", "tensor 1", "tensor 1", "tensor 2"]
    for i, name in enumerate(names):
        changed = [*bulk[:i], flipped(bulk[i], 0), *bulk[i + 1 :]]
        here, there = native.base.checksum(changed[i]), native.base.checksum(bulk[i])
        sums = f"0x{here:016x} here and had 0x{there:016x}"
        with pytest.raises(ValueError, match=f"{name} of the message .*{sums}"):
            decode(head, changed)


def beside(head: bytes, note: bytes, inline_bytes: int) -> bytes:
    """The same frame with its one storage beside it, for cuda:0, and a note."""
    head = with_word(head, word_of(head) | BESIDE_BIT | 1 << 48)
    payload = head[-inline_bytes - len(b"payload") : -inline_bytes]
    description = head[: -inline_bytes - len(payload) - 8]
    sums = [struct.pack("<Q", native.base.checksum(part)) for part in (description, note)]
    return description + sums[0] + payload + struct.pack("<Q", len(note)) + note + sums[1]


def test_the_note_of_what_is_beside_the_frame_is_checked() -> None:
    """Narrow storages may be there too. What is good is only refused for its device."""
    head, _ = encode(torch.randn(8), dtype=BFLOAT16, checked=True)
    good = beside(head, b"a note", 16)
    with pytest.raises(ValueError, match="meant for cuda:0, which RPC does not use here"):
        decode(good, [])
    for bit in range(8 * (len(good) - 14), 8 * len(good)):
        with pytest.raises(ValueError, match="its note changed on its way"):
            decode(flipped(good, bit), [])
    for size in range(1, 22):
        with pytest.raises(ValueError, match="cut off|truncated|bytes"):
            decode(good[:-size], [])


def test_swapped_bulk_is_noticed() -> None:
    head, bulk = encode(torch.zeros(10), torch.ones(10), threshold=8, checked=True)
    with pytest.raises(ValueError, match="tensor 0"):
        decode(head, bulk[::-1])
