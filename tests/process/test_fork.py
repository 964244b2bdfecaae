"""After a fork, both processes keep the values of their tensors.

Received large tensors lie in memory that is shared with the worker that sent them. Neither the next
calls of that worker nor the writes of one process of the fork may change the tensors of the other
process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc
from torch.utils.data import DataLoader, Dataset

from tests.process import functions as f
from tests.process.group import Group
from tests.process.test_handover import region_of
from tests.support.backend import on_ucx

pytestmark = pytest.mark.skipif(
    not on_ucx(), reason="TENSORPIPE: fork beside a live agent hangs (pytorch issue 113600)"
)

SIZE = 2_000_000  # floats: 8 MB
CALLS = 20
kept: list[Any] = []


class Fork:
    """A forked child that runs ``check`` when it is told to."""

    def __init__(self, check: Callable[[], object]) -> None:
        ours, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid != 0:
            os.close(ours)
            return
        code = 1
        try:
            signal.alarm(170)  # ends the child even if the test fails, which takes no longer
            os.close(self._go)
            os.read(ours, 1)
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def check(self) -> None:
        """Let the child check; raise if it has found something."""
        os.write(self._go, b"x")  # closing it would not do: later children have it open
        os.close(self._go)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert code == 0, f"the child ended with {code}"


forks: list[Fork] = []


def numbers(start: float) -> Tensor:
    return torch.arange(SIZE, dtype=torch.float32) + start


def expect(tensor: Tensor, start: float) -> None:
    changed = int((tensor != numbers(start)).sum())
    assert changed == 0, f"{changed} of {SIZE} elements have changed"


def call(to: str, times: int = CALLS) -> None:
    """Make calls: without the fork, each would reuse the memory of the call before it."""
    for i in range(times):
        back = rpc.rpc_sync(to, f.identity, args=(numbers(-i),))
        expect(back, -i)
        made = rpc.rpc_sync(to, f.times, args=(numbers(i), 2.0))
        assert made.equal(numbers(i) * 2)


def keep(tensor: Tensor) -> None:
    kept.append(tensor)


def send(to: str, start: float) -> None:
    rpc.rpc_sync(to, f.identity, args=(numbers(0),))  # opens the connection
    rpc.rpc_sync(to, keep, args=(numbers(start),))


def fork_and_drop(start: float) -> int:
    """Fork: the child keeps a received tensor, and this process drops it. Return the region in
    which it lay."""
    tensor = kept.pop()
    region = region_of(tensor)
    expect(tensor, start)
    forks.append(Fork(lambda: expect(tensor, start)))
    return region


def check_forks() -> None:
    while forks:
        forks.pop().check()


def test_an_argument(pair: Group) -> None:
    pair.run(send, "worker1", 3)
    assert pair[1].run(fork_and_drop, 3) != 0
    pair.run(call, "worker1")
    pair[1].run(check_forks)


def take_result(to: str, function: Callable[..., Tensor], *arguments: Any) -> None:
    call(to, 1)
    kept.append(rpc.rpc_sync(to, function, args=arguments))


@pytest.mark.parametrize("echo", [False, True])
def test_a_result(pair: Group, echo: bool) -> None:
    """The result of an echo lies in this process's own memory, any other result in the callee's."""
    function, arguments = (f.identity, (numbers(4),)) if echo else (f.times, (numbers(2), 2.0))
    pair.run(take_result, "worker1", function, *arguments)
    start = 4 if echo else None
    assert pair.run(fork_result, start) != 0
    pair.run(call, "worker1")
    pair[1].run(call, "worker0")
    pair.run(check_forks)


def fork_result(start: float | None) -> int:
    if start is not None:
        return fork_and_drop(start)
    tensor = kept.pop()

    def check() -> None:
        assert tensor.equal(numbers(2) * 2)

    forks.append(Fork(check))
    return region_of(tensor)


def many(to: str) -> None:
    """More tensors than one message lends: the callee reads the rest, and gives it away with its
    answer."""
    sent = [torch.full((500_000,), float(i)) for i in range(20)]
    for _ in range(3):
        kept[:] = rpc.rpc_sync(to, f.identity, args=(sent,))


def fork_many() -> None:
    tensors = list(kept)
    kept.clear()
    assert all(region_of(tensor) for tensor in tensors)

    def check() -> None:
        assert all(tensor.eq(i).all() for i, tensor in enumerate(tensors))

    forks.append(Fork(check))


def call_many(to: str) -> None:
    for i in range(CALLS):
        back = rpc.rpc_sync(to, f.identity, args=([torch.full((500_000,), -1.0 - i)] * 20,))
        assert all(tensor.eq(-1.0 - i).all() for tensor in back)


def drop_kept() -> None:
    kept.clear()


def test_results_that_were_given_away(pair: Group) -> None:
    pair.run(many, "worker1")
    pair.run(fork_many)
    pair.run(call_many, "worker1")
    pair.run(many, "worker1")
    pair.run(check_forks)
    pair.run(drop_kept)


def write_on_both_sides(start: float) -> None:
    tensor = kept.pop()
    untouched = tensor[: SIZE // 2]

    def check() -> None:
        expect(tensor, start)  # after the parent has written to the whole tensor
        tensor.fill_(-2)
        untouched.fill_(-3)

    fork = Fork(check)
    tensor.fill_(-1)
    fork.check()
    assert tensor.eq(-1).all()
    # A tensor that nobody wrote to before the fork keeps its value in the parent as well.
    fork = Fork(functools.partial(tensor.fill_, -4))
    fork.check()
    assert tensor.eq(-1).all()


@pytest.mark.parametrize("result", [False, True])
def test_writes_after_the_fork_are_each_processs_own(pair: Group, result: bool) -> None:
    if result:
        pair.run(take_result, "worker1", f.identity, numbers(5))
        pair.run(write_on_both_sides, 5)
    else:
        pair.run(send, "worker1", 5)
        pair[1].run(write_on_both_sides, 5)


def child_writes_only(start: float) -> None:
    tensor = kept.pop()
    fork = Fork(functools.partial(tensor.fill_, -1))
    fork.check()
    expect(tensor, start)


def test_the_childs_writes_stay_with_the_child(pair: Group) -> None:
    pair.run(send, "worker1", 6)
    pair[1].run(child_writes_only, 6)


def fork_and_return(tensor: Tensor) -> Tensor:
    start = float(tensor[0])
    forks.append(Fork(lambda: expect(tensor, start)))
    return tensor


def check_is_not_handed_over() -> None:
    call("worker1", 1)
    back = rpc.rpc_sync("worker1", fork_and_return, args=(numbers(7),))
    expect(back, 7)
    back.fill_(-1)
    del back
    call("worker1")
    rpc.rpc_sync("worker1", check_forks)


def test_what_a_child_has_is_not_handed_over(pair: Group) -> None:
    pair.run(check_is_not_handed_over)


def write_fork_write_and_return(tensor: Tensor) -> Tensor:
    tensor[: SIZE // 2] += 1
    forks.append(Fork(lambda: None))
    tensor[SIZE // 2 :] += 1
    tensor[10:20] += 1
    return tensor


def check_writes_travel() -> None:
    call("worker1", 1)
    wanted = numbers(1)
    wanted[10:20] += 1
    for _ in range(3):
        back = rpc.rpc_sync("worker1", write_fork_write_and_return, args=(numbers(0),))
        assert back.equal(wanted)
    rpc.rpc_sync("worker1", check_forks)


def test_what_is_written_around_a_fork_is_returned(pair: Group) -> None:
    pair.run(check_writes_travel)


def child_drops(start: float) -> None:
    """When the child drops a tensor, it tells no worker: the parent still has the tensor."""
    tensor = kept[-1]

    def check() -> None:
        nonlocal tensor
        kept.clear()
        del tensor
        gc.collect()

    Fork(check).check()


def expect_kept(start: float) -> None:
    expect(kept.pop(), start)


def test_the_child_drops_its_tensor_first(pair: Group) -> None:
    pair.run(send, "worker1", 8)
    pair[1].run(child_drops, 8)
    pair.run(call, "worker1")
    pair[1].run(expect_kept, 8)
    pair.run(take_result, "worker1", f.identity, numbers(9))
    pair.run(child_drops, 9)
    pair.run(call, "worker1")
    pair.run(expect_kept, 9)


def check_rref() -> None:
    rref = rpc.remote("worker1", numbers, args=(3,))
    rref.to_here()
    kept.append(rref)
    del rref

    def check() -> None:
        kept.clear()
        gc.collect()

    Fork(check).check()
    call("worker1", 2)  # by now, anything that the child sent would have arrived
    expect(kept.pop().to_here(), 3)


def test_an_rref_of_the_child_is_not_the_parents(pair: Group) -> None:
    pair.run(check_rref)


def grandchild(start: float) -> None:
    tensor = kept.pop()

    def check() -> None:
        fork = Fork(lambda: expect(tensor, start))
        tensor.fill_(-1)
        fork.check()

    forks.append(Fork(check))


def test_a_grandchild(pair: Group) -> None:
    pair.run(send, "worker1", 10)
    pair[1].run(grandchild, 10)
    pair.run(call, "worker1")
    pair[1].run(check_forks)


def shared_files() -> list[str]:
    """Descriptors and maps of this process that belong to the shared memory of the agent."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            found += [path] if "memfd:torch_rpc_ext" in path else []
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if "memfd:torch_rpc_ext" in line and line.split()[1].endswith("s"):
                found.append(line)
    return found


def check_nothing_is_shared() -> None:
    def check() -> None:
        assert shared_files() == []

    assert shared_files() != []
    Fork(check).check()


def test_the_lender_forks(pair: Group) -> None:
    """The child of a lender inherits neither memory that other workers use nor idle blocks."""
    pair.run(send, "worker1", 11)
    pair.run(check_nothing_is_shared)
    pair[1].run(check_nothing_is_shared)
    pair.run(call, "worker1")
    pair[1].run(expect_kept, 11)


def resources() -> tuple[int, int]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return len(os.listdir("/proc/self/fd")), sum("memfd" in line for line in maps)


def fork_and_forget(start: float) -> None:
    tensor = kept.pop()
    Fork(lambda: expect(tensor, start)).check()


def check_resources_stay(pair: Group) -> None:
    before = pair.run_all(resources)
    for i in range(20):
        pair.run(send, "worker1", i)
        pair[1].run(fork_and_forget, i)
    pair.run(call, "worker1", 2)
    after = pair.run_all(resources)
    for one, other in zip(before, after, strict=True):
        assert all(now <= then + 4 for then, now in zip(one, other, strict=True)), (before, after)


def test_descriptors_and_maps_do_not_grow(pair: Group) -> None:
    pair.run(send, "worker1", 0)
    pair[1].run(expect_kept, 0)
    pair.run(call, "worker1", 3)
    check_resources_stay(pair)


class Received(Dataset[Tensor]):
    """A dataset of received tensors, which the workers of a DataLoader return."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]


def check_data_loader() -> None:
    call("worker1", 1)
    data = Received([rpc.rpc_sync("worker1", f.times, args=(numbers(i), 1.0)) for i in range(4)])
    # By name: in a process of a fork server, such as this one, the default is not "fork".
    loader = DataLoader(
        data, batch_size=None, num_workers=2, prefetch_factor=1, multiprocessing_context="fork"
    )
    for epoch in range(2):
        iterator = iter(loader)
        first = next(iterator)
        if epoch == 1:
            data.tensors = [torch.zeros(1)] * 4  # the workers keep theirs
        call("worker1", 4)
        for i, tensor in enumerate([first, *iterator]):
            expect(tensor, i)


def test_workers_of_a_data_loader(pair: Group) -> None:
    pair.run(check_data_loader)


def check_multiprocessing() -> None:
    call("worker1", 1)
    context = multiprocessing.get_context("fork")
    tensor = rpc.rpc_sync("worker1", f.identity, args=(numbers(12),))
    ours, theirs = context.Pipe()

    def body(pipe: Any, mine: Tensor) -> None:
        pipe.recv()
        pipe.send(int((mine != numbers(12)).sum()))

    process = context.Process(target=body, args=(theirs, tensor))
    process.start()
    tensor.zero_()
    del tensor
    call("worker1", 5)
    ours.send("look")
    assert ours.poll(60) and ours.recv() == 0
    process.join(60)
    assert process.exitcode == 0


def test_multiprocessing(pair: Group) -> None:
    pair.run(check_multiprocessing)


def fork_for_another_process(start: float, go: str, verdict: str) -> None:
    """Fork a child that waits for the file ``go`` and writes to the file ``verdict`` what it has
    found."""
    tensor = kept.pop()

    def check() -> None:
        with open(go, encoding="utf-8") as pipe:
            pipe.read()
        changed = int((tensor != numbers(start)).sum())
        with open(verdict, "w", encoding="utf-8") as pipe:
            pipe.write(f"{changed} have changed")

    os.write(Fork(check)._go, b"x")


def test_the_receiver_is_killed_and_its_child_lives_on(tmp_path: Path) -> None:
    go, verdict = str(tmp_path / "go"), str(tmp_path / "verdict")
    os.mkfifo(go)
    os.mkfifo(verdict)
    with Group(3) as group:
        group.run(send, "worker1", 13)
        group[1].run(fork_for_another_process, 13, go, verdict)
        group[1].kill()
        group.run(call, "worker2")
        with open(go, "w", encoding="utf-8"):
            pass
        with open(verdict, encoding="utf-8") as pipe:
            assert pipe.read() == "0 have changed"


def test_the_receiver_shuts_down_and_its_child_lives_on() -> None:
    with Group(2) as group:
        group.run(send, "worker1", 14)
        group[1].run(fork_and_drop, 14)
        calls = [worker.start(rpc.shutdown) for worker in group]
        for one in calls:
            one.result(60)
        group[1].run(check_forks)


def check_forks_under_load(count: int) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def keep_calling() -> None:
        try:
            while not stop.is_set():
                call("worker1", 1)
        except BaseException as error:
            failed.append(error)
            stop.set()

    threads = [threading.Thread(target=keep_calling) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        alive: list[Fork] = []
        for i in range(count):
            tensor = rpc.rpc_sync("worker1", f.identity, args=(numbers(i),))
            argument = rpc.rpc_async("worker1", keep_and_fork, args=(numbers(i),))
            alive.append(Fork(functools.partial(expect, tensor, i)))
            if i % 2 == 0:
                tensor.fill_(-1)
            del tensor
            argument.wait()
            if len(alive) > 3:
                alive.pop(0).check()
        for fork in alive:
            fork.check()
        rpc.rpc_sync("worker1", check_forks)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed, failed


def keep_and_fork(tensor: Tensor) -> None:
    start = float(tensor[0])
    forks.append(Fork(lambda: expect(tensor, start)))
    while len(forks) > 3:
        forks.pop(0).check()


def test_forks_beside_calls(pair: Group) -> None:
    # 5 s on an idle machine of two cores: each fork copies tables, and the calls wait for a core.
    pair[0].start(check_forks_under_load, 10).result(170)
