"""CUDA tensors in whole calls by CUDA IPC. The fake devices of tests/support/fake_cuda use the fake
driver of tests/support/fake_libcuda, so that other processes can map their memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process.group import Group
from tests.process.test_cuda import (
    SAME,
    SWAPPED,
    assert_ramp,
    plus,
    ramp,
    same_memory,
    set_memory,
)
from tests.support import fake_cuda, libcuda
from tests.support.backend import needs_ucx
from tests.support.libcuda import FakeCuda

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]

INVALID_VALUE, ALREADY_MAPPED = 1, 208
SIZES = pytest.mark.parametrize("size", [100, 100_000, 0])


def devices(
    maps: Sequence[Mapping[str, Any]],
    uuids: Sequence[str] = ("ab", "ab", "ab"),
    fake: Mapping[str, object] | None = None,
    **options: Any,
) -> Group:
    """One worker with two devices for each entry of ``maps``, which is its device maps."""
    libcuda.needs_headers()
    fake_cuda.build()
    group = Group(
        len(maps),
        options=[{"device_maps": each, "num_worker_threads": 8, **options} for each in maps],
        env=[
            {"TORCH_RPC_EXT_LOG": "info", **libcuda.environment(uuids=letters, **(fake or {}))}
            for letters in uuids[: len(maps)]
        ],
        init=False,
    )
    group.run_all(fake_cuda.install)
    group.init_all()
    return group


@pytest.fixture(scope="module")
def ipc_pair() -> Iterator[Group]:
    with devices([{"worker1": SWAPPED}, {}]) as group:
        group.run(until_devices, "worker1", "cuda ipc")
        for worker in group:
            worker.run(released)
        yield group


def agent() -> Any:
    return rpc.api._get_current_rpc_agent()


def way_to(worker: str) -> tuple[str, str]:
    """How CUDA tensors travel to a worker, and why not in a faster way."""
    [found] = [peer for peer in agent().describe_peers() if peer["worker"] == worker]
    return found["devices"], found["devices_why"]


def until_devices(worker: str, way: str) -> str:
    """Make calls until tensors travel that way, and the way back is known too; return why they do
    not travel in a faster way."""
    me = rpc.get_worker_info().name
    ways = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        rpc.rpc_sync(worker, torch.add, args=(ramp(3, "cuda:0"), 1))
        ways = [way_to(worker), rpc.rpc_sync(worker, way_to, args=(me,))]
        is_known = all(found and "has not said" not in why for found, why in ways)
        if is_known and ways[0][0] == way:
            return ways[0][1]
        time.sleep(0.01)
    raise TimeoutError(f"{worker}: {ways}")


def metric(name: str) -> int:
    return int(agent().get_metrics()[f"agent.cuda_ipc_{name}"])


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def released() -> None:
    """Wait until no other worker copies from this one."""
    until(lambda: metric("held_messages") == 0)


def driver_calls(name: str) -> int:
    return len(FakeCuda().calls(name))


# ---- values, order, memory ---------------------------------------------------


def there_and_back(size: int) -> dict[str, int]:
    tensor = ramp(size, "cuda:0")
    sent, received = metric("sent_bytes"), metric("received_bytes")
    with fake_cuda.counted() as counts:
        result = rpc.rpc_async("worker1", plus, args=(tensor, 5)).wait() + 1
    assert_ramp(result, "cuda:0", 6)
    assert metric("sent_bytes") - sent == metric("received_bytes") - received == 4 * size
    return counts


@SIZES
def test_there_and_back(ipc_pair: Group, size: int) -> None:
    counts = ipc_pair.run(there_and_back, size)
    assert counts["device_to_host"] == counts["host_to_device"] == counts["synchronizations"] == 0
    ipc_pair.run(released)
    ipc_pair[1].run(released)


def freed_at_once(size: int) -> None:
    futures = []
    for start in range(20):
        tensor = ramp(size, "cuda:0", start)
        futures.append(rpc.rpc_async("worker1", plus, args=(tensor, 1)))
        del tensor
    junk = [torch.full((size,), -1.0).to("cuda:0") for _ in range(20)]
    for start, future in enumerate(futures):
        assert_ramp(future.wait(), "cuda:0", start + 1)
    del junk


@pytest.mark.parametrize("size", [100, 100_000])
def test_the_sender_may_free_its_tensor(ipc_pair: Group, size: int) -> None:
    """Freed memory is overwritten: if it were freed before the copy, the callee would see other
    values."""
    ipc_pair.run(freed_at_once, size)


def sends_while_held(size: int) -> None:
    """Send a tensor that this worker's streams compute only after the call has returned."""
    tensor = ramp(size, "cuda:0")
    hold(True)
    try:
        tensor = tensor + 1
        future = rpc.rpc_async("worker1", plus, args=(tensor, 1))
        del tensor
        time.sleep(0.3)  # for a receiver that does not wait
        assert not future.done()
    finally:
        hold(False)
    assert_ramp(future.wait(), "cuda:0", 2)


def test_the_receiver_waits_for_the_senders_stream(ipc_pair: Group) -> None:
    ipc_pair.run(sends_while_held, 100_000)


def test_memory_is_held_until_it_is_copied(ipc_pair: Group) -> None:
    """While the receiver's streams stand still, the sender holds the memory; it releases the memory
    after the copy."""
    ipc_pair[1].run(hold, True)
    call = ipc_pair[0].start(keeps_until_copied)
    time.sleep(0.3)
    assert not call.done()
    ipc_pair[1].run(hold, False)
    call.result()


def hold(yes: bool) -> None:
    FakeCuda().hold(yes)


def keeps_until_copied() -> None:
    future = rpc.rpc_async("worker1", plus, args=(ramp(100_000, "cuda:0"), 1))
    until(lambda: metric("held_messages") == 1)
    assert_ramp(future.wait(), "cuda:0", 1)
    released()


KEPT: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> None:
    KEPT.append(tensor)


def push_and_overwrite(to: str) -> None:
    tensor = ramp(100_000, "cuda:0")
    rpc.rpc_sync(to, keep, args=(tensor,))
    tensor.fill_(-1)


def kept_is_whole(device: str) -> None:
    assert_ramp(KEPT.pop(), device, 0)


def test_an_argument_that_is_overwritten_after_the_call(ipc_pair: Group) -> None:
    """The answer has no tensor, so no stream of the caller would wait for the callee's copy."""
    ipc_pair[1].run(hold, True)
    call = ipc_pair[0].start(push_and_overwrite, "worker1")
    time.sleep(0.3)
    assert not call.done()
    ipc_pair[1].run(hold, False)
    call.result()
    ipc_pair[1].run(kept_is_whole, "cuda:1")


def give_parameter() -> torch.Tensor:
    if not KEPT:
        KEPT.append(ramp(100_000, "cuda:0"))
    return KEPT[0]


def overwrite_parameter() -> None:
    KEPT.pop().fill_(-1)


def fetch_then_let_it_be_overwritten() -> None:
    rpc.rpc_sync("worker1", give_parameter)
    free = threading.Event()

    def go_on() -> None:
        free.set()
        hold(False)

    hold(True)
    threading.Timer(0.3, go_on).start()
    parameter = rpc.rpc_sync("worker1", give_parameter)
    assert free.is_set(), "it came before its copy"
    rpc.rpc_sync("worker1", overwrite_parameter)
    assert_ramp(parameter, str(parameter.device), 0)


def test_a_result_that_is_overwritten_after_the_call(ipc_pair: Group) -> None:
    ipc_pair.run(fetch_then_let_it_be_overwritten)


def many_small() -> dict[str, int]:
    fake_cuda.set_delay(0)
    tensors = [ramp(1000, "cuda:0", start) for start in range(200)]
    sent, launched = metric("sent_bytes"), driver_calls("cuLaunchKernel")
    with fake_cuda.counted() as counts:
        results = rpc.rpc_async("worker1", list, args=(tensors,)).wait()
    for start, result in enumerate(results):
        assert_ramp(result, "cuda:0", start)
    assert metric("sent_bytes") - sent == 200 * 4000
    counts["launches"] = driver_calls("cuLaunchKernel") - launched
    fake_cuda.set_delay(fake_cuda.DELAY)
    return counts


def test_200_tensors_are_one_block(ipc_pair: Group) -> None:
    opened = ipc_pair[1].run(driver_calls, "cuIpcOpenMemHandle")
    counts = ipc_pair.run(many_small)
    # One gather and one scatter; torch does them where numba-cuda is not installed.
    assert counts["foreach_copies"] + counts["launches"] == 2
    assert counts["device_to_host"] == counts["host_to_device"] == 0
    assert ipc_pair[1].run(driver_calls, "cuIpcOpenMemHandle") - opened <= 1


def views_and_kinds() -> None:
    whole = ramp(30_000, "cuda:0")
    assert rpc.rpc_sync("worker1", same_memory, args=(whole, whole.view(300, 100).view(-1)))
    mixed = [ramp(3, "cuda:0"), torch.ones(3), ramp(40_000, "cuda:1"), ramp(5, "cuda:0")]
    got = rpc.rpc_sync("worker1", sums_of, args=(mixed,))
    assert got == [("cuda:1", 3.0), ("cpu", 3.0), ("cuda:0", 799980000.0), ("cuda:1", 10.0)]
    column = whole.view(300, 100).t()[3]  # much smaller than its storage
    assert torch.equal(rpc.rpc_sync("worker1", plus, args=(column, 1)).cpu(), column.cpu() + 1)


def parts_that_are_freed() -> None:
    """Send columns and rows of storages that the sender frees at once."""
    sent = metric("sent_bytes")
    futures = []
    for start in range(10):
        table = (ramp(300_000, "cuda:0") + start).view(300, 1000)
        parts = [table.t()[3], table[7], table.t()[:200], table[:100]]
        futures.append(rpc.rpc_async("worker1", numbers_of, args=(parts,)))
        del table, parts
    junk = [torch.full((300_000,), -1.0).to("cuda:0") for _ in range(10)]
    for start, future in enumerate(futures):
        table = (torch.arange(300_000.0) + start).view(300, 1000)
        want = [table.t()[3], table[7], table.t()[:200], table[:100]]
        devices, got = future.wait()
        assert devices == {"cuda:1"}
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    del junk
    elements = 300 + 1000 + 200 * 300 + 100 * 1000
    assert metric("sent_bytes") - sent == 10 * 4 * elements


def numbers_of(tensors: Sequence[torch.Tensor]) -> tuple[set[str], list[torch.Tensor]]:
    return {str(tensor.device) for tensor in tensors}, [tensor.cpu() for tensor in tensors]


def test_parts_of_storages(ipc_pair: Group) -> None:
    ipc_pair.run(parts_that_are_freed)


def sums_of(tensors: Sequence[torch.Tensor]) -> list[tuple[str, float]]:
    return [(str(tensor.device), tensor.cpu().double().sum().item()) for tensor in tensors]


def test_views_and_several_devices(ipc_pair: Group) -> None:
    ipc_pair.run(views_and_kinds)


def in_another_order() -> None:
    assert_ramp(rpc.rpc_sync("worker1", plus, args=(ramp(50_000, "cuda:0"), 5)), "cuda:0", 5)


def test_visible_devices_in_another_order() -> None:
    with devices([{"worker1": SWAPPED}, {}], uuids=("ab", "ba")) as group:
        assert group.run(until_devices, "worker1", "cuda ipc") == ""
        group.run(in_another_order)


# ---- other ways --------------------------------------------------------------


@pytest.mark.parametrize(
    ("uuids", "fake", "why"),
    [
        (("ab", "cd"), {}, "cuda:0 cannot be seen here (CUDA_VISIBLE_DEVICES)"),
        (("Ab", "Ab"), {}, "cuda:0 is a MIG slice"),
    ],
)
def test_devices_that_cannot(uuids: tuple[str, str], fake: dict[str, object], why: str) -> None:
    with devices([{"worker1": {"cuda:0": "cuda:1"}}, {}], uuids=uuids, fake=fake) as group:
        assert why in group.run(until_devices, "worker1", "staged")
        group.run(staged)
    lines = [line for line in group.output().splitlines() if why in line]
    assert len([line for line in lines if 'to worker "worker1"' in line]) == 1, group.output()


def staged() -> None:
    for size in (100, 100_000):
        assert_ramp(rpc.rpc_sync("worker1", plus, args=(ramp(size, "cuda:0"), 5)), "cuda:0", 5)
    assert metric("sent_bytes") == 0


def test_a_trial_that_fails() -> None:
    with devices([{"worker1": {"cuda:0": "cuda:1"}}, {}]) as group:
        group[1].run(fail, "cuIpcOpenMemHandle", ALREADY_MAPPED, 1)
        assert "CUDA_ERROR_ALREADY_MAPPED" in group.run(until_devices, "worker1", "staged")
        group.run(staged)
    assert "offered -> staged; tensors are staged through the host from cuda:0" in group.output()


def fail(function: str, error: int, times: int) -> None:
    FakeCuda().fail(function, error, times)


@pytest.mark.parametrize("off", [0, 1])
def test_the_option(off: int) -> None:
    """If one worker turns CUDA IPC off, neither direction uses it."""
    options = [{"use_cuda_ipc": rank != off} for rank in range(2)]
    with Group(
        2,
        options=[
            {"device_maps": each, **mine}
            for each, mine in zip([{"worker1": SWAPPED}, {}], options, strict=True)
        ],
        env=libcuda.environment(uuids="ab"),
        init=False,
    ) as group:
        fake_cuda.build()
        group.run_all(fake_cuda.install)
        group.init_all()
        assert "use_cuda_ipc is off" in group.run(until_devices, "worker1", "staged")
        group.run(staged)
        assert group.run(metric, "received_bytes") == 0


def test_memory_without_handles(ipc_pair: Group) -> None:
    ipc_pair.run(unexportable)


def unexportable() -> None:
    FakeCuda().exportable(False)
    try:
        large = ramp(1_000_000, "cuda:0")
        sent = metric("sent_bytes")
        result = rpc.rpc_sync("worker1", torch.sub, args=(large, 1))
        assert metric("sent_bytes") == sent
        assert_ramp(result, "cuda:0", -1)
    finally:
        FakeCuda().exportable(True)
    there_and_back(100_000)


# ---- failures ----------------------------------------------------------------


def refuses(text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        rpc.rpc_sync("worker1", plus, args=(ramp(1_000_000, "cuda:0"), 1))
    until(lambda: way_to("worker1")[0] == "staged")
    assert "cannot be opened" in way_to("worker1")[1]
    assert_ramp(rpc.rpc_sync("worker1", plus, args=(ramp(100_000, "cuda:0"), 1)), "cuda:0", 1)
    released()


def test_a_handle_that_cannot_be_opened_after_the_trial() -> None:
    with devices([{"worker1": {"cuda:0": "cuda:1"}}, {}]) as group:
        group.run(until_devices, "worker1", "cuda ipc")
        group[1].run(fail, "cuIpcOpenMemHandle", INVALID_VALUE, 1)
        group.run(refuses, "could not take the message: memory of cuda:0.*CUDA_ERROR_INVALID_VALUE")


def exaggerates() -> None:
    FakeCuda().exaggerate(2)
    refuses("a memory handle claims 8000512 bytes, and maps 4000256")


def test_a_handle_that_lies() -> None:
    with devices([{"worker1": {"cuda:0": "cuda:1"}}, {}]) as group:
        group.run(until_devices, "worker1", "cuda ipc")
        group.run(exaggerates)


def runs_out() -> None:
    tensor = ramp(1_000_000, "cuda:0")
    rpc.rpc_sync("worker1", set_memory, args=(1_000_000,))
    with pytest.raises(RuntimeError, match="could not take the message: CUDA out of memory"):
        rpc.rpc_sync("worker1", plus, args=(tensor, 1))
    rpc.rpc_sync("worker1", set_memory, args=(1 << 60,))
    released()
    there_and_back(100_000)


def test_no_memory_on_the_callee(ipc_pair: Group) -> None:
    ipc_pair.run(runs_out)


def sleep_and_make(seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return ramp(1000, "cuda:1")


def times_out(seconds: float) -> None:
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rpc.rpc_sync("worker1", sleep_and_make, args=(seconds + 0.4,), timeout=seconds)


def test_an_answer_that_comes_too_late_is_released(ipc_pair: Group) -> None:
    sent = ipc_pair[1].run(metric, "sent_bytes")
    for seconds in (0.1, 1.0, 10.0):
        ipc_pair.run(times_out, seconds)
        if ipc_pair[1].run(has_sent, sent + 4000):
            break  # else the time-out came before the function began
    else:
        raise AssertionError("no answer was sent")
    ipc_pair[1].run(released)


def has_sent(size: int) -> bool:
    """Wait a while until so many bytes have been sent; return whether they have."""
    end = time.monotonic() + 10
    while metric("sent_bytes") != size:
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def is_lost() -> None:
    future = rpc.rpc_async("worker1", sums_of, args=([ramp(100_000, "cuda:0")],))
    until(lambda: metric("held_messages") == 1)
    rpc.rpc_async("worker1", end_now)
    with pytest.raises(RuntimeError, match="worker1"):
        future.wait()
    released()
    assert_ramp(rpc.rpc_sync("worker2", plus, args=(ramp(100_000, "cuda:0"), 1)), "cuda:0", 1)


def end_now() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_a_receiver_that_is_killed_while_it_copies() -> None:
    maps = {"cuda:0": "cuda:1"}
    with devices([{"worker1": maps, "worker2": maps}, {}, {}]) as group:
        for worker in ("worker1", "worker2"):
            group.run(until_devices, worker, "cuda ipc")
        group[1].run(hold, True)
        group[1].killed = True
        group.run(is_lost)


def sends_and_dies() -> None:
    hold(True)
    for _ in range(3):
        rpc.rpc_async("worker1", plus, args=(ramp_later(), 1))
    time.sleep(0.3)
    end_now()


def ramp_later() -> torch.Tensor:
    return torch.zeros(100_000, device="cuda:0") + 1


def lives_on() -> None:
    assert_ramp(rpc.rpc_sync("worker1", plus, args=(ramp(100_000, "cuda:0"), 1)), "cuda:0", 1)


def test_a_sender_that_is_killed_before_its_tensor_is_there() -> None:
    maps = {"cuda:0": "cuda:1"}
    with devices([{"worker1": maps}, {}, {"worker1": maps}]) as group:
        for rank in (0, 2):
            group[rank].run(until_devices, "worker1", "cuda ipc")
        assert group[1].run(driver_calls, "cuIpcCloseMemHandle") == 0
        received = group[1].run(metric, "received_bytes")
        group[0].killed = True
        with pytest.raises(Exception, match="worker0 ended"):
            group.run(sends_and_dies)
        group.broken = False
        group[1].run(until_closed, 1)  # the memory of the trial
        # A stream that waited for the tensor would wait for ever.
        assert group[1].run(metric, "received_bytes") == received
        group[2].run(lives_on)


def until_closed(count: int) -> None:
    until(lambda: driver_calls("cuIpcCloseMemHandle") >= count)


def test_handles_that_are_not_used_are_closed() -> None:
    with devices([{"worker1": SWAPPED}, {}], receive_cache_idle=0.1) as group:
        group.run(until_devices, "worker1", "cuda ipc")
        group[1].run(until_nothing_is_open)
        group.run(there_and_back, 100_000)


def until_nothing_is_open() -> None:
    until(lambda: metric("open_allocations") == 0)


def test_a_worker_that_comes_back() -> None:
    with devices([{"worker1": SWAPPED}, {}]) as group:
        group.run(until_devices, "worker1", "cuda ipc")
        group[1].kill()
        group.renew(1).run(fake_cuda.install)
        group[1].init(2, device_maps={}).result()
        group.run(until_devices, "worker1", "cuda ipc")
        group.run(there_and_back, 100_000)
        group.run(released)


def test_it_works_with_nothing_mapped_the_same() -> None:
    """Two workers send and answer at the same time, also to themselves."""
    with devices([{"worker1": SAME}, {"worker0": SAME, "worker1": SAME}]) as group:
        group.run(until_devices, "worker1", "cuda ipc")
        for worker in group:
            worker.run(both_ways)


def both_ways() -> None:
    other = f"worker{1 - rpc.get_worker_info().id}"
    futures = [
        rpc.rpc_async(other, torch.add, args=(ramp(size, "cuda:1"), 1))
        for size in (10, 100_000, 20, 200_000)
    ]
    for future in futures:
        assert_ramp(future.wait(), "cuda:1", 1)
    released()
