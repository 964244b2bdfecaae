"""How the agent uses the kernels: real calls, on fake devices and a fake driver in host memory.

The fake driver runs the kernels that the agent launches on the streams of tests/support/fake_cuda,
late as everything there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

from tests.process.group import Group
from tests.support import fake_cuda, libcuda
from tests.support.backend import needs_ucx
from torch_rpc_ext import errors, wire_dtype

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]

SWAPPED = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
MAPS = {"worker0": SWAPPED, "worker1": SWAPPED}
LAUNCH_FAILED = 719
#: Small tensors, which are gathered, and one that travels as bulk.
SIZES = (1, 100, 17, 3000, 64, 0, 100_000)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        pytest.skip("NUMBA_ENABLE_CUDASIM is set: nothing is compiled")
    if not hasattr(torch.Stream, "native_handle"):
        pytest.skip("this version of torch does not tell the handles of its streams")


def pair(**options: Any) -> Group:
    fake_cuda.build()
    env = libcuda.environment(uuids="ab") | {"TORCH_RPC_EXT_LOG": "debug"}
    staged = {"device_maps": MAPS, "use_cuda_ipc": False, **options}
    group = Group(2, init=False, env=env, options=staged)
    group.run_all(fake_cuda.install)
    group.init_all()
    return group


@pytest.fixture(scope="module")
def two() -> Iterator[Group]:
    with pair() as group:
        yield group


def tensors(device: str) -> list[Tensor]:
    """Tensors that the current stream computes later, of numbers that the narrow dtypes cannot
    represent."""
    return [torch.linspace(-3, 3, size).to(device) + 0.0001 for size in SIZES]


def expected() -> list[Tensor]:
    return [torch.linspace(-3, 3, size) + 0.0001 for size in SIZES]


def times_two(given: list[Tensor]) -> list[Tensor]:
    assert {str(tensor.device) for tensor in given} == {"cuda:1"}
    return [tensor * 2 for tensor in given]


def launches() -> list[str]:
    driver = libcuda.FakeCuda()
    names = [call.split()[1] for call in driver.calls("cuLaunchKernel")]
    driver.forget_calls()
    return names


def call(dtype: torch.dtype | None) -> tuple[dict[str, int], list[str]]:
    sent = tensors("cuda:0")
    launches()
    with fake_cuda.counted() as counts, wire_dtype(dtype):
        got = rpc.rpc_sync("worker1", times_two, args=(sent,))
    for tensor, want in zip(got, expected(), strict=True):
        assert str(tensor.device) == "cuda:0"
        if dtype is not None:
            want = want.to(dtype).float()
        assert torch.equal(tensor.cpu(), want * 2)
    return counts, launches()


def test_one_launch_for_many_tensors(two: Group) -> None:
    two[1].run(launches)
    counts, here = two.run(call, None)
    # A gather of the arguments and a scatter of the results; the callee launches as many.
    assert here == ["segments"] * 2 and two[1].run(launches) == ["segments"] * 2
    assert counts["foreach_copies"] == 0 and counts["synchronizations"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_are_part_of_the_copy(two: Group, dtype: torch.dtype) -> None:
    two[1].run(launches)
    counts, here = two.run(call, dtype)
    name = str(dtype).removeprefix("torch.")
    # One for the large tensor, one for all small ones.
    narrow, wide = [f"segments_float32_to_{name}"] * 2, [f"segments_{name}_to_float32"] * 2
    assert here == narrow + wide
    assert two[1].run(launches) == wide + narrow
    assert counts["foreach_copies"] == 0 and counts["synchronizations"] == 0


def test_the_choice_is_logged_once(two: Group) -> None:
    two.run(call, None)
    two.run(call, None)
    assert two.workers[0].child.output().count("cuda:0: kernel segments is launched") == 1


def fail_next_launch() -> None:
    libcuda.FakeCuda().fail("cuLaunchKernel", LAUNCH_FAILED)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_torch_copies_where_a_launch_fails(two: Group, dtype: torch.dtype | None) -> None:
    two.run(fail_next_launch)
    counts, _ = two.run(call, dtype)
    assert counts["foreach_copies"] == 1


def without_compiler() -> None:
    from torch_rpc_ext.kernels import ptx

    def refuse(*_: object) -> None:
        raise ptx.MissingCompilerError("kernels are compiled by numba-cuda: pip install it")

    ptx.compile_kernel = refuse  # type: ignore[assignment]


def test_without_numba_cuda() -> None:
    with pair() as group:
        group.run_all(without_compiler)
        counts, here = group.run(call, torch.float16)
        assert here == [] and counts["foreach_copies"] == 4
        assert group.run(call_with_excerpts, None)[1] == []
        line = "debug] cuda:0: kernel segments_float32_to_float16 is not used, torch does its work"
        assert line in group.workers[0].child.output()


# ---- parts of storages -------------------------------------------------------


def excerpts(base: Tensor) -> list[Tensor]:
    """Parts of a storage that travel without the rest: five are scattered, two are contiguous."""
    table = base.view(600, 1000)
    return [
        table.t()[3],
        table[:, 10:13],
        table[5],
        table[:300, ::7],  # travels as bulk, as do the next two
        table[100:300],
        table.t()[::5, :300],
        table[2:3, :4].expand(7, 4),
    ]


def numbers() -> Tensor:
    return torch.linspace(-3, 3, 600_000)


def doubled(given: list[Tensor], strides: list[tuple[int, ...]]) -> list[Tensor]:
    for tensor, stride in zip(given, strides, strict=True):
        assert tensor.device == torch.device("cuda:1") and tensor.stride() == stride
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    return [tensor * 2 for tensor in given]


def call_with_excerpts(dtype: torch.dtype | None) -> tuple[dict[str, int], list[str]]:
    want = [part.clone() for part in excerpts(numbers() + 0.0001)]
    strides = [tensor.stride() for tensor in want]
    base = numbers().to("cuda:0") + 0.0001
    launches()
    with fake_cuda.counted() as counts, wire_dtype(dtype):
        future = rpc.rpc_async("worker1", doubled, args=(excerpts(base), strides))
        del base
        got = future.wait()
    for tensor, one in zip(got, want, strict=True):
        if dtype is not None:
            one = one.to(dtype).float()
        assert torch.equal(tensor.cpu(), (one * 2).to(dtype or torch.float32).float())
    return counts, launches()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_parts_of_storages_are_packed_where_they_are_copied(
    two: Group, dtype: torch.dtype | None
) -> None:
    counts, names = two.run(call_with_excerpts, dtype)
    kinds = [name.split("_")[0] for name in names]
    assert kinds.count("strided") == 5
    assert all(("bfloat16" in name) == (dtype is not None) for name in names)
    # No temporary is made: torch copies nothing from device to device.
    assert counts["device_to_device"] == counts["foreach_copies"] == 0
    assert counts["synchronizations"] == 0


def one_column() -> dict[str, int]:
    table = (numbers().to("cuda:0") + 1).view(600, 1000)
    want = table.t()[3].cpu() + 1
    with fake_cuda.counted() as counts:
        got = rpc.rpc_sync("worker1", torch.add, args=(table.t()[3], 1))
    assert torch.equal(got.cpu(), want)
    return counts


def test_torch_packs_where_a_launch_fails(two: Group) -> None:
    two.run(fail_next_launch)
    assert two.run(one_column)["device_to_device"] == 1
    assert two.run(one_column)["device_to_device"] == 0


def nine_dimensions() -> dict[str, int]:
    whole = (torch.arange(3.0**9).to("cuda:0") + 1).view([3] * 9)
    part = whole[tuple([slice(2)] * 9)]
    with fake_cuda.counted() as counts:
        got = rpc.rpc_sync("worker1", torch.neg, args=(part,))
    assert torch.equal(got.cpu(), -part.cpu())
    return counts


def test_torch_packs_more_dimensions_than_the_kernel_has(two: Group) -> None:
    assert two.run(nine_dimensions)["device_to_device"] >= 1


def of_other_dtypes() -> None:
    for dtype in (torch.uint8, torch.float16, torch.float64, torch.complex64, torch.complex128):
        table = numbers().to(dtype).to("cuda:0").view(600, 1000)
        for part in (table.t()[3], table[:, ::3][:, :100]):
            if dtype.is_complex:
                part = part.conj()
            got = rpc.rpc_sync("worker1", list, args=([part],))[0]
            assert got.dtype == dtype and torch.equal(got.cpu(), part.cpu())


def test_parts_of_other_dtypes(two: Group) -> None:
    two.run(of_other_dtypes)


# ---- integrity ---------------------------------------------------------------


def damaged() -> None:
    with pytest.raises(errors.IntegrityError, match="tensor 0 of the message changed on its way"):
        rpc.rpc_sync("worker1", torch.neg, args=(tensors("cuda:0")[-1],))


def test_checksums_of_large_tensors_are_the_devices() -> None:
    faults = {"messages_to_corrupt": ["SCRIPT_CALL"], "num_fail_sends": 1}
    with pair(integrity=True, **faults) as group:
        group.run(damaged)
        for dtype in (None, torch.bfloat16):
            group[1].run(launches)
            counts, names = group.run(call, dtype)
            # One checksum for what leaves: the large tensor. Two for what arrives: the large
            # tensor, and the block of small tensors.
            assert names.count("checksum") == group[1].run(launches).count("checksum") == 3
            assert counts["synchronizations"] == 0


@pytest.fixture(scope="module")
def checked() -> Iterator[Group]:
    with pair(integrity=True) as group:
        yield group


ran: list[int] = []


def notes_that_it_ran(tensor: Tensor) -> Tensor:
    ran.append(1)
    return tensor * 2


def times_run() -> int:
    return len(ran)


def damage(copies: int) -> None:
    fake_cuda.ops.set_damaged(copies)


def with_damage(size: int, where: str, dtype: torch.dtype | None) -> None:
    tensor = torch.linspace(-3, 3, size).to("cuda:0")
    before = rpc.rpc_sync("worker1", times_run)
    for device in ("worker0", "worker1"):
        rpc.rpc_sync(device, damage, args=(1 if device == where else 0,))
    which = "tensor 0" if size > 10_000 else "a block of small tensors for cuda:."
    with wire_dtype(dtype), pytest.raises(errors.IntegrityError, match=f"{which} of the message"):
        rpc.rpc_sync("worker1", notes_that_it_ran, args=(tensor,))
    assert rpc.rpc_sync("worker1", times_run) - before == (where == "worker0")
    got = rpc.rpc_sync("worker1", notes_that_it_ran, args=(tensor,))
    assert torch.equal(got.cpu(), tensor.cpu() * 2)


@pytest.mark.parametrize("where", ["worker0", "worker1"])
@pytest.mark.parametrize("size", [100, 100_000])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_copy_to_a_device_that_changes_bytes(
    checked: Group, size: int, where: str, dtype: torch.dtype | None
) -> None:
    """If the request is damaged (on worker1), its function does not run; if the answer is, the
    caller gets no result."""
    checked.run(with_damage, size, where, dtype)
    line = "changed on its way"
    assert line in checked.workers[int(where[-1])].child.output()


@pytest.mark.parametrize("where", ["worker0", "worker1"])
def test_a_chunk_that_changes_while_the_rest_arrives(where: str) -> None:
    """Where workers cannot read each other's memory, the receiver copies chunk by chunk."""
    with pair(integrity=True, use_cma=False) as group:
        group.run(with_damage, 10_000_000, where, None)
        assert "changed on its way" in group.workers[int(where[-1])].child.output()


def test_a_checksum_that_cannot_be_launched_is_computed_by_the_host(checked: Group) -> None:
    checked.run_all(fail_next_launch)
    checked.run(call, None)


def many_at_once() -> None:
    """Send more requests than there are threads; each request waits for its checksums."""
    sent = [torch.linspace(-3, 3, 100_000).to("cuda:0") + i for i in range(40)]
    futures = [rpc.rpc_async("worker1", notes_that_it_ran, args=(tensor,)) for tensor in sent]
    for tensor, future in zip(sent, futures, strict=True):
        assert torch.equal(future.wait().cpu(), tensor.cpu() * 2)


def test_many_checked_calls_at_once(checked: Group) -> None:
    checked.run(many_at_once)


def test_a_device_that_fails_before_it_has_the_checksum(checked: Group) -> None:
    checked.run(breaks_receiver)


def breaks_receiver() -> None:
    tensor = torch.linspace(-3, 3, 100_000).to("cuda:0")
    rpc.rpc_sync("worker1", set_broken, args=(True,))
    with pytest.raises(RuntimeError, match="could not take the message: .*illegal memory access"):
        rpc.rpc_sync("worker1", notes_that_it_ran, args=(tensor,))
    rpc.rpc_sync("worker1", set_broken, args=(False,))
    rpc.rpc_sync("worker1", notes_that_it_ran, args=(tensor,))


def set_broken(yes: bool) -> None:
    fake_cuda.ops.set_broken(yes)
