"""Tensors on the meta device, which have no bytes, arrive as they were sent. Tensors on a device
that the agent does not know are refused, and the worker lives on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("ends the callee: 'terminate called' (meta), or fails (others)")


class _OfAStrangeDevice(Tensor):
    """Claims to be on a device for which this process has no code."""

    @staticmethod
    def __new__(cls) -> Any:
        return Tensor._make_wrapper_subclass(cls, (3,), device="xla:0")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(func)


def send_strange_ones() -> None:
    """Try to send such tensors, which this worker's pickler takes for ordinary ones."""
    internal: Any = rpc.internal

    def reduce(tensor: Tensor) -> Any:
        internal._thread_local_tensor_tables.send_tables.append(tensor)
        return (list, ())

    internal._internal_rpc_pickler._register_reducer(_OfAStrangeDevice, reduce)


def empty(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape, device="meta", **options)


def look(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.device.type,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.requires_grad,
    )


def identity(value: Any) -> Any:
    return value


def strange() -> Tensor:
    return _OfAStrangeDevice()


def share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def cases() -> list[Tensor]:
    huge = empty(1 << 20, 1 << 20)  # would have 4 TiB
    return [
        empty(3, 4),
        empty(),
        empty(0, 5),
        empty(3, 4, dtype=torch.complex64),
        empty(3, 4, dtype=torch.int8).t(),
        empty(8, 8)[2:, ::3],
        empty(1, 6).expand(4096, 6),
        empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        empty(7, requires_grad=True),
        huge,
        huge[7:9, 11],
    ]


def arguments_and_results() -> None:
    for sent in cases():
        assert rpc.rpc_sync("worker1", look, args=(sent,)) == look(sent)
        assert look(rpc.rpc_sync("worker1", identity, args=(sent,))) == look(sent)
        # Next to other tensors, inside of a container, and in a call to oneself.
        back = rpc.rpc_sync("worker1", identity, args=({"a": [sent, torch.ones(70_000)]},))["a"]
        assert look(back[0]) == look(sent) and torch.equal(back[1], torch.ones(70_000))
        assert look(rpc.rpc_sync("worker0", identity, args=(sent,))) == look(sent)


def test_arguments_and_results(pair: Group) -> None:
    pair.run(arguments_and_results)


def remote_values() -> None:
    made = rpc.remote("worker1", empty, args=(3, 4))
    assert look(made.to_here()) == look(empty(3, 4))
    assert rpc.rpc_sync("worker1", look, args=(made.to_here(),)) == look(empty(3, 4))
    assert look(rpc.remote("worker1", torch.add, args=(empty(3), 1)).to_here()) == look(empty(3))


def test_remote_values(pair: Group) -> None:
    pair.run(remote_values)


@torch.jit.script
def scripted(tensor: Tensor) -> Tensor:
    return tensor.t() + 1


def operators_and_scripts() -> None:
    assert look(rpc.rpc_sync("worker1", torch.add, args=(empty(3, 4), 1))) == look(empty(3, 4))
    rpc.rpc_sync("worker1", look, args=(empty(1),))  # imports this module there, and so `scripted`
    assert look(rpc.rpc_sync("worker1", scripted, args=(empty(3, 4),))) == look(empty(3, 4).t())


def test_operators_and_scripts(pair: Group) -> None:
    pair.run(operators_and_scripts)


def aliases() -> None:
    one = empty(100)
    assert rpc.rpc_sync("worker1", share_memory, args=(one, one[50:]))
    assert not rpc.rpc_sync("worker1", share_memory, args=(one, empty(100)))


def test_views_of_one_storage_share_it(pair: Group) -> None:
    pair.run(aliases)


def remote_module() -> None:
    from torch.distributed.nn import RemoteModule

    module: Any = RemoteModule("worker1/meta", nn.Linear, args=(4, 3))
    assert [look(each.to_here()) for each in module.remote_parameters()] == [
        look(empty(3, 4, requires_grad=True)),
        look(empty(3, requires_grad=True)),
    ]
    result = module.forward(empty(2, 4))
    assert result.is_meta and result.shape == (2, 3)
    assert module.forward_async(empty(2, 4)).wait().is_meta


def test_remote_module(pair: Group) -> None:
    pair.run(remote_module)


def gradients() -> None:
    weight = empty(4, requires_grad=True)
    with dist_autograd.context() as context:
        product = rpc.rpc_sync("worker1", torch.mul, args=(weight, weight))
        dist_autograd.backward(context, [product.sum()])
        assert look(dist_autograd.get_gradients(context)[weight]) == look(empty(4))


def test_gradients(pair: Group) -> None:
    pair.run(gradients)


@workers(2, options={"integrity": True, "wire_dtype": torch.bfloat16})
def test_checksums_and_a_wire_dtype_have_no_part_in_them() -> None:
    arguments_and_results()


@workers(2, options={"max_bytes_in_flight": 1 << 20})
def test_they_do_not_count_as_bytes() -> None:
    arguments_and_results()


def refusals() -> None:
    sparse = torch.empty(3, 4, layout=torch.sparse_coo, device="meta")
    with pytest.raises(RuntimeError, match="device meta and not an ordinary strided tensor"):
        rpc.rpc_sync("worker1", identity, args=(sparse,))
    with pytest.raises(RuntimeError, match="could not send its result.*device meta and not"):
        rpc.rpc_sync("worker1", torch.empty, args=([3, 4],), kwargs=_sparse_meta())
    for _ in range(3):
        with pytest.raises(
            RuntimeError, match=r"could not send.* on device xla:0 .*\.cpu\(\) first"
        ):
            rpc.rpc_sync("worker1", strange)
    send_strange_ones()
    with pytest.raises(RuntimeError, match=r"tensor 0 .* on device xla:0 .*\.cpu\(\) first"):
        rpc.rpc_sync("worker1", identity, args=(strange(),))
    assert rpc.rpc_sync("worker1", look, args=(empty(2),)) == look(empty(2))


def _sparse_meta() -> dict[str, Any]:
    return {"layout": torch.sparse_coo, "device": torch.device("meta")}


def test_what_cannot_be_sent_is_refused() -> None:
    with Group(2) as group:
        group[1].run(send_strange_ones)
        group.run(refusals)
