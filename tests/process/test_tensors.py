"""Tensors of every kind arrive as they were sent: by value, and with their aliasing."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

REAL = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGER = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [*REAL, *INTEGER, *FLOAT8, *COMPLEX, torch.bool]


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, to compare dtypes that torch cannot compare."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy())


def echo(tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Send a tensor there and back; return it, and what the callee saw."""
    seen = rpc.rpc_sync("worker1", f.describe, args=(tensor,))
    return rpc.rpc_sync("worker1", f.identity, args=(tensor,)), seen


def check_echo(make: Callable[..., Tensor], *args: Any) -> None:
    sent = make(*args)
    back, seen = echo(sent)
    assert seen["dtype"] == sent.dtype and seen["shape"] == tuple(sent.shape), seen
    assert back.dtype == sent.dtype and back.shape == sent.shape
    assert back.requires_grad == sent.requires_grad == seen["requires_grad"]
    assert raw(back) == raw(sent)


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of random bit patterns, including NaNs; a bool is 0 or 1."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (4, 0, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_shape(pair: Group, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pair.run(check_echo, random_bits, dtype, *shape)


def conj_view() -> Tensor:
    tensor = torch.randn(4, 3, dtype=torch.complex64).conj()
    assert tensor.is_conj()
    return tensor


def neg_view() -> Tensor:
    tensor = torch.randn(4, dtype=torch.complex64).conj().imag
    assert tensor.is_neg()
    return tensor


def transposed() -> Tensor:
    return torch.randn(5, 7).t()


def every_second() -> Tensor:
    return torch.randn(10, 10)[::2, 1::3]


def expanded() -> Tensor:
    return torch.randn(1, 6).expand(4096, 6)


def channels_last() -> Tensor:
    return torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


def with_offset() -> Tensor:
    return torch.arange(1000.0)[990:]


def requires_grad() -> Tensor:
    return torch.randn(3, requires_grad=True)


KINDS = [conj_view, neg_view, transposed, every_second, expanded, channels_last, with_offset]


@pytest.mark.parametrize("kind", KINDS)
def test_view(pair: Group, kind: Callable[[], Tensor]) -> None:
    pair.run(check_echo, kind)


def check_requires_grad() -> None:
    sent = requires_grad()
    back, seen = echo(sent)
    assert seen["requires_grad"] and torch.equal(back, sent)


def test_requires_grad(pair: Group) -> None:
    pair.run(check_requires_grad)


def check_parameter() -> None:
    sent = torch.nn.Parameter(torch.randn(3))
    assert rpc.rpc_sync("worker1", f.describe, args=(sent,))["type"] == "Parameter"
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    seen = rpc.rpc_sync("worker1", f.describe, args=(frozen,))
    assert seen["type"] == "Parameter" and not seen["requires_grad"]


def test_parameter_arrives_as_parameter(pair: Group) -> None:
    pair.run(check_parameter)


def check_parameter_gradient() -> None:
    from torch.distributed import autograd

    weight = torch.nn.Parameter(torch.randn(3))
    with autograd.context() as context:
        product = rpc.rpc_sync("worker1", torch.mul, args=(weight, 3.0))
        via_python = rpc.rpc_sync("worker1", f.times, args=(weight, 2.0))
        autograd.backward(context, [product.sum() + via_python.sum()])
        gradients = autograd.get_gradients(context)
        assert torch.equal(gradients[weight], torch.full((3,), 5.0)), gradients


def attributes(parameter: Tensor) -> dict[str, Any]:
    return dict(vars(parameter))


def marked() -> Tensor:
    parameter = torch.nn.Parameter(torch.ones(3))
    vars(parameter).update(no_weight_decay=True, parts=[torch.ones(2)])
    return parameter


def check_attributes() -> None:
    for found in (
        rpc.rpc_sync("worker1", attributes, args=(marked(),)),
        vars(rpc.rpc_sync("worker1", marked)),
        vars(rpc.remote("worker1", marked).to_here()),
    ):
        assert found["no_weight_decay"] is True and found["parts"][0].tolist() == [1, 1]


def test_parameter_keeps_its_attributes(pair: Group) -> None:
    pair.run(check_attributes)


@needs_ucx("detaches nn.Parameter arguments (pytorch issue 86525)")
def test_parameter_gets_its_gradient(pair: Group) -> None:
    pair.run(check_parameter_gradient)


def check_sparse_argument(layout: str) -> None:
    for dense in (torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]]), torch.zeros(2, 3)):
        sent = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
        assert rpc.rpc_sync("worker1", f.describe, args=(sent,))["layout"] == sent.layout
        assert rpc.rpc_sync("worker1", f.to_dense, args=(sent,)).equal(dense)


def check_sparse_result(layout: str) -> None:
    for dense in (torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]]), torch.zeros(2, 3)):
        back = rpc.rpc_sync("worker1", f.to_sparse, args=(dense, layout))
        assert back.layout == (torch.sparse_coo if layout == "coo" else torch.sparse_csr)
        assert back.to_dense().equal(dense)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_argument(pair: Group, layout: str) -> None:
    pair.run(check_sparse_argument, layout)


@pytest.mark.parametrize(
    "layout", ["coo", pytest.param("csr", marks=needs_ucx("fails on a CSR result"))]
)
def test_sparse_result(pair: Group, layout: str) -> None:
    pair.run(check_sparse_result, layout)


def check_uncoalesced() -> None:
    sent = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,))
    back, _ = echo(sent)
    assert not back.is_coalesced() and back._nnz() == 2


def product(tensor: Tensor) -> Tensor:
    return (tensor @ torch.ones(3, 2)).sum()


def check_sparse_gradient(layout: str) -> None:
    dense = torch.eye(3)
    sent = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    sent.requires_grad_()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync("worker1", product, args=(sent,))])
        [gradient] = dist_autograd.get_gradients(context).values()
    assert gradient.to_dense().eq(2).all()


@needs_ucx("ends the process at a CSR tensor")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_argument_gets_its_gradient(pair: Group, layout: str) -> None:
    pair.run(check_sparse_gradient, layout)


def test_sparse_uncoalesced_stays_so(pair: Group) -> None:
    pair.run(check_uncoalesced)


def check_quantized(scheme: str) -> None:
    values = torch.randn(4, 3)
    if scheme == "tensor":
        sent = torch.quantize_per_tensor(values, 0.1, 5, torch.qint8)
    else:
        sent = torch.quantize_per_channel(
            values, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.arange(4), 0, torch.quint8
        )
    back = rpc.rpc_sync("worker1", f.identity, args=(sent,))
    assert back.dtype == sent.dtype and back.qscheme() == sent.qscheme()
    assert torch.equal(back.int_repr(), sent.int_repr())
    assert torch.equal(back.dequantize(), sent.dequantize())


@pytest.mark.parametrize("scheme", ["tensor", "channel"])
def test_quantized(pair: Group, scheme: str) -> None:
    pair.run(check_quantized, scheme)


def check_aliasing() -> None:
    base = torch.zeros(10)
    seen = rpc.rpc_sync("worker1", f.fill_first_look_at_second, args=(base[:5], base[3:], 7.0))
    assert seen.tolist() == [7.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0], seen
    apart = rpc.rpc_sync(
        "worker1", f.fill_first_look_at_second, args=(base[:5], base[3:].clone(), 7.0)
    )
    assert apart.sum() == 0
    back = rpc.rpc_sync("worker1", f.identity, args=([base, base.view(2, 5)],))
    back[0].fill_(2)
    assert back[1].eq(2).all(), "views of one storage in a result no longer share it"


def test_views_of_one_storage_still_share_it(pair: Group) -> None:
    pair.run(check_aliasing)


def check_memory_comes_back() -> None:
    array = np.ones(1 << 18, dtype=np.float32)
    held = weakref.ref(array)
    tensor = torch.from_numpy(array)
    del array
    assert rpc.rpc_sync("worker1", f.total, args=(tensor,)) == 1 << 18
    del tensor
    deadline = time.monotonic() + 30
    while held() is not None:
        assert time.monotonic() < deadline, "the argument is still held"
        time.sleep(0.01)


def test_memory_of_an_argument_comes_back_without_another_call(pair: Group) -> None:
    pair.run(check_memory_comes_back)


def check_memory_of_others(to: str) -> None:
    array = np.ones(1 << 23, dtype=np.float32)
    # As from_blob() without a deleter: a tensor that does not keep its memory.
    storage = torch._C._construct_storage_from_data_pointer(
        array.ctypes.data, torch.device("cpu"), array.nbytes
    )
    future = rpc.rpc_async(to, f.total, args=(torch.empty(0).set_(storage),))
    array.fill(0)  # its owner may use the memory for something else as soon as the call returns
    assert future.wait() == 1 << 23


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_memory_that_no_tensor_keeps_is_copied(pair: Group, to: str) -> None:
    pair.run(check_memory_of_others, to)


def check_by_value(to: str) -> None:
    sent = torch.ones(5)
    back = rpc.rpc_sync(to, f.fill, args=(sent, 9.0))
    assert sent.eq(1).all(), "the callee's in-place change is seen by the caller"
    back.fill_(3)
    assert sent.eq(1).all()


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_arguments_are_by_value(pair: Group, to: str) -> None:
    pair.run(check_by_value, to)


def check_structure() -> None:
    tensor = torch.arange(4.0)
    sent = {
        "a": [tensor, (tensor * 2, None)],
        5: {"b": {1, 2}, "c": b"bytes"},
        "d": "text \u00e9\u4e16\0",
    }
    back = rpc.rpc_sync("worker1", f.identity, args=(sent,), kwargs={})
    assert (
        back["a"][0].equal(tensor) and back["a"][1][0].equal(tensor * 2) and back["a"][1][1] is None
    )
    assert back[5] == sent[5] and back["d"] == sent["d"]


def test_nested_structure(pair: Group) -> None:
    pair.run(check_structure)


def check_empty() -> None:
    assert rpc.rpc_sync("worker1", f.nothing) is None
    assert rpc.rpc_sync("worker1", f.identity, args=([],)) == []
    assert rpc.rpc_sync("worker1", f.identity, args=(b"",)) == b""


def test_empty_payload(pair: Group) -> None:
    pair.run(check_empty)


def check_many(count: int) -> None:
    sent = [torch.full((1 + i % 3,), float(i)) for i in range(count)]
    back = rpc.rpc_sync("worker1", f.identity, args=(sent,))
    assert len(back) == count
    assert all(map(torch.equal, back, sent))


@pytest.mark.parametrize("count", [100, 10_000])
def test_many_tensors_in_one_message(pair: Group, count: int) -> None:
    pair.run(check_many, count)


def check_size(count: int) -> None:
    sent = torch.randint(0, 256, (count,), dtype=torch.uint8)
    for _ in range(2):  # the second time with warm buffers
        back = rpc.rpc_sync("worker1", f.identity, args=(sent,))
        assert torch.equal(back, sent)
    assert torch.equal(rpc.rpc_sync("worker1", torch.clone, args=(sent,)), sent)


# Sizes near the limits at which transports change their protocol, and far from them.
@pytest.mark.parametrize(
    "size", [1, 63, 64, 4095, 8191, 8192, 8193, 65_536, 65_537, 1 << 20, 4 << 20, (4 << 20) + 1]
)
def test_size(pair: Group, size: int) -> None:
    pair.run(check_size, size)


@pytest.mark.slow
def test_400_megabytes(pair: Group) -> None:
    pair.run(check_size, 400_000_000)


@pytest.mark.rare
@pytest.mark.timeout(300)
@workers(2, timeout=240)
def test_one_tensor_over_4_gigabytes() -> None:
    size = int(4.1 * (1 << 30))
    sent = torch.zeros(size, dtype=torch.uint8)
    sent[0], sent[1 << 32], sent[-1] = 1, 2, 4
    assert rpc.rpc_sync("worker1", f.total, args=(sent,), timeout=200) == 7.0
