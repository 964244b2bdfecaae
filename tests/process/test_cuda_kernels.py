"""The agent's use of the kernels: real calls, on devices and a driver that exist in host memory.

The driver runs what the agent launches on the streams of tests/support/fake_cuda, as late as
everything there.
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
#: Small ones, which are gathered, and one that goes as bulk.
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
    """Numbers that the narrow dtypes do not have, as the current stream will have them later."""
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
    # The gather of the arguments, the scatter of the results; as much there.
    assert here == ["segments"] * 2 and two[1].run(launches) == ["segments"] * 2
    assert counts["foreach_copies"] == 0 and counts["synchronizations"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_are_part_of_the_copy(two: Group, dtype: torch.dtype) -> None:
    two[1].run(launches)
    counts, here = two.run(call, dtype)
    name = str(dtype).removeprefix("torch.")
    # For the large tensor and for all small ones.
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
        line = "debug] cuda:0: kernel segments_float32_to_float16 is not used, torch does its work"
        assert line in group.workers[0].child.output()


# ---- integrity ---------------------------------------------------------------


def damaged() -> None:
    with pytest.raises(errors.IntegrityError, match="tensor 0 of the message changed on its way"):
        rpc.rpc_sync("worker1", torch.neg, args=(tensors("cuda:0")[-1],))


def test_checksums_of_large_tensors_are_the_devices() -> None:
    faults = {"_messages_to_corrupt": ["SCRIPT_CALL"], "_num_fail_sends": 1}
    with pair(integrity=True, **faults) as group:
        group.run(damaged)
        for dtype in (None, torch.bfloat16):
            _, names = group.run(call, dtype)
            assert names.count("checksum") == 1
