"""The option integrity: bytes that change on their way are noticed, and the workers live on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

from tests.process.group import Group, workers
from tests.support.backend import needs_ucx
from torch_rpc_ext import errors, wire_dtype

pytestmark = needs_ucx("the option is ours")

ON = {"integrity": True}
#: Sizes of tensors: one travels inside the frame, one travels as bulk, one has its own receive
#: buffer.
SIZES = pytest.mark.parametrize("size", [100, 100_000, 1_000_000])


def ramp(size: int) -> Tensor:
    return torch.arange(float(size))


def corrupting(message: str, times: int = 1) -> dict[str, object]:
    return {"messages_to_corrupt": [message], "num_fail_sends": times}


def request_fails(size: int) -> None:
    pattern = (
        r"aten::add.* on worker \"worker1\" failed \(corrupted\): .*tensor 1 of the message .*"
        rf"its {4 * size} bytes have the checksum 0x[0-9a-f]{{16}} here and had 0x[0-9a-f]{{16}}"
    )
    arguments = torch.tensor(1.0), ramp(size)
    with pytest.raises(errors.IntegrityError, match=pattern) as caught:
        rpc.rpc_sync("worker1", torch.add, args=arguments)
    assert caught.value.worker == "worker1"
    assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=arguments), ramp(size) + 1)


def served() -> int:
    return int(rpc.api._get_current_rpc_agent().get_metrics()["agent.calls_served"])


@SIZES
def test_a_request(size: int) -> None:
    with Group(2, options=[ON | corrupting("SCRIPT_CALL"), {}]) as group:
        before = group[1].run(served)
        group.run(request_fails, size)
        assert group[1].run(served) == before + 1  # the function of the damaged call has not run
        assert "changed on its way" in group.output()


def answer_fails(size: int) -> None:
    pattern = (
        rf"aten::neg.* on worker \"worker1\" failed \(corrupted\): tensor 0 .* {4 * size} bytes"
    )
    with pytest.raises(errors.IntegrityError, match=pattern):
        rpc.rpc_sync("worker1", torch.neg, args=(ramp(size),))
    assert torch.equal(rpc.rpc_sync("worker1", torch.neg, args=(ramp(size),)), -ramp(size))


@SIZES
def test_an_answer(size: int) -> None:
    # The answer has checksums because the request had them.
    with Group(2, options=[ON, corrupting("SCRIPT_RET")]) as group:
        group.run(answer_fails, size)


@workers(2, options=[ON | corrupting("SCRIPT_REMOTE_CALL"), {}])
def test_remote() -> None:
    rref = rpc.remote("worker1", torch.neg, args=(ramp(100_000),))
    with pytest.raises(errors.IntegrityError, match="neg.* on worker .* failed .* tensor 0 "):
        rref._get_future().wait()
    with pytest.raises(RuntimeError, match="tensor 0 of the message changed|RRef creation"):
        rref.to_here()
    assert torch.equal(rpc.rpc_sync("worker1", torch.neg, args=(ramp(9),)), -ramp(9))


@workers(2, options=[corrupting("SCRIPT_CALL"), {}])
def test_off_nobody_notices() -> None:
    # Without the option, the changed bytes arrive unnoticed.
    got = rpc.rpc_sync("worker1", torch.neg, args=(ramp(100_000),))
    assert (got != -ramp(100_000)).sum() == 1


@workers(2, options=[ON | corrupting("SCRIPT_CALL"), {}])
def test_what_is_no_tensor() -> None:
    with pytest.raises(errors.IntegrityError, match="the payload of the message"):
        rpc.rpc_sync("worker1", torch.zeros, args=([2, 3],))
    assert rpc.rpc_sync("worker1", torch.zeros, args=([2, 3],)).shape == (2, 3)


def echo(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


@workers(2, options=ON)
def test_all_kinds_pass() -> None:
    sent = (
        ramp(3),
        ramp(2_000_000),
        torch.empty(0),
        ramp(50_000)[10:20],
        torch.eye(50).to_sparse(),
        torch.ones(5, dtype=torch.bool),
    )
    for to in ("worker0", "worker1"):
        for dtype in (None, torch.bfloat16):
            with wire_dtype(dtype):
                got = rpc.rpc_sync(to, echo, args=sent)
            for one, other in zip(got, sent, strict=True):
                exact = dtype is None or to == "worker0" or one.dtype == torch.bool
                same = other if exact else other.to(dtype).float()
                assert torch.equal(one.to_dense(), same.to_dense())
    assert rpc.rpc_sync("worker1", len, args=("x" * 100_000,)) == 100_000
