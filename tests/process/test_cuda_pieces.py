"""Large tensors leave a device piece by piece, and are copied to the receiver's device piece by
piece: on the fake devices of tests/support/fake_cuda, between workers that cannot read each other's
memory.

Every copy is late, so a call with many pieces lasts long enough to be observed while it runs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tests.process.group import Group
from tests.process.test_cuda import SAME, assert_ramp, ramp
from tests.support import fake_cuda
from tests.support.backend import needs_ucx

pytestmark = [
    needs_ucx("its CUDA half needs a torch with CUDA, and a GPU"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a real CUDA"),
]

MB = 1 << 20
#: Elements of a tensor of 10 pieces, which are 3 chunks of the transport, the last of them not
#: full.
LARGE = 40 * MB // 4
MAPS = {"worker1": SAME, "worker0": SAME}


@contextlib.contextmanager
def apart(size: int = 2, **options: Any) -> Iterator[Group]:
    """A group whose bulk travels through UCX."""
    fake_cuda.build()
    given = {"device_maps": MAPS, "num_worker_threads": 8, "use_cma": False, **options}
    with Group(size, options=given, init=False) as group:
        group.run_all(fake_cuda.install)
        group.init_all()
        group.run(warm_up)
        yield group


@pytest.fixture(scope="module")
def far_pair() -> Iterator[Group]:
    with apart() as group:
        yield group


@pytest.fixture(scope="module")
def sealed_pair() -> Iterator[Group]:
    with apart(encryption="on") as group:
        yield group


def warm_up() -> None:
    """Make a first call: it leaves before the connection knows which way bulk travels."""
    rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(2),))


# ---- what callees run --------------------------------------------------------


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def echo_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors


def total(tensor: torch.Tensor) -> float:
    return float(tensor.cpu().double().sum())


def copied() -> int:
    return fake_cuda.counts()["host_to_device"]


def slow_result(seconds_until_broken: float) -> torch.Tensor:
    """Return a tensor whose pieces are late, and whose device fails before all have left."""
    tensor = ramp(LARGE, "cuda:0")
    tensor.cpu()
    fake_cuda.set_delay(0.2)
    if seconds_until_broken > 0:
        threading.Timer(seconds_until_broken, fake_cuda.ops.set_broken, [True]).start()
    return tensor


def mend() -> None:
    fake_cuda.ops.set_broken(False)
    fake_cuda.set_delay(fake_cuda.DELAY)


def set_memory(limit: int) -> None:
    fake_cuda.ops.set_memory(limit)


# ---- values ------------------------------------------------------------------


def there_and_back(size: int) -> None:
    for start in range(3):
        assert_ramp(
            rpc.rpc_sync("worker1", echo, args=(ramp(size, "cuda:0", start),)), "cuda:0", start
        )


SIZES = pytest.mark.parametrize("size", [2 * MB, 2 * MB + 1, LARGE, LARGE + 12345])


@SIZES
def test_there_and_back(far_pair: Group, size: int) -> None:
    far_pair.run(there_and_back, size)


@SIZES
def test_there_and_back_encrypted(sealed_pair: Group, size: int) -> None:
    sealed_pair.run(there_and_back, size)


def all_kinds() -> None:
    """Send inline and large tensors, on two devices and the CPU, with views of one storage, in one
    message."""
    sizes = [10, 300_000, 100, 3 * MB, 5, 2_000_000, 0, 700_000, 1]
    tensors = []
    for i, size in enumerate(sizes):
        tensors.append(ramp(size, f"cuda:{i % 2}", i))
    tensors.append(torch.arange(3.0 * MB))
    tensors.append(tensors[3][1:])
    back = rpc.rpc_sync("worker1", echo_all, args=(tensors,))
    for i, size in enumerate(sizes):
        assert len(back[i]) == size
        assert_ramp(back[i], f"cuda:{i % 2}", i)
    assert torch.equal(back[len(sizes)], tensors[len(sizes)])
    assert_ramp(back[len(sizes) + 1], "cuda:1", 4)
    back[3].add_(1)
    assert_ramp(back[len(sizes) + 1], "cuda:1", 5)


def test_all_kinds_in_one_message(far_pair: Group) -> None:
    far_pair.run(all_kinds)


def many_at_once() -> None:
    tensors = [ramp(3 * MB, "cuda:0", start) for start in range(8)]
    futures = [rpc.rpc_async("worker1", plus_one, args=(tensor,)) for tensor in tensors]
    del tensors
    for start, future in enumerate(futures):
        assert_ramp(future.wait(), "cuda:0", start + 1)


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def test_many_at_once_and_freed_at_once(far_pair: Group) -> None:
    """Sends more tensors than may take memory of the device before they are served."""
    far_pair.run(many_at_once)


def half_the_bytes() -> None:
    tensor = ramp(1000, "cuda:0").repeat(5 * MB // 1000)
    assert torch.equal(rpc.rpc_sync("worker1", echo, args=(tensor,)).cpu(), tensor.cpu())


def test_narrowed_on_the_way() -> None:
    with apart(wire_dtype=torch.float16) as group:
        group.run(half_the_bytes)


def test_without_waiting_for_devices(far_pair: Group) -> None:
    assert far_pair.run(counted_echo) == {"synchronizations": 0, "pageable": 0}


def counted_echo() -> dict[str, int]:
    tensor = ramp(LARGE, "cuda:0")
    tensor.cpu()
    with fake_cuda.counted() as counts:
        rpc.rpc_sync("worker1", echo, args=(tensor,))
    return {name: counts[name] for name in ("synchronizations", "pageable")}


# ---- at the same time --------------------------------------------------------


def begin(timeout: float = 30) -> torch.futures.Future[float]:
    """Begin a call whose pieces take 2 s to leave the device; return when some have arrived."""
    before = rpc.rpc_sync("worker1", copied)
    tensor = ramp(LARGE, "cuda:0")
    tensor.cpu()
    fake_cuda.set_delay(0.2)
    future: torch.futures.Future[float]
    future = rpc.rpc_async("worker1", total, args=(tensor,), timeout=timeout)
    end = time.monotonic() + 20
    while rpc.rpc_sync("worker1", copied) == before:
        assert time.monotonic() < end, "nothing arrives"
        time.sleep(0.01)
    assert future.done() is False or timeout < 2
    return future


def overlap(in_pieces: bool) -> None:
    before = rpc.rpc_sync("worker1", copied)
    tensor = ramp(LARGE, "cuda:0")
    want = total(tensor)
    # The tensor takes 2 s to leave the device, in ten copies or in one.
    fake_cuda.set_delay(0.2 if in_pieces else 2)
    try:
        future = rpc.rpc_async("worker1", total, args=(tensor,))
        seen = []
        while not future.done():
            seen.append((time.monotonic(), rpc.rpc_sync("worker1", copied) - before))
            time.sleep(0.02)
        assert future.wait() == want
    finally:
        fake_cuda.set_delay(fake_cuda.DELAY)
    some_but_not_all = [when for when, count in seen if 0 < count < 3]
    seconds = some_but_not_all[-1] - some_but_not_all[0] if some_but_not_all else 0.0
    if in_pieces:
        assert len(seen) > 5, "small calls waited for the large one"
        assert seconds > 0.1, seen
    else:
        assert seconds < 2, seen  # another piece would take 2 s


def test_copies_of_both_devices_and_the_network_overlap(far_pair: Group) -> None:
    """The first two of three chunks are on their way to the callee's device, or there, while the
    last chunk has yet to leave the caller's device."""
    far_pair.run(overlap, True)


def test_checksums_go_first() -> None:
    with apart(integrity=True) as group:
        group.run(overlap, False)


# ---- what goes wrong in the middle -------------------------------------------


def the_caller_breaks() -> None:
    future = begin()
    fake_cuda.ops.set_broken(True)
    with pytest.raises(RuntimeError, match="total on worker .worker1. failed.*illegal memory acc"):
        future.wait()
    mend()
    there_and_back(LARGE)


@pytest.mark.parametrize("pair", ["far_pair", "sealed_pair"])
def test_the_device_of_the_caller_fails(pair: str, request: pytest.FixtureRequest) -> None:
    body = the_caller_breaks if pair == "far_pair" else the_caller_breaks_unseen
    request.getfixturevalue(pair).run(body)


def the_caller_breaks_unseen() -> None:
    """With encryption, nothing is copied to the device before all has arrived."""
    tensor = ramp(LARGE, "cuda:0")
    tensor.cpu()
    fake_cuda.set_delay(0.2)
    future = rpc.rpc_async("worker1", total, args=(tensor,))
    time.sleep(1)
    fake_cuda.ops.set_broken(True)
    with pytest.raises(RuntimeError, match="total on worker .worker1. failed.*illegal memory acc"):
        future.wait()
    mend()
    there_and_back(LARGE)


def the_callee_breaks() -> None:
    begin = time.monotonic()
    # On a loaded machine the frame of the answer may still wait for its first bytes of bulk.
    text = "worker .worker1. (failed.*the sender gave the bulk up|could not send its result).*"
    text += "illegal memory access"
    with pytest.raises(RuntimeError, match=text):
        rpc.rpc_sync("worker1", slow_result, args=(1.0,), timeout=120)
    assert time.monotonic() - begin < 60, "the call ended by its time-out"
    rpc.rpc_sync("worker1", mend)
    there_and_back(LARGE)


@pytest.mark.parametrize("pair", ["far_pair", "sealed_pair"])
def test_the_device_of_the_callee_fails(pair: str, request: pytest.FixtureRequest) -> None:
    """Mostly the frame of the answer has already left: the callee tells the caller that the bulk
    will not come."""
    request.getfixturevalue(pair).run(the_callee_breaks)


def times_out() -> None:
    future = begin(timeout=1.2)
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        future.wait()
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rpc.rpc_sync("worker1", slow_result, args=(0.0,), timeout=1)
    mend()
    rpc.rpc_sync("worker1", mend)
    there_and_back(LARGE)


def test_a_time_out(far_pair: Group) -> None:
    far_pair.run(times_out)


def no_memory_early() -> None:
    """A callee without device memory raises the same error as when it copies everything at once."""
    tensor = ramp(LARGE, "cuda:0")
    rpc.rpc_sync("worker1", set_memory, args=(MB,))
    with pytest.raises(RuntimeError, match="could not take the message: CUDA out of memory"):
        rpc.rpc_sync("worker1", total, args=(tensor,))
    rpc.rpc_sync("worker1", set_memory, args=(1 << 60,))
    there_and_back(LARGE)


def test_no_memory_on_the_callee(far_pair: Group) -> None:
    far_pair.run(no_memory_early)


def the_callee_dies() -> str:
    future = begin()
    with contextlib.suppress(Exception):
        rpc.rpc_sync("worker1", end_at_once)
    with pytest.raises(RuntimeError, match="worker1") as caught:
        future.wait()
    mend()
    assert rpc.rpc_sync("worker2", total, args=(torch.ones(3),)) == 3
    return str(caught.value)


def end_at_once() -> None:
    os._exit(0)


def test_the_callee_dies() -> None:
    with apart(3) as group:
        group[1].killed = True
        group.run(the_callee_dies)


def begin_only() -> None:
    begin()


def test_the_caller_dies() -> None:
    with apart(3) as group:
        group.run(begin_only)
        group[0].kill()
        for _ in range(3):
            assert group[1].run(serves_on, "worker2") == 3


def serves_on(other: str) -> float:
    return float(rpc.rpc_sync(other, total, args=(torch.ones(3),)))


def leave_in_the_middle() -> float:
    future = begin()
    start = time.monotonic()
    rpc.shutdown(graceful=False)
    with pytest.raises(RuntimeError, match="shut down"):
        future.wait()
    return time.monotonic() - start


def test_shutdown_in_the_middle() -> None:
    with apart(3) as group:
        assert group.run(leave_in_the_middle) < 10
        group[0].killed = True  # it has left by itself
        assert group[1].run(serves_on, "worker2") == 3
