"""Values of RRefs for which torch's own code would end the process are passed on as Python objects,
or refused with a TypeError; the worker lives on."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

from tests.process.group import Group
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("crashes, or raises std::bad_alloc")


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.Enum):
    RED = 1


class Plain:
    def __init__(self) -> None:
        self.number = 3


@torch.jit.script
def script_pair(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, 3


@torch.jit.script
def script_any(value: Any) -> int:
    return 1


@torch.jit.script
def script_rref(value: torch.distributed.rpc.RRef[tuple[int, int]]) -> int:  # type: ignore[name-defined]
    return 1


def contains_itself() -> list[list[Any]]:
    """Values that contain themselves, each in a list, because such a value cannot be compared."""
    in_list: list[Any] = [1]
    in_list.append(in_list)
    in_dict: dict[str, Any] = {}
    in_dict["a"] = ({"b": in_dict},)
    in_tuple: tuple[Any, ...] = ([],)
    in_tuple[0].append(in_tuple)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return [[in_list], [in_dict], [in_tuple], [deep]]


TUPLES = [
    (),
    ((),),
    (None,),
    (True, 1, "a", 2.5),
    (1, (2, (3, ("a", [1.0])))),
    ([], {}),
    ([1, "a"], {1}),
    (b"a", torch.float32, ...),
    torch.Size([2]),
    Colour.RED,
    (Colour.RED,),
    [Colour.RED],
]


def look(rref: Any) -> Any:
    return rref.to_here()


def pass_on(rref: Any, to: str) -> Any:
    return rpc.rpc_sync(to, look, args=(rref,))


def make(value: Any) -> Any:
    return rpc.RRef(value)


def make_one_that_contains_itself() -> None:
    rpc.RRef(contains_itself()[0][0])


def tuples() -> None:
    for value in TUPLES:
        mine = rpc.RRef(value)
        assert mine.local_value() == value, value
        assert rpc.rpc_sync("worker1", look, args=(mine,)) == value
        assert rpc.rpc_sync("worker1", pass_on, args=(mine, "worker0")) == value
        assert mine.to_here() == value
        theirs = rpc.rpc_sync("worker1", make, args=(value,))
        assert theirs.to_here() == value
        assert rpc.rpc_sync("worker1", look, args=(theirs,)) == value
        assert rpc.rpc_sync("worker0", look, args=(rpc.RRef(value),)) == value
    assert rpc.rpc_sync("worker1", look, args=(rpc.RRef(Point(1, 2)),)) == (1, 2)
    tensors = rpc.rpc_sync("worker1", look, args=(rpc.RRef((torch.ones(2),)),))
    assert type(tensors) is tuple and torch.equal(tensors[0], torch.ones(2))
    (plain,) = rpc.rpc_sync("worker1", look, args=(rpc.RRef((Plain(),)),))
    assert plain.number == 3


def test_tuples_and_enums_can_be_passed_on() -> None:
    with Group(2) as group:
        group.run(tuples)


def refusals() -> None:
    for (value,) in contains_itself():
        with pytest.raises(TypeError, match="contains itself, or nests deeper than 1000 levels"):
            rpc.RRef(value)
        with pytest.raises(TypeError, match="an argument of a TorchScript function contains itsel"):
            rpc.rpc_sync("worker1", script_any, args=(value,))
        with pytest.raises(TypeError, match="an argument of a TorchScript function contains itsel"):
            rpc.remote("worker1", script_any, kwargs={"value": value})
    with pytest.raises(TypeError, match="the value of an RRef contains itself"):
        rpc.rpc_sync("worker1", make_one_that_contains_itself)
    pair = rpc.remote("worker1", script_pair, args=(torch.ones(1),))
    with pytest.raises(
        TypeError, match=r"an RRef to a Tuple\[Tensor, int\], which remote\(\) made"
    ):
        rpc.rpc_sync("worker1", look, args=(pair,))
    assert pair.to_here()[1] == 3
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(TypeError, match=r"holds an RRef to a Tuple\[int, int\]"):
            call("worker1", script_rref, args=(rpc.RRef((1, 2)),))
    assert rpc.rpc_sync("worker1", look, args=(rpc.RRef([1, 2]),)) == [1, 2]


def test_what_torch_would_crash_at_is_refused() -> None:
    with Group(2) as group:
        group.run(refusals)


def test_upstreams_class_comes_back() -> None:
    with Group(1) as group:
        assert group.run(has_init)
        group.run(shutdown)
        assert not group.run(has_init)


def has_init() -> bool:
    return "__init__" in vars(rpc.RRef)


def shutdown() -> None:
    rpc.shutdown()
