"""RRefs are found in pickles without reading the pickles; hostile bytes do nothing."""

from __future__ import annotations

import collections
import pickle
import random
import threading
from typing import Any

import pytest
from torch.distributed.rpc import internal

from torch_rpc_ext._upstream.unread_rrefs import Fork, forks_in

FIRST: Fork = (1, 0, 3, 0, 4, 0, "Tensor")
# Ids above 31 bits, as those of a worker that has come back.
SECOND: Fork = (2, 1, 5 << 40, 1, 6 << 40, 1, "PyObject")


class PickledRRef:
    """Pickled as torch pickles an RRef."""

    def __init__(self, fork: Fork) -> None:
        self.fork = fork

    def __reduce__(self) -> Any:
        return internal._InternalRPCPickler._py_rref_receiver, (self.fork,)


def call_with(*args: Any) -> bytes:
    return pickle.dumps(internal.PythonUDF(print, args, {"key": args[0]}))


@pytest.mark.parametrize(
    "beside",
    [
        (),
        (b"x" * 1000, "y" * 1000, 1.5, -1, 1 << 80, None, True, ...),
        ({"a": [1, (2, {3})]}, frozenset({4}), collections.OrderedDict(b=5), range(6)),
        (threading.Thread, ValueError("text"), FIRST, ["_py_rref_receiver", "rref"]),
    ],
)
def test_rrefs_beside_other_arguments(beside: tuple[Any, ...]) -> None:
    first, second = PickledRRef(FIRST), PickledRRef(SECOND)
    assert forks_in(call_with(*beside, first, [*beside, {"deep": second}], first)) == [
        FIRST,
        SECOND,
    ]
    assert forks_in(call_with(beside)) == []


def test_a_pickle_of_torchs() -> None:
    numbers = b"".join(b"K%c" % number for number in FIRST[:6])
    text = b"X\x06\0\0\0Tensorq\1"
    rref = b"ctorch.distributed.rpc\nrref\nq\0(" + numbers + text + b"tR"
    again = b"h\0(" + numbers + b"h\1tR"
    assert forks_in(b"\x80\x02(" + rref + again + b"K\x07t.") == [FIRST, FIRST]


def test_damaged_pickles_end_quietly() -> None:
    whole = call_with(PickledRRef(FIRST), "x", PickledRRef(SECOND))
    for size in range(len(whole)):
        assert set(forks_in(whole[:size])) <= {FIRST, SECOND}
    draw = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        for fork in forks_in(bytes(damaged)):
            assert len(fork) == 7 and all(type(part) is int for part in fork[:6])


def test_what_a_pickle_names_is_not_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert forks_in(b"cbuiltins\nprint\n(X\x04\0\0\0rreftR.") == []
    assert capsys.readouterr().out == ""
    deep = b"\x80\x04\x8c\x04rref" + b"\x85" * 1_000_000 + b"."
    assert forks_in(deep) == []
    rref = call_with(PickledRRef(FIRST))[2:]
    assert forks_in(b"\x80\x04" + rref) == [FIRST]
    assert forks_in(b"\x80\x04Vtext\n" + rref) == []  # an opcode that no worker writes
    assert forks_in(b"\x80\x04\x8c\x04rrefr\xff\xff\xff\x7f.") == []  # a large number of a memo
