"""Operators of the dispatcher as remote functions: torch.ops.name.op, of C++ or torch.library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import autograd, rpc

from tests.process import functions as f
from tests.process import remote_functions
from tests.process.group import Group, workers
from tests.process.library_operators import call, define
from tests.support.backend import needs_ucx
from torch_rpc_ext import errors

pytestmark = needs_ucx("knows operators of aten only")
# Of C++: leaky_relu(Tensor self, float v=0.01) is one that torch has for its own tests.
torch_test: Any = torch.ops._test
ours: Any = torch.ops.torch_rpc_ext


@workers(2)
def test_values() -> None:
    assert call(ours.own_name) == "worker1"
    assert call(ours.own_name.default) == "worker1"
    assert call(ours.worker_ids) == [0, 1]
    assert call(ours.is_alive, worker="worker0") is True
    x = torch.tensor([-2.0, 4.0])
    assert torch.equal(call(torch_test.leaky_relu, x), torch.tensor([-0.02, 4.0]))
    assert torch.equal(call(torch_test.leaky_relu, x, v=0.5), torch.tensor([-1.0, 4.0]))
    futures = [rpc.rpc_async("worker1", torch_test.leaky_relu, args=(x, v)) for v in (0.5, 1.0)]
    assert [future.wait().tolist() for future in futures] == [[-1.0, 4.0], [-2.0, 4.0]]
    assert torch.equal(call(torch.ops.aten.add.Scalar, x, 1), x + 1)
    assert torch.equal(call(torch.ops.aten.neg, x), -x)


@workers(2)
def test_no_gil_is_needed() -> None:
    x = torch.ones(2)
    call(torch_test.leaky_relu, x)
    with remote_functions.gil_held("worker1"):
        needs_gil = rpc.rpc_async("worker1", f.identity, (1,))
        for _ in range(20):
            assert torch.equal(call(torch_test.leaky_relu, x), x)
            assert call(ours.own_name) == "worker1"
        assert not needs_gil.done(), "nobody held the GIL: this shows nothing"
    assert needs_gil.wait() == 1


@workers(2)
def test_operators_that_python_defines() -> None:
    define("double(Tensor x) -> Tensor")
    operator = torch.ops.tests_library.double
    with pytest.raises(RuntimeError, match=r"no operator tests_library::double\(Tensor x\)"):
        call(operator, torch.ones(2))
    rpc.rpc_sync("worker1", define, ("double(Tensor x) -> Tensor",))
    assert torch.equal(call(operator, torch.ones(2)), torch.full((2,), 2.0))


@workers(2)
def test_another_version_of_the_library_is_refused() -> None:
    define("double(Tensor x) -> Tensor")
    rpc.rpc_sync("worker1", define, ("double(Tensor x, int times=1) -> Tensor",))
    with pytest.raises(RuntimeError, match="in the same version"):
        call(torch.ops.tests_library.double, torch.ones(2))


@workers(2)
def test_mistakes() -> None:
    with pytest.raises(TypeError, match="no operator _test::leaky_relu takes these arguments"):
        call(torch_test.leaky_relu, "text")
    with pytest.raises(TypeError, match=r"returns one value: .*aten::sort"):
        call(torch.ops.aten.sort.default, torch.ones(2))
    with autograd.context():
        x = torch.ones(2)
        assert torch.equal(call(torch_test.leaky_relu, x), x)
        with pytest.raises(RuntimeError, match="none that requires a gradient"):
            call(torch_test.leaky_relu, x.requires_grad_())
    assert call(ours.own_name) == "worker1"


def call_what_is_listed_only() -> None:
    assert call(ours.own_name) == "worker1"
    with pytest.raises(errors.RefusedError, match="torch_rpc_ext::own_id"):
        call(ours.own_id)


def test_allow_list() -> None:
    options = [{}, {"allow_list": ["torch_rpc_ext::own_name"]}]
    with Group(2, options=options) as group:
        group.run(call_what_is_listed_only)
