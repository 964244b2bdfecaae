"""float32 tensors that travel as bfloat16 or float16: chosen for a worker or for a call, in
requests and in answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc

from tests.process.group import Group
from tests.support.backend import needs_ucx
from torch_rpc_ext import wire_dtype

pytestmark = needs_ucx("the option is ours")

BF16, F16 = torch.bfloat16, torch.float16
#: Sizes of tensors: one travels inside the frame, one travels as bulk.
SIZES = pytest.mark.parametrize("size", [100, 1_000_000])


@pytest.fixture(scope="module")
def unequal() -> Iterator[Group]:
    """A group in which only worker0 has the option, and only for worker1."""
    with Group(3, options=[{"wire_dtype": {"worker1": BF16}}, {}, {}]) as group:
        yield group


@pytest.fixture(scope="module")
def equal() -> Iterator[Group]:
    """A group in which both workers have the option, for all others."""
    with Group(2, options={"wire_dtype": BF16}) as group:
        yield group


# ---- what callees run --------------------------------------------------------


def floats(size: int) -> Tensor:
    """Numbers that neither of the narrow dtypes represents exactly."""
    return torch.linspace(-3, 3, size) + 1e-4


def as_arrived(tensor: Tensor) -> Tensor:
    """The argument in a form that the option does not change."""
    assert tensor.dtype == torch.float32
    return tensor.double()


def echo(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


def call_back(to: str, size: int) -> Tensor:
    return rpc.rpc_sync(to, as_arrived, args=(floats(size),))


# ---- bodies, on worker0 unless said otherwise --------------------------------


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).float()


def request(to: str, size: int) -> Tensor:
    return rpc.rpc_sync(to, as_arrived, args=(floats(size),)).float()


def answer(to: str, size: int) -> Tensor:
    return rpc.rpc_sync(to, floats, args=(size,))


@SIZES
def test_by_worker(unequal: Group, size: int) -> None:
    kept, narrow = floats(size), rounded(floats(size), BF16)
    assert not torch.equal(kept, narrow)
    assert torch.equal(unequal.run(request, "worker1", size), narrow)
    assert torch.equal(unequal.run(request, "worker2", size), kept)
    # Answers from worker0 to worker1 are narrowed; those from worker1 to worker0 are not.
    assert torch.equal(unequal[1].run(answer, "worker0", size), narrow)
    assert torch.equal(unequal.run(answer, "worker1", size), kept)
    assert torch.equal(unequal[1].run(request, "worker0", size), kept)


def narrow_calls(size: int) -> None:
    kept = floats(size)
    with wire_dtype(F16):
        assert torch.equal(request("worker1", size), rounded(kept, F16))
        assert torch.equal(answer("worker2", size), rounded(kept, F16))
        with wire_dtype(None):
            assert torch.equal(request("worker1", size), kept)
            assert torch.equal(answer("worker1", size), kept)
        later = rpc.rpc_async("worker2", floats, args=(size,))
        rref = rpc.remote("worker2", floats, args=(size,))
        assert torch.equal(rref.to_here(), rounded(kept, F16))
        # Nested calls go by the options of the callee.
        assert torch.equal(rpc.rpc_sync("worker2", call_back, args=("worker1", size)).float(), kept)
    assert torch.equal(later.wait(), rounded(kept, F16))
    assert torch.equal(rref.to_here(), kept)
    assert torch.equal(request("worker1", size), rounded(kept, BF16))


@SIZES
def test_by_call(unequal: Group, size: int) -> None:
    unequal.run(narrow_calls, size)


def of_this_thread_only() -> None:
    found = []
    with pytest.raises(ZeroDivisionError), wire_dtype(F16):
        thread = threading.Thread(target=lambda: found.append(answer("worker2", 100)))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    found.append(answer("worker2", 100))
    assert all(torch.equal(each, floats(100)) for each in found) and len(found) == 2


def test_the_block_is_of_a_thread_and_ends_with_an_error(unequal: Group) -> None:
    unequal.run(of_this_thread_only)


def wrong_dtypes() -> None:
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*got torch\.float64"):
        with wire_dtype(torch.float64):
            pass
    with pytest.raises(TypeError, match="'bfloat16'"):
        with wire_dtype("bfloat16"):  # type: ignore[arg-type]
            pass
    assert torch.equal(answer("worker2", 100), floats(100))


def test_wrong_dtypes(unequal: Group) -> None:
    unequal.run(wrong_dtypes)


def traffic(of: Callable[[], object]) -> tuple[int, int]:
    def counters() -> tuple[int, int]:
        metrics = rpc.api._get_current_rpc_agent().get_metrics()
        return int(metrics["agent.bytes_sent"]), int(metrics["agent.bytes_received"])

    sent, received = counters()
    of()
    now = counters()
    return now[0] - sent, now[1] - received


def halves(size: int) -> None:
    for dtype, item in ((None, 4), (BF16, 2), (F16, 2)):
        with wire_dtype(dtype):
            sent, received = traffic(lambda: rpc.rpc_sync("worker2", echo, args=(floats(size),)))
        assert item * size < sent < item * size + 2000
        assert item * size < received < item * size + 2000


@SIZES
def test_the_bytes_are_halved(unequal: Group, size: int) -> None:
    unequal.run(halves, size)


def kinds() -> None:
    kept = floats(24).view(4, 6)
    exact = [
        torch.arange(10),
        kept.double(),
        kept.bool(),
        torch.randn(5, dtype=torch.complex64),
        kept.bfloat16(),
        torch.empty(0),
        torch.quantize_per_channel(kept, torch.full((4,), 0.1), torch.zeros(4), 0, torch.quint8),
    ]
    for tensor, got in zip(exact, rpc.rpc_sync("worker1", echo, args=tuple(exact)), strict=True):
        assert torch.equal(got, tensor) and got.dtype == tensor.dtype
    views = [
        kept.t(),
        kept[1:3, ::2],
        kept[0, :1].expand(3, 4),
        torch.tensor(0.1),
        torch._neg_view(kept),
    ]
    for view, got in zip(views, rpc.rpc_sync("worker1", echo, args=tuple(views)), strict=True):
        assert torch.equal(got, rounded(view, BF16))
        assert got.stride() == view.stride() and got.is_neg() == view.is_neg()
    (got,) = rpc.rpc_sync("worker1", echo, args=(kept.requires_grad_(),))
    assert got.requires_grad and torch.equal(got, rounded(kept, BF16))


def test_kinds_of_tensors(equal: Group) -> None:
    equal.run(kinds)


def sparse() -> None:
    dense = floats(12).view(3, 4)
    for tensor in (dense.to_sparse(), dense.to_sparse_csr()):
        (got,) = rpc.rpc_sync("worker1", echo, args=(tensor,))
        assert torch.equal(got.to_dense(), rounded(dense, BF16))


def test_values_of_sparse_tensors(equal: Group) -> None:
    equal.run(sparse)


def shared() -> None:
    kept = floats(100)
    one, other = rpc.rpc_sync("worker1", echo, args=(kept, kept[50:]))
    assert torch.equal(one, rounded(kept, BF16))
    one[50] = 7
    assert other[0] == 7
    # One of the two tensors is not float32, so their storage is not narrowed.
    one, other = rpc.rpc_sync("worker1", echo, args=(kept, kept.view(torch.int32)))
    assert torch.equal(one, kept)
    one[0] = 0
    assert other[0] == 0


def test_tensors_that_share_a_storage(equal: Group) -> None:
    equal.run(shared)


def beyond_float16() -> None:
    tensor = torch.tensor([65504.0, 65520, -1e6, float("inf"), float("nan"), 6e-8, 1e-9])
    with wire_dtype(F16):
        (got,) = rpc.rpc_sync("worker1", echo, args=(tensor,))
    inf = float("inf")
    assert got[:4].tolist() == [65504, inf, -inf, inf] and got[4].isnan()
    assert got[5:].tolist() == [2**-24, 0]  # a subnormal number, and one that is too small


def test_numbers_that_float16_does_not_have(equal: Group) -> None:
    equal.run(beyond_float16)


def gradients() -> None:
    weight = floats(1000).requires_grad_()
    with dist_autograd.context() as context:
        product = rpc.rpc_sync("worker1", torch.mul, args=(weight, 1 / 3))
        dist_autograd.backward(context, [(product * floats(1000)).sum()])
        gradient = dist_autograd.get_gradients(context)[weight]
    assert torch.equal(product, rounded(rounded(weight, BF16) * (1 / 3), BF16))
    # The gradient of `product` is narrowed on the way there, that of `weight` on the way back.
    assert torch.equal(gradient, rounded(rounded(floats(1000), BF16) * (1 / 3), BF16))


def test_distributed_autograd(equal: Group) -> None:
    equal.run(gradients)


def to_oneself() -> None:
    with wire_dtype(BF16):
        assert torch.equal(request("worker0", 100), floats(100))


def test_a_call_to_oneself_is_exact(equal: Group) -> None:
    equal.run(to_oneself)


def test_an_unknown_worker() -> None:
    with Group(2, init=False, options=[{"wire_dtype": {"nobody": BF16}}, {}]) as group:
        with pytest.raises(ValueError, match="worker 'nobody'.*has 'worker0', 'worker1'"):
            group.init_all()
        group.broken = True
