"""CUDA tensors in whole calls, on the fake devices of tests/support/fake_cuda. Every kernel and
copy there is late, so code that does not wait for a stream sees old bytes; freed memory is
overwritten."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule

from tests.process.group import Group
from tests.process.library_operators import call, define
from tests.support import fake_cuda
from tests.support.backend import needs_ucx
from torch_rpc_ext import rpc_async_all
from torch_rpc_ext._calls import fan_out

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]

#: Sizes of tensors: one travels inside the frame, one travels as bulk, one has no elements.
SIZES = pytest.mark.parametrize("size", [100, 100_000, 0])
SWAPPED = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
SAME = {"cuda:0": "cuda:0", "cuda:1": "cuda:1"}


@contextlib.contextmanager
def devices(maps: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    """One worker with two devices for each entry of ``maps``, which is its device maps."""
    fake_cuda.build()
    options = [{"device_maps": each, "num_worker_threads": 8} for each in maps]
    with Group(len(maps), options=options, init=False) as group:
        group.run_all(fake_cuda.install)
        group.init_all()
        yield group


@pytest.fixture(scope="module")
def cuda_pair() -> Iterator[Group]:
    with devices([{"worker1": SWAPPED, "worker0": SWAPPED}, {}]) as group:
        yield group


def ramp(size: int, device: str, start: int = 0) -> torch.Tensor:
    """Return the tensor start, start + 1, ..., which the current stream computes a little later."""
    zero_based = torch.arange(size, dtype=torch.float32).to(device)
    return zero_based + start


def assert_ramp(tensor: torch.Tensor, device: str, start: int, step: int = 1) -> None:
    assert tensor.device == torch.device(device)
    want = torch.arange(start, start + step * len(tensor), step, dtype=torch.float32)
    assert torch.equal(tensor.cpu(), want)


# ---- what callees run --------------------------------------------------------


def plus(tensor: torch.Tensor, number: int) -> torch.Tensor:
    assert tensor.device == torch.device("cuda:1")
    return tensor + number


def devices_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [str(tensor.device) for tensor in tensors]


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    one += 1
    return bool(torch.equal(one.cpu(), other.cpu()))


def first_and_last_share(tensors: Sequence[torch.Tensor]) -> bool:
    tensors[0].add_(1)
    return bool(torch.equal(tensors[0].cpu(), tensors[-1].cpu()))


@torch.jit.script
def scripted_plus(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor + number


def name_and_device(_weights: torch.Tensor, tensor: torch.Tensor) -> tuple[str, str]:
    return rpc.get_worker_info().name, str(tensor.device)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.is_cpu
    return tensor + 1


def set_memory(limit: int) -> None:
    fake_cuda.ops.set_memory(limit)


def overwrite(tensor: torch.Tensor) -> torch.Tensor:
    tensor.fill_(-1)
    return tensor


def ping_pong(tensor: torch.Tensor, depth: int) -> torch.Tensor:
    if depth == 0:
        return tensor + 1
    here = rpc.get_worker_info().id
    return rpc.rpc_sync(f"worker{1 - here}", ping_pong, args=(tensor, depth - 1)) + 1


@rpc.functions.async_execution
def plus_later(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    inner = rpc.rpc_async("worker1", torch.mul, args=(tensor, 2))
    return inner.then(lambda future: future.wait() + 1)


# ---- bodies, on worker0 ------------------------------------------------------


def there_and_back(size: int) -> None:
    assert_ramp(rpc.rpc_sync("worker1", plus, args=(ramp(size, "cuda:0"), 5)), "cuda:0", 5)


@SIZES
def test_there_and_back(cuda_pair: Group, size: int) -> None:
    cuda_pair.run(there_and_back, size)


def freed_at_once(size: int) -> None:
    futures = []
    for start in range(20):
        tensor = ramp(size, "cuda:0", start)
        futures.append(rpc.rpc_async("worker1", plus, args=(tensor, 1)))
        del tensor
    for start, future in enumerate(futures):
        assert_ramp(future.wait(), "cuda:0", start + 1)


@pytest.mark.parametrize("size", [100, 100_000])
def test_the_caller_may_free_its_tensor(cuda_pair: Group, size: int) -> None:
    cuda_pair.run(freed_at_once, size)


def without_synchronizing() -> dict[str, int]:
    tensors = [ramp(size, "cuda:0") for size in (10, 100_000)]
    with fake_cuda.counted() as counts:
        futures = [rpc.rpc_async("worker1", plus, args=(tensor, 1)) for tensor in tensors]
        results = [future.wait() + 1 for future in futures]
    for result in results:
        assert_ramp(result, "cuda:0", 2)
    return counts


def test_nothing_waits_for_a_device(cuda_pair: Group) -> None:
    before = cuda_pair[1].run(fake_cuda.counts)
    here = cuda_pair.run(without_synchronizing)
    there = cuda_pair[1].run(fake_cuda.counts)
    assert here["synchronizations"] == 0 and there["synchronizations"] == before["synchronizations"]
    assert here["pageable"] == 0 and there["pageable"] == before["pageable"]
    assert here["device_to_host"] == 2 and here["host_to_device"] == 2


LATE = 0.5  # s


def seconds_to_send(size: int) -> float:
    """Send a tensor that comes to be after LATE; return the seconds until the call returned."""
    tensor = ramp(size, "cuda:0")
    fake_cuda.set_delay(LATE)
    try:
        start = time.monotonic()
        tensor = tensor + 1
        future = rpc.rpc_async("worker1", plus, args=(tensor, 1))
        sent = time.monotonic() - start
        del tensor
        assert_ramp(future.wait(), "cuda:0", 2)
        return sent
    finally:
        fake_cuda.set_delay(fake_cuda.DELAY)


def test_the_caller_is_not_blocked(cuda_pair: Group) -> None:
    """A caller that is blocked needs LATE or more each time. On a busy machine another one may need
    as long, but not each time."""
    assert any(cuda_pair.run(seconds_to_send, 100) < LATE for _ in range(5))


def streams_of_the_user() -> None:
    with fake_cuda.stream(0, 7):
        tensor = ramp(1000, "cuda:0")
        result = rpc.rpc_sync("worker1", plus, args=(tensor, 1))
        doubled = result * 2
        del tensor, result
        junk = [torch.zeros(1000, device="cuda:0") for _ in range(20)]
        assert_ramp(doubled, "cuda:0", 2, 2)
        del junk


def test_the_current_stream_is_kept_to(cuda_pair: Group) -> None:
    cuda_pair.run(streams_of_the_user)


def many_small() -> dict[str, int]:
    fake_cuda.set_delay(0)
    tensors = [ramp(1000, "cuda:0", start) for start in range(500)]
    fake_cuda.set_delay(fake_cuda.DELAY)
    with fake_cuda.counted() as counts:
        results = rpc.rpc_async("worker1", list, args=(tensors,)).wait()
    fake_cuda.set_delay(0)
    for start, result in enumerate(results):
        assert_ramp(result, "cuda:0", start)
    fake_cuda.set_delay(fake_cuda.DELAY)
    return counts


def test_500_tensors_are_one_copy(cuda_pair: Group) -> None:
    before = cuda_pair[1].run(fake_cuda.counts)
    here = cuda_pair.run(many_small)
    after = cuda_pair[1].run(fake_cuda.counts)
    for kind in ("device_to_host", "host_to_device"):
        assert here[kind] == 1 and after[kind] - before[kind] == 1
    assert here["foreach_copies"] == 2  # one gather, one scatter


def kinds() -> None:
    mixed = [ramp(3, "cuda:0"), torch.ones(3), ramp(3, "cuda:1"), torch.empty(0, device="cuda:1")]
    got = rpc.rpc_sync("worker1", devices_of, args=(mixed,))
    assert got == ["cuda:1", "cpu", "cuda:0", "cuda:0"]
    whole = ramp(30_000, "cuda:0")
    assert rpc.rpc_sync("worker1", same_memory, args=(whole, whole.view(300, 100).view(-1)))
    column = whole.view(300, 100).t()[3]  # much smaller than its storage
    assert torch.equal(rpc.rpc_sync("worker1", plus, args=(column, 1)).cpu(), column.cpu() + 1)
    for dtype in (torch.bfloat16, torch.int8, torch.complex64, torch.bool):
        value = torch.ones(5, device="cuda:0", dtype=dtype)
        result = rpc.rpc_sync("worker1", overwrite, args=(value,))
        want = torch.ones(5, dtype=dtype).fill_(-1)
        assert result.dtype == dtype and torch.equal(result.cpu(), want)


def test_devices_views_and_dtypes(cuda_pair: Group) -> None:
    cuda_pair.run(kinds)


def in_callbacks() -> None:
    doubled = rpc.rpc_async("worker1", plus, args=(ramp(1000, "cuda:0"), 1)).then(
        lambda future: future.wait() * 2
    )
    assert_ramp(doubled.wait(), "cuda:0", 2, 2)
    assert_ramp(rpc.remote("worker1", plus, args=(ramp(9, "cuda:0"), 1)).to_here(), "cuda:0", 1)
    rref = rpc.remote("worker1", plus, args=(ramp(100_000, "cuda:0"), 1))
    assert_ramp(rref.rpc_sync().add(1), "cuda:0", 2)


def test_callbacks_and_rrefs(cuda_pair: Group) -> None:
    cuda_pair.run(in_callbacks)


def rrefs_of_every_kind_of_function() -> None:
    there_and_back(1)  # worker1 imports this module, and defines the TorchScript function
    for function in (plus, torch.add, scripted_plus):
        for start in range(4):
            rref = rpc.remote("worker1", function, args=(ramp(100_000, "cuda:0", start), 1))
            assert_ramp(rref.to_here(), "cuda:0", start + 1)


def test_rrefs_of_every_kind_of_function(cuda_pair: Group) -> None:
    cuda_pair.run(rrefs_of_every_kind_of_function)


def operators_of_libraries() -> None:
    define("double(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match=r"no operator tests_library::double\(Tensor x\)"):
        call(torch.ops.tests_library.double, torch.ones(2))
    rpc.rpc_sync("worker1", define, ("double(Tensor x) -> Tensor",))
    assert call(torch.ops.tests_library.double, torch.ones(2)).tolist() == [2, 2]


def test_operators_of_libraries(cuda_pair: Group) -> None:
    cuda_pair.run(operators_of_libraries)


def to_oneself(size: int) -> dict[str, int]:
    tensor = ramp(size, "cuda:0")
    with fake_cuda.counted() as counts:
        future = rpc.rpc_async("worker0", overwrite, args=(tensor,))
        result = future.wait()
    assert result.device == tensor.device and torch.equal(result.cpu(), -torch.ones(size))
    assert_ramp(tensor, "cuda:0", 0)
    return counts


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_call_to_oneself_stays_on_devices(cuda_pair: Group, size: int) -> None:
    counts = cuda_pair.run(to_oneself, size)
    assert counts["device_to_host"] == counts["host_to_device"] == 0
    assert counts["device_to_device"] == 2 and counts["synchronizations"] == 0


KEPT: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> None:
    KEPT.append(tensor)


def overwrite_after_a_call_to_oneself() -> None:
    tensor = ramp(100_000, "cuda:0")
    rpc.rpc_sync("worker0", keep, args=(tensor,))
    tensor.fill_(-1)
    kept = KEPT.pop()
    assert_ramp(kept, str(kept.device), 0)


def test_an_argument_that_is_overwritten_after_a_call_to_oneself(cuda_pair: Group) -> None:
    """The answer has no tensor, so no stream would wait for the copy of the argument."""
    cuda_pair.run(overwrite_after_a_call_to_oneself)


def overwrite_beside(tensor: torch.Tensor, beside: Any) -> tuple[torch.Tensor, Any]:
    return overwrite(tensor), beside


def to_oneself_beside_bulk() -> None:
    for beside in (torch.ones(100_000), b"x" * 100_000):
        tensor = ramp(100_000, "cuda:0")
        result, same = rpc.rpc_sync("worker0", overwrite_beside, args=(tensor, beside))
        assert torch.equal(result.cpu(), -torch.ones(100_000))
        assert bool((same == beside).all()) if torch.is_tensor(beside) else same == beside
        assert_ramp(tensor, "cuda:0", 0)


def test_a_call_to_oneself_with_other_bulk(cuda_pair: Group) -> None:
    cuda_pair.run(to_oneself_beside_bulk)


def part_to_oneself() -> dict[str, int]:
    table = ramp(300_000, "cuda:0").view(300, 1000)
    with fake_cuda.counted() as counts:
        future = rpc.rpc_async("worker0", overwrite, args=(table.t()[3],))
        column = table.t()[3].cpu()
        assert torch.equal(future.wait().cpu(), -torch.ones(300))
    assert torch.equal(column, torch.arange(300_000.0).view(300, 1000).t()[3])
    return counts


def test_a_part_of_a_storage_to_oneself(cuda_pair: Group) -> None:
    """Copies only the part: once on the way there, and once on the way back."""
    assert cuda_pair.run(part_to_oneself)["device_to_device"] == 2


def view_after_a_part() -> None:
    table = ramp(100_000, "cuda:0")
    for count in range(14, 19):
        many = [ramp(10, "cuda:0", i) for i in range(count)]
        tensors = [*many, table[:5], many[0].view(2, 5).view(10)]
        assert rpc.rpc_sync("worker1", first_and_last_share, args=(tensors,)), count


def test_views_share_a_storage_beside_a_part_of_another(cuda_pair: Group) -> None:
    cuda_pair.run(view_after_a_part)


def breaks(error: str) -> None:
    tensor = ramp(10, "cuda:0")
    torch.equal(tensor.cpu(), tensor.cpu())
    fake_cuda.ops.set_broken(True)
    try:
        with pytest.raises(RuntimeError, match=error):
            rpc.rpc_sync("worker1", plus, args=(tensor, 1))
    finally:
        fake_cuda.ops.set_broken(False)
    there_and_back(100)


def test_a_device_that_fails(cuda_pair: Group) -> None:
    cuda_pair.run(breaks, "plus on worker .worker1. failed.*illegal memory access")


def runs_out() -> None:
    tensor = ramp(1_000_000, "cuda:0")
    rpc.rpc_sync("worker1", set_memory, args=(1_000_000,))
    with pytest.raises(RuntimeError, match="could not take the message: CUDA out of memory"):
        rpc.rpc_sync("worker1", plus, args=(tensor, 1))
    rpc.rpc_sync("worker1", set_memory, args=(1 << 60,))
    there_and_back(100_000)


def test_no_memory_on_the_callee(cuda_pair: Group) -> None:
    cuda_pair.run(runs_out)


def forward() -> None:
    weight = ramp(1000, "cuda:0").requires_grad_()
    with dist_autograd.context():
        result = rpc.rpc_sync("worker1", plus, args=(weight * 2, 1))
        assert result.requires_grad
        assert_ramp(result.detach(), "cuda:0", 1, 2)


def test_the_forward_pass_of_dist_autograd(cuda_pair: Group) -> None:
    """dist_autograd passes device maps with each call. A backward pass needs more than the fake
    devices can do."""
    cuda_pair.run(forward)


def remote_module() -> None:
    module = RemoteModule("worker1/cuda:1", Scale, args=(3.0,))
    for size in (10, 100_000):
        assert_ramp(module.forward(ramp(size, "cuda:0")), "cuda:0", 0, 3)
        assert_ramp(module.forward_async(ramp(size, "cuda:0")).wait(), "cuda:0", 0, 3)
    [weight] = module.remote_parameters()
    assert weight.to_here().device == torch.device("cuda:0")


class Scale(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([factor]))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.factor.device == tensor.device == torch.device("cuda:1")
        return tensor.mul(self.factor).detach()


def test_a_remote_module_on_a_device(cuda_pair: Group) -> None:
    cuda_pair.run(remote_module)


# ---- other maps --------------------------------------------------------------


def unmapped_request() -> None:
    line = r'UcxRpcBackendOptions\(...\).set_device_map\("worker1", {"cuda:1": "cuda:1"}\)'
    text = "only supports CPU tensors by default.*`set_device_map`.*Request device mapping.*"
    with pytest.raises(RuntimeError, match=f"{text}destination worker1 for device cuda:1.*{line}"):
        rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2, device="cuda:1"),))
    assert rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2),)).sum() == -2


def unmapped_response() -> None:
    text = "Response device mapping is not available for destination worker0 for device cuda:1"
    with pytest.raises(RuntimeError, match=text):
        rpc.rpc_sync("worker1", ramp, args=(2, "cuda:1"))


def nested_and_async() -> None:
    tensor = ramp(100_000, "cuda:0")
    assert_ramp(rpc.rpc_sync("worker1", ping_pong, args=(tensor, 5)), "cuda:0", 6)
    assert_ramp(rpc.rpc_sync("worker1", plus_later, args=(tensor,)), "cuda:0", 1, 2)


def test_missing_maps_and_nested_calls() -> None:
    one_way = {"cuda:0": "cuda:0"}
    with devices([{"worker1": one_way}, {"worker0": SAME, "worker1": SAME}]) as group:
        group.run(unmapped_request)
        group.run(unmapped_response)
        group.run(nested_and_async)


def meta_tensors() -> None:
    meta = torch.empty(3, device="meta")
    assert rpc.rpc_sync("worker1", devices_of, args=([meta, ramp(3, "cuda:0")],)) == [
        "meta",
        "cuda:1",
    ]
    # This error comes from torch's own futures, where there are devices. It names the device, and
    # the callee lives on.
    with pytest.raises(Exception, match="to be on a device of type cuda, got one on device meta"):
        rpc.rpc_sync("worker1", torch.neg, args=(meta,))
    assert_ramp(rpc.rpc_sync("worker1", plus, args=(ramp(3, "cuda:0"), 5)), "cuda:0", 5)


def test_meta_tensors_can_be_arguments(cuda_pair: Group) -> None:
    cuda_pair.run(meta_tensors)


def test_meta_tensors_of_a_worker_without_devices_can_be_results() -> None:
    with devices([{"worker1": {"cuda:0": "cpu"}}, {}]) as group:
        group.run(meta_results)


def meta_results() -> None:
    assert rpc.rpc_sync("worker1", torch.empty, args=([3],), kwargs={"device": META}).is_meta


META = torch.device("meta")


def host_to_device(size: int) -> None:
    assert_ramp(rpc.rpc_sync("worker1", plus, args=(torch.arange(float(size)), 1)), "cpu", 1)
    many = [torch.ones(3) for _ in range(10)]
    assert set(rpc.rpc_sync("worker1", devices_of, args=(many,))) == {"cuda:1"}


def device_to_host(size: int) -> None:
    result = rpc.rpc_sync("worker0", on_cpu, args=(ramp(size, "cuda:0"),))
    assert_ramp(result, "cuda:0", 1)


@SIZES
def test_between_cpu_and_device(size: int) -> None:
    maps = [{"worker1": {"cpu": "cuda:1"}}, {"worker0": {"cuda:0": "cpu"}}]
    with devices(maps) as group:
        group.run(host_to_device, size)
        group[1].run(device_to_host, size)


def as_if_on_other_hosts(device: str, there: str) -> None:
    def host_of(name: str) -> str:
        return "here" if name == "worker0" else "there"

    fan_out._host_of = host_of
    others = ["worker1", "worker2"]
    tensor = ramp(7, device)
    futures = rpc_async_all(others, name_and_device, args=(torch.ones(1 << 18), tensor))
    assert [future.wait() for future in futures] == [(name, there) for name in others]


TO_OTHERS = {"worker1": SWAPPED, "worker2": SWAPPED}


@pytest.mark.parametrize(
    ("maps", "of_first", "device", "there"),
    [
        (TO_OTHERS, {}, "cuda:0", "cuda:1"),
        (TO_OTHERS, {"worker1": SAME, "worker2": SAME}, "cuda:0", "cuda:1"),
        ({}, {"worker2": {"cpu": "cuda:1"}}, "cpu", "cpu"),
    ],
)
def test_a_call_to_workers_of_another_host_uses_the_callers_maps(
    maps: Any, of_first: Any, device: str, there: str
) -> None:
    with devices([maps, of_first, {}]) as group:
        group.run(as_if_on_other_hosts, device, there)


def note_cuda_init() -> None:
    torch.cuda.init = lambda: KEPT.append(torch.ones(1))  # type: ignore[assignment]


def cuda_inits() -> int:
    return len(KEPT)


def test_a_newcomer_brings_a_device_map() -> None:
    """The member that learns so that it uses devices prepares them as at its own start."""
    fake_cuda.build()
    with Group(2, init=False) as group:
        group.run_all(fake_cuda.install)
        group[0].run(note_cuda_init)
        group[0].init(None).result()
        assert group[0].run(cuda_inits) == 0
        group[1].init(None, device_maps={"worker0": SAME}).result()
        assert group[1].run(rpc.rpc_sync, "worker0", cuda_inits) > 0


@pytest.mark.parametrize(
    ("maps", "error"),
    [
        ({"worker1": {"cuda:0": "cuda:9"}}, "target devices with invalid indices"),
        ({"worker1": {"cuda:9": "cuda:0"}}, "source devices with invalid indices"),
        ({"worker1": {"cuda:0": "cuda:0", "cuda:1": "cuda:0"}}, "only supports 1-to-1 mapping"),
        ({"worker7": SAME}, "invalid target node names"),
    ],
)
def test_wrong_maps(maps: Mapping[str, Any], error: str) -> None:
    with pytest.raises(Exception, match=error), devices([maps, {}]):
        pass
