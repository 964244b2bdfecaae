"""What grows with the number of workers: python -m benchmarks.scale.

Measures the parts from which docs/design/scale.md reckons a group that no test can start. The
rendezvous of many workers through one store has its workers in threads of one process, so its times
are upper bounds. What a worker holds for each other worker is measured between processes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore, rpc

from tests.process.group import Group
from torch_rpc_ext._group.members import Member, validate
from torch_rpc_ext._group.rendezvous import Rendezvous

#: Workers that meet through one store.
FORMED = (64, 128, 256)
#: Members of a group that one process reads and adds to its agent.
READ = 10_000
#: Processes that all call each other, without shared memory (as on hosts of their own) and with it.
CONNECTED = (9, 25)
PLACES: dict[str, dict[str, Any]] = {
    "one host": {},
    "TCP only": {"use_shared_memory": False, "use_cma": False},
}


def main() -> None:
    """Print the figures."""
    with Group(1) as group:
        address = group[0].run(own_address)
        print(f"an entry in the store: {len(entry(0, 1, address).to_json())} bytes")
        seconds, size = read_group(address)
        print(f"{READ} members are read in {seconds:.2f} s from {size / 1e6:.1f} MB of JSON")
        seconds, grown = group[0].run(add_members, READ)
        print(f"{READ} members are added to an agent in {seconds:.2f} s, {grown / READ:.0f} B each")
    for size in FORMED:
        print(f"{size} workers meet through one TCPStore in {meet(size, address):.2f} s")
    for place, options in PLACES.items():
        memory, fds = per_worker(options)
        print(
            f"{place}: {memory / 1e3:.0f} KB, {fds:.1f} descriptors for each worker that is called"
        )


def entry(rank: int, size: int, address: bytes) -> Member:
    """Return what a worker on a host of its own puts into the store."""
    return Member(
        name=f"worker{rank}",
        rank=rank,
        address=address,
        world_size=size,
        device_count=0,
        device_maps={},
        devices=[],
        wire=1,
        incarnation=f"{rank:032x}",
        host=f"host{rank}/{rank:036x}/pid:[4026531836]",
        pid=os.getpid(),
    )


def own_address() -> bytes:
    """Return the address of the worker that runs this."""
    return bytes(rpc.api._get_current_rpc_agent().address)


def read_group(address: bytes) -> tuple[float, int]:
    """Read a large group's blob; return seconds and bytes."""
    blob = json.dumps([entry(rank, READ, address).to_json() for rank in range(READ)])
    start = time.perf_counter()
    validate([Member.from_json(text) for text in json.loads(blob)], is_static=True)
    return time.perf_counter() - start, len(blob)


def add_members(count: int) -> tuple[float, int]:
    """Add members that are never called to this worker's agent; return seconds and bytes."""
    agent: Any = rpc.api._get_current_rpc_agent()
    address = own_address()
    before, start = private_bytes(), time.perf_counter()
    for rank in range(1, count + 1):
        agent.add_member(f"other{rank}", rank, address, 0)
    found = time.perf_counter() - start, private_bytes() - before
    for rank in range(1, count + 1):
        agent.remove_member(f"other{rank}")  # or shutdown would wait for them
    return found


def meet(size: int, address: bytes) -> float:
    """Form a group of this size and confirm its start; return seconds."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [
        TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=300), wait_for_workers=False)
        for _ in range(size)
    ]

    def join(rank: int) -> None:
        rendezvous = Rendezvous(stores[rank], f"worker{rank}", rank, size, 300)
        rendezvous.join(entry(rank, size, address))
        rendezvous.confirm_start()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def per_worker(options: dict[str, Any]) -> tuple[float, float]:
    """Return the private bytes and the descriptors that a worker holds for each that it calls and
    that calls it: the slope between two sizes of a group."""
    found = []
    for size in CONNECTED:
        with Group(size, options=options) as group:
            group.run_all(call_all, [worker.name for worker in group])
            found.append(mean(group.run_all(held)))
    (memory, fds), (more_memory, more_fds) = found
    more = CONNECTED[1] - CONNECTED[0]
    return (more_memory - memory) / more, (more_fds - fds) / more


def call_all(names: Sequence[str]) -> None:
    """Call each of these workers once."""
    for name in names:
        rpc.rpc_sync(name, torch.add, args=(torch.ones(1), 1))


def held() -> tuple[int, int]:
    """Return this process's private bytes and its descriptors."""
    return private_bytes(), psutil.Process().num_fds()


def private_bytes() -> int:
    """Return the private memory of this process, bytes."""
    return int(psutil.Process().memory_full_info().uss)


def mean(pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the means of the first and of the second numbers."""
    first, second = zip(*pairs, strict=True)
    return sum(first) / len(pairs), sum(second) / len(pairs)


if __name__ == "__main__":
    main()
