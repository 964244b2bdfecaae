"""Sealed messages: changed, repeated, late and foreign ones are refused."""

from __future__ import annotations

import random

import pytest

from tests.support import native

SHARED = b"s" * 32
WINDOW = 4096


def channel(shared: bytes, opener: bool) -> native.transport.SecureChannel:
    return native.transport.SecureChannel(shared, opener)


def pair() -> tuple[native.transport.SecureChannel, native.transport.SecureChannel]:
    return channel(SHARED, True), channel(SHARED, False)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, 100_000])
def test_both_directions(size: int) -> None:
    text = random.Random(size).randbytes(size)
    one, other = pair()
    for sender, receiver in ((one, other), (other, one)):
        number, sealed = sender.seal(text)
        assert size < 16 or text not in sealed
        assert receiver.open(number, sealed) == text


def test_equal_texts_look_different() -> None:
    sender, _ = pair()
    assert sender.seal(b"x" * 100)[1] != sender.seal(b"x" * 100)[1]


def test_every_changed_bit_is_noticed() -> None:
    sender, receiver = pair()
    number, sealed = sender.seal(b"some text")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="changed"):
            receiver.open(number, bytes(changed))
    for length in range(len(sealed)):
        with pytest.raises(ValueError, match="changed|too short"):
            receiver.open(number, sealed[:length])
    with pytest.raises(ValueError, match="changed"):
        receiver.open(number + 1, sealed)
    # What was refused has used up nothing.
    assert receiver.open(number, sealed) == b"some text"


def test_a_second_time() -> None:
    sender, receiver = pair()
    sealed = [sender.seal(b"%d" % i) for i in range(10)]
    random.Random(1).shuffle(sealed)
    for number, data in sealed:
        receiver.open(number, data)
    for number, data in sealed:
        with pytest.raises(ValueError, match="second time"):
            receiver.open(number, data)


def test_too_late_to_tell() -> None:
    sender, receiver = pair()
    sealed = [sender.seal(b"") for _ in range(WINDOW + 2)]
    receiver.open(*sealed[-1])
    with pytest.raises(ValueError, match="second time"):
        receiver.open(*sealed[0])
    receiver.open(*sealed[2])  # still within the window
    with pytest.raises(ValueError, match="second time"):
        receiver.open(*sealed[2])


def test_back_to_the_sender_and_other_keys() -> None:
    sender, _ = pair()
    number, sealed = sender.seal(b"text")
    with pytest.raises(ValueError, match="changed"):
        sender.open(number, sealed)
    with pytest.raises(ValueError, match="changed"):
        channel(b"t" * 32, False).open(number, sealed)
