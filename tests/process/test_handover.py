"""Large tensors are lent and handed over instead of being read from the other process, without any
effect on their values.

This happens from the second call on, because at the first call the connection is not open yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group, workers
from tests.support.backend import needs_ucx

SIZE = 600_000  # floats: more than the least that is lent
kept: list[Any] = []


def region_of(tensor: Tensor) -> int:
    """The inode of the shared memory in which a tensor lies; 0 where it lies in other memory."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            addresses, _, _, _, inode, *path = line.split()
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if begin <= tensor.data_ptr() < end:
                return int(inode) if path and "memfd:torch_rpc_ext" in path[0] else 0
    return 0


def echo_and_region(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, region_of(tensor)


def numbers(start: float) -> Tensor:
    return torch.arange(SIZE, dtype=torch.float32) + start


def warm_up(to: str = "worker1") -> None:
    rpc.rpc_sync(to, f.identity, args=(numbers(0),))


def check_is_handed_over() -> None:
    warm_up()
    sent = numbers(1)
    back, region = rpc.rpc_sync("worker1", echo_and_region, args=(sent,))
    assert region != 0 and region_of(back) == region  # the same memory in both processes
    assert region_of(sent) == 0 and back.equal(sent)


def check_result_is_lent() -> None:
    warm_up()
    doubled = rpc.rpc_sync("worker1", f.times, args=(numbers(1), 2.0))
    assert region_of(doubled) != 0 and doubled.equal(numbers(1) * 2)


@needs_ucx("copies")
def test_a_result_is_lent(pair: Group) -> None:
    pair.run(check_result_is_lent)


def open_regions() -> set[int]:
    """The regions of which this process has descriptors: its own, and those of others that it has
    mapped."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    return found


def keep(tensor: Tensor) -> int:
    kept.append(tensor)
    return region_of(tensor)


def value_kept(i: int) -> float:
    return float(kept[i][0])


def drop_kept() -> None:
    kept.clear()


def check_more_than_there_are_blocks(count: int) -> None:
    warm_up()
    regions = [rpc.rpc_sync("worker1", keep, args=(numbers(i),)) for i in range(count)]
    lent = [region for region in regions if region in open_regions()]
    # The callee reads the rest, as it does where no memory can be shared.
    assert 100 < len(lent) < count and len(set(lent)) == len(lent)
    for i in range(0, count, 7):
        assert rpc.rpc_sync("worker1", value_kept, args=(i,)) == i
    rpc.rpc_sync("worker1", drop_kept)
    deadline = time.monotonic() + 10
    while rpc.rpc_sync("worker1", keep, args=(numbers(0),)) not in open_regions():
        rpc.rpc_sync("worker1", drop_kept)
        assert time.monotonic() < deadline, "blocks do not come back"
        time.sleep(0.05)


@workers(2)
@needs_ucx("copies")
def test_a_callee_that_keeps_its_arguments() -> None:
    check_more_than_there_are_blocks(140)


def check_callers_write_at_once() -> None:
    warm_up()
    futures = []
    for i in range(12):
        sent = numbers(i)
        futures.append((i, rpc.rpc_async("worker1", f.identity, args=(sent,))))
        sent.fill_(-1)  # 2.4 MB: copied before rpc_async() returned
    for i, future in futures:
        assert future.wait().equal(numbers(i))


@needs_ucx("refers to the caller's memory")
def test_what_was_lent_can_be_written_to_at_once(pair: Group) -> None:
    pair.run(check_callers_write_at_once)


def let_messages_expire(fifo: str) -> None:
    """Let calls time out while they wait for memory in which to lend their tensors, and hold the
    GIL meanwhile, until the FIFO has something to read."""
    warm_up()
    for _ in range(2):  # more than two blocks do not fit into the cache
        assert rpc.rpc_sync("worker1", keep, args=(numbers(0),)) in open_regions()
    # Messages of these sizes wait for different times, so each expires on a thread of its own.
    sizes = [mib << 20 for mib in (192, 176, 160, 144)]
    tensors = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for size in sizes]
    with open(fifo, "rb", buffering=0) as told:
        while tensors:
            rpc.rpc_async("worker1", f.nothing, args=(tensors.pop(),), timeout=0.001)
        ctypes.PyDLL(None).read(told.fileno(), ctypes.create_string_buffer(1), 1)


def ask_for_a_second(to: str) -> None:
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert rpc.rpc_sync(to, torch.add, args=(torch.ones(1), 1), timeout=15) == 2


@needs_ucx("lends nothing")
def test_messages_that_expire_need_no_gil(tmp_path: Path) -> None:
    """Their memory is Python's. An operator needs no GIL at its callee."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with Group(2, options=[{"num_worker_threads": 1, "receive_cache_bytes": 8 << 20}, {}]) as group:
        call = group[0].start(let_messages_expire, str(fifo))
        with open(fifo, "wb", buffering=0) as tell:
            try:
                group[1].run(ask_for_a_second, "worker0")
            finally:
                tell.write(b"x")
        call.result()


def keep_large(tensor: Tensor) -> None:
    kept.append(tensor)


def sum_of_large() -> float:
    return float(kept[-1].sum())


def send_large(floats: int) -> None:
    warm_up()
    rpc.rpc_sync("worker1", keep_large, args=(torch.ones(floats),))


@needs_ucx("its copies are private")
def test_arguments_outlive_the_caller() -> None:
    floats = 10_000_000  # 40 MB: a thread of the pool copies them
    with Group(3) as group:
        group[0].run(send_large, floats)
        group[0].kill()
        assert group[1].run(sum_of_large) == floats


def many(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor + 1 for tensor in tensors]


def check_many_in_one_message(count: int) -> None:
    warm_up()
    for _ in range(3):
        sent = [torch.full((50_000,), float(i)) for i in range(count)]
        back = rpc.rpc_sync("worker1", many, args=(sent,))
        assert all(one.eq(i + 1).all() for i, one in enumerate(back))


@pytest.mark.parametrize("count", [2, 16, 17, 300])
def test_many_tensors_in_one_message(pair: Group, count: int) -> None:
    pair.run(check_many_in_one_message, count)


@needs_ucx("copies")
def test_an_echo_is_handed_over(pair: Group) -> None:
    pair.run(check_is_handed_over)


def check_one_block_is_enough() -> None:
    warm_up()
    for _ in range(5):  # until what a new connection opens is open
        rpc.rpc_sync("worker1", echo_and_region, args=(numbers(0),))
    before = rpc.rpc_sync("worker1", resources), resources()
    regions = set()
    for i in range(20):
        back, region = rpc.rpc_sync("worker1", echo_and_region, args=(numbers(i),))
        assert back.equal(numbers(i))
        regions.add(region)
        del back
    assert len(regions) == 1 and 0 not in regions
    after = rpc.rpc_sync("worker1", resources), resources()
    # There may be less: blocks of earlier tests are given back after a while.
    for one, other in zip(before, after, strict=True):
        assert all(now <= then for now, then in zip(other, one, strict=True)), (before, after)


@needs_ucx("copies")
def test_what_came_back_is_lent_again_at_once(pair: Group) -> None:
    """At once: not only after the callee, which returned the memory, has reported that it no longer
    uses it."""
    pair.run(check_one_block_is_enough)


def keep_second(first: Tensor, second: Tensor) -> Tensor:
    kept.append(second)
    return first


def check_one_of_two_comes_back(count: int) -> None:
    warm_up()
    rpc.rpc_sync("worker1", drop_kept)
    for i in range(count):
        back = rpc.rpc_sync("worker1", keep_second, args=(numbers(-i), numbers(i)))
        assert back.equal(numbers(-i))
        back.fill_(-1)
    for i in range(count):
        assert rpc.rpc_sync("worker1", value_kept, args=(i,)) == i
    rpc.rpc_sync("worker1", drop_kept)


def test_one_of_two_comes_back(pair: Group) -> None:
    pair.run(check_one_of_two_comes_back, 12)


def check_many_results_stay_apart(count: int) -> None:
    results = []
    for i in range(count):
        sent = numbers(i)
        back = rpc.rpc_sync("worker1", f.identity, args=(sent,))
        if i % 3 == 0:
            back.mul_(2)  # in this process only
        if i % 4 != 1:
            results.append((back, sent * 2 if i % 3 == 0 else sent.clone()))
        sent.zero_()
    for back, wanted in results:
        assert back.equal(wanted)


def test_results_that_are_kept_and_written_to(pair: Group) -> None:
    pair.run(check_many_results_stay_apart, 40)


def keep_and_return(tensor: Tensor) -> Tensor:
    kept.append(tensor)
    return tensor


def keep_view_and_return(tensor: Tensor) -> Tensor:
    kept.append(tensor[10:20])
    return tensor


def keep_numpy_and_return(tensor: Tensor) -> Tensor:
    kept.append(tensor.numpy())
    return tensor


def keep_graph_and_return(tensor: Tensor) -> Tensor:
    weight = torch.ones(SIZE, requires_grad=True)
    kept.append((weight, (weight * tensor).sum()))  # the graph keeps the tensor
    return tensor


def sum_of_kept() -> float:
    return float(kept[-1].sum())


def kept_gradient() -> float:
    weight, total = kept[-1]
    (gradient,) = torch.autograd.grad(total, weight)
    return float(gradient.sum())


def check_kept(function: Any) -> None:
    warm_up()
    for _ in range(3):
        back = rpc.rpc_sync("worker1", function, args=(torch.ones(SIZE),))
        back.fill_(7)
        there = rpc.rpc_sync("worker1", sum_of_kept)
        assert there == (10.0 if function is keep_view_and_return else SIZE)
    rpc.rpc_sync("worker1", drop_kept)


@pytest.mark.parametrize("function", [keep_and_return, keep_view_and_return, keep_numpy_and_return])
def test_what_the_callee_keeps_is_copied(pair: Group, function: Any) -> None:
    pair.run(check_kept, function)


def check_kept_by_autograd() -> None:
    warm_up()
    for _ in range(3):
        back = rpc.rpc_sync("worker1", keep_graph_and_return, args=(torch.ones(SIZE),))
        back.fill_(7)
        assert rpc.rpc_sync("worker1", kept_gradient) == SIZE
    rpc.rpc_sync("worker1", drop_kept)


def test_what_a_graph_keeps_is_copied(pair: Group) -> None:
    pair.run(check_kept_by_autograd)


def two_views(tensor: Tensor) -> tuple[Tensor, Tensor, int]:
    return tensor[: SIZE // 4 * 3], tensor[SIZE // 4 :], 5


def check_views() -> None:
    warm_up()
    for i in range(4):
        first, second, five = rpc.rpc_sync("worker1", two_views, args=(numbers(i),))
        assert five == 5 and first.equal(numbers(i)[: SIZE // 4 * 3])
        assert second.equal(numbers(i)[SIZE // 4 :])
        # Two views of one storage at the callee are views of one storage here, and the storage can
        # grow.
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        first.resize_(2 * SIZE)
        assert first.numel() == 2 * SIZE


def test_views_and_resize(pair: Group) -> None:
    pair.run(check_views)


def mixed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor, torch.full((SIZE,), 3.0)


def check_mixed() -> None:
    for i in range(4):
        echo, made = rpc.rpc_sync("worker1", mixed, args=(numbers(i),))
        assert echo.equal(numbers(i)) and made.eq(3).all()


def test_beside_a_result_that_is_copied(pair: Group) -> None:
    pair.run(check_mixed)


def check_passed_on() -> None:
    warm_up("worker1")
    warm_up("worker2")
    for i in range(5):
        back = rpc.rpc_sync("worker1", f.identity, args=(numbers(i),))
        third = rpc.rpc_sync("worker2", f.times, args=(back, 2.0))
        back.zero_()
        assert third.equal(numbers(i) * 2)


@workers(3)
def test_a_handed_over_result_is_passed_on() -> None:
    check_passed_on()


def keep_some_results() -> None:
    warm_up()
    for i in range(3):
        kept.append(rpc.rpc_sync("worker1", f.identity, args=(numbers(i),)))


def check_kept_results() -> None:
    for i, back in enumerate(kept):
        assert back.equal(numbers(i))
        back.add_(1)
        assert back.equal(numbers(i + 1))
    kept.clear()


def test_results_outlive_the_worker_that_they_came_from() -> None:
    with Group(3) as group:
        group[0].run(keep_some_results)
        group[1].kill()
        group[0].run(check_kept_results)
        group[0].run(warm_up, "worker2")


def test_results_outlive_rpc() -> None:
    with Group(2) as group:
        group[0].run(keep_some_results)
        calls = [worker.start(rpc.shutdown) for worker in group]
        for call in calls:
            # The callee does not wait for memory that it has given away: this memory stays away.
            call.result(30)
        group[0].run(check_kept_results)


def memory_mapped() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = sum("memfd" in line for line in maps)
    metrics = rpc.api._get_current_rpc_agent().get_metrics()
    return mapped + int(metrics["agent.receive_cache_idle_bytes"])


def check_idle_memory_is_given_back() -> None:
    check_is_handed_over()
    kept = rpc.rpc_sync("worker1", f.identity, args=(numbers(1),))
    time.sleep(1.0)  # when this returns, nothing else is left
    del kept
    deadline = time.monotonic() + 10
    while memory_mapped() or rpc.rpc_sync("worker1", memory_mapped):
        assert time.monotonic() < deadline, "idle memory is still mapped"
        time.sleep(0.1)
    check_is_handed_over()


@workers(2, options={"receive_cache_idle": 0.3})
def test_idle_memory_is_given_back() -> None:
    check_idle_memory_is_given_back()


def resources() -> tuple[int, int]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return len(os.listdir("/proc/self/fd")), sum("memfd" in line for line in maps)


def check_resources_stay() -> None:
    warm_up()
    for i in range(5):
        rpc.rpc_sync("worker1", f.identity, args=(numbers(i),))
    before = resources(), rpc.rpc_sync("worker1", resources)
    for i in range(100):
        rpc.rpc_sync("worker1", f.identity, args=(numbers(i),))
    after = resources(), rpc.rpc_sync("worker1", resources)
    for one, other in zip(before, after, strict=True):
        assert all(now <= then + 4 for now, then in zip(other, one, strict=True)), (before, after)


@needs_ucx("its own resources are not ours to test")
def test_descriptors_and_maps_do_not_grow(pair: Group) -> None:
    pair.run(check_resources_stay)


def keep_echoes() -> None:
    sent = [torch.full((SIZE,), float(i)) for i in range(20)]  # too many to be lent
    for _ in range(3):
        kept[:] = rpc.rpc_sync("worker1", f.identity, args=(sent,))
    assert all(region_of(tensor) for tensor in kept)


def pop_kept() -> list[Tensor]:
    tensors = list(kept)
    kept.clear()
    return tensors


def check_comes_home() -> None:
    before = open_regions()
    for i, tensor in enumerate(rpc.rpc_sync("worker0", pop_kept)):
        assert region_of(tensor) in before and tensor.eq(i).all()
        tensor.fill_(-1)


@needs_ucx("copies")
def test_what_was_given_away_can_come_home_as_a_result(pair: Group) -> None:
    for _ in range(2):
        pair.run(keep_echoes)
        pair[1].run(check_comes_home)


def check_forged(message: str) -> None:
    warm_up()
    with pytest.raises(RuntimeError, match="returns memory that it has not been sent"):
        rpc.rpc_sync("worker1", torch.neg, args=(numbers(1),))
    assert rpc.rpc_sync("worker1", torch.neg, args=(numbers(1),)).equal(-numbers(1)), message


@pytest.mark.parametrize("message", ["SCRIPT_CALL", "SCRIPT_RET"])
@needs_ucx("has no such memory")
def test_memory_that_was_never_sent_cannot_be_returned(message: str) -> None:
    forging = {"messages_to_forge": [message], "num_fail_sends": 1}
    with Group(2, options=[forging, {}] if message == "SCRIPT_CALL" else [{}, forging]) as group:
        group.run(check_forged, message)
