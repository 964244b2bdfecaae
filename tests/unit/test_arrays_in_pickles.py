"""NumPy's arrays in the pickles of a peer, read with an allow-list."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np
import pytest

from torch_rpc_ext._security.allow_list import AllowList

_NAMES = ["numpy.ndarray", "numpy.dtype", f"{np.zeros(1).__reduce__()[0].__module__}._reconstruct"]


class Reduced:
    """Is pickled as what it is made with."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


def read(data: bytes, *entries: str) -> Any:
    return AllowList.of(entries, "worker1").unpickler(io.BytesIO(data)).load()


@pytest.mark.parametrize("entries", [(), _NAMES], ids=["nothing is listed", "NumPy is listed"])
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "value",
    [
        *(np.ones(3), np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        *(np.ones((2, 3, 4)).transpose(1, 0, 2), np.array(5), np.empty((0, 3)), np.ones(2, ">f4")),
        *(np.ones(2, bool), np.ones(2, "c8"), np.ones(2, "f2"), np.zeros(2, "V8")),
        *(np.array(["ab", "c"]), np.array([b"xyz"]), np.array(["2020-01-01"], "M8[25s]")),
        *(np.float64(1), np.bool_(True), np.longdouble(3), np.str_(""), np.void(b"abc")),
        *(np.datetime64("2020-01-01"), np.timedelta64(3)),
        *(np.dtype("f8"), np.dtype(">f4"), np.dtype("M8[ns]")),
    ],
    ids=repr,
)
def test_as_pickle_reads_them(value: Any, protocol: int, entries: list[str]) -> None:
    data = pickle.dumps(value, protocol)
    expected, found = pickle.loads(data), read(data, *entries)
    assert type(found) is type(expected)
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.strides == expected.strides
        assert found.flags.writeable == expected.flags.writeable


@pytest.mark.parametrize("entries", [(), _NAMES], ids=["nothing is listed", "NumPy is listed"])
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1, None], object), "of objects"),
        (np.dtype("O"), "of objects"),
        (np.zeros(1, [("a", "i4")]), "with fields"),
        (np.zeros(1, [("a", "O")]), "with fields|of objects"),
        (np.dtype([("a", "i4")]), "with fields"),
    ],
    ids=repr,
)
def test_what_is_refused(value: Any, words: str, protocol: int, entries: list[str]) -> None:
    with pytest.raises(ValueError, match=words):
        read(pickle.dumps(value, protocol), *entries)


def test_a_subclass() -> None:
    with pytest.raises(ValueError, match="a subclass of NumPy's ndarray cannot be sent"):
        read(pickle.dumps(np.ones((1, 1)).view(np.matrix)), "numpy.matrix")


_RECONSTRUCT, _ARGUMENTS, _STATE = np.ones(2).__reduce__()
_F8 = np.dtype("f8")


@pytest.mark.parametrize(
    "state",
    [
        (1, (3,), _F8, False, bytes(16)),
        (1, (2**62, 0), _F8, False, b""),
        (1, (2**61, 8), _F8, False, b""),
        (1, (-1, -2), _F8, False, bytes(16)),
        (1, (True, 2), _F8, False, bytes(16)),
        (1, [2], _F8, False, bytes(16)),
        (1, (1,) * 65, _F8, False, bytes(8)),
        (1, (2,), "f8", False, bytes(16)),
        (1, (2,), _F8, False, bytearray(16)),
        (1, (2,), _F8, False, [0, 0]),
        (1, (2,), _F8, False),
        (1, (1,), np.dtype("<U1"), False, b"\0\0\x11\0"),
        ((2,), _F8, False, bytes(16)),
        {"shape": (2,)},
        "text",
    ],
    ids=repr,
)
def test_a_state_that_is_none(state: Any) -> None:
    with pytest.raises(ValueError, match="not what a NumPy array"):
        read(pickle.dumps(Reduced(_RECONSTRUCT, _ARGUMENTS, state)))


def test_one_state_for_each_array() -> None:
    """A second state would free memory that a view may still use."""
    data = pickle.dumps(Reduced(_RECONSTRUCT, _ARGUMENTS, _STATE))
    again = data[data.index(b"(K\x01") : -1]  # the state, and the opcode that gives it
    with pytest.raises(Exception, match=r"a change of a numpy\.ndarray"):
        read(data[:-1] + again + b".")


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("f8", (3, "<", None, None, None, 1, 1, 0)),
        ("f8", (3, "<", None, None, None, -1, -1, 63)),  # 63: its elements are objects
        ("f8", (3, "<", None, ("a",), {"a": (np.dtype("i4"), 4)}, 8, 1, 0)),
        ("U3", (3, "<", None, None, None, 1 << 40, 4, 8)),
        ("V8", (3, "|", (np.dtype("i4"), (1 << 40,)), None, None, 8, 1, 0)),
        ("M8", (4, "<", None, None, None, -1, -1, 0, (None, (b"nsec", 1, 1, 1)))),
        ("M8", (4, "<", None, None, None, -1, -1, 0, (None, (b"ns", 0, 1, 1)))),
        ("M8", (4, "<", None, None, None, -1, -1, 0, (None, (b"ns", 1, 0, 1)))),
        ("M8", (4, "<", None, None, None, -1, -1, 0, None)),
        ("f8", (3, "<", None, None, None, -1, -1, False)),
        ("f8", "text"),
    ],
    ids=repr,
)
def test_a_state_of_no_dtype(name: str, state: Any) -> None:
    with pytest.raises(ValueError, match="not what a NumPy|with fields"):
        read(pickle.dumps(Reduced(np.dtype, (name, False, True), state)))
    assert np.array([1.0]).dtype == np.dtype("<f8")


_TEXT = Reduced(np.dtype, ("U1", False, True))
_LETTER = "a".encode("utf-32-le")  # no letter in the other order of bytes
_BUFFER = np.ones(1).__reduce_ex__(5)[0]


@pytest.mark.parametrize(
    "array",
    [
        Reduced(_RECONSTRUCT, _ARGUMENTS, (1, (1,), _TEXT, False, _LETTER)),
        Reduced(_BUFFER, (_LETTER, _TEXT, (1,), "C")),
    ],
    ids=["by its state", "by its bytes"],
)
def test_a_dtype_keeps_its_state_in_an_array(array: Any) -> None:
    """The bytes of a text are checked in the order that the dtype has then."""
    data = pickletools.optimize(pickle.dumps([array, _TEXT], 3))
    assert read(data)[0].tolist() == ["a"]
    swapped = pickletools.optimize(pickle.dumps((3, ">", None, None, None, 4, 4, 8), 3))
    with pytest.raises(Exception, match=r"a change of a numpy\.dtype"):
        read(data[:-2] + swapped[2:-1] + b"be.")


@pytest.mark.parametrize("name", ["O", "O8", "i4,f8", "(2,)f8", "f8\n", "float64", b"f8", "f٣"])
def test_a_text_of_no_dtype(name: Any) -> None:
    with pytest.raises(ValueError, match="NumPy"):
        read(pickle.dumps(Reduced(np.dtype, (name, False, True))))


def test_a_dtype_of_the_service_keeps_its_state() -> None:
    """NumPy has each dtype of numbers once: a state that a peer sets would be that of all."""
    data = pickle.dumps([np.dtype("f8"), np.dtype(">f8")])
    assert read(data) == [np.dtype("f8"), np.dtype(">f8")]
    assert np.dtype("f8").byteorder == "="
    assert np.dtype("f8").isnative


def test_bytes_of_a_scalar() -> None:
    scalar = np.float64(1).__reduce__()[0]
    with pytest.raises(ValueError, match="not what a NumPy"):
        read(pickle.dumps(Reduced(scalar, (_F8, bytes(4)))))
