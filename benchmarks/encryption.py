"""What encryption costs between two hosts (network namespaces): python -m benchmarks.encryption.

Needs root. Rounds with and without take turns.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group
from tests.support import netns

PORT = "29519"
ROUNDS = 2


def small(count: int) -> float:
    """Median of small calls, us."""
    took = []
    for i in range(count + 200):
        start = time.perf_counter()
        rpc.rpc_sync("worker1", f.identity, args=(1,))
        if i >= 200:  # warm
            took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e6


def echo(megabytes: int, count: int) -> float:
    """Best of several echoes of a tensor, ms."""
    tensor = torch.ones(megabytes * 250_000)
    took = []
    for i in range(count + 1):
        start = time.perf_counter()
        rpc.rpc_sync("worker1", f.identity, args=(tensor,))
        if i:  # warm
            took.append(time.perf_counter() - start)
    return min(took) * 1e3


def main() -> None:
    """Print a line for each round."""
    with netns.two_hosts() as hosts:
        address = hosts[0].ipv4
        for _ in range(ROUNDS):
            for encryption in ("off", "on"):
                with Group(
                    2,
                    hosts=hosts,
                    options={"encryption": encryption},
                    init_method=f"tcp://{address}:{PORT}",
                    env={"MASTER_ADDR": address, "MASTER_PORT": PORT},
                ) as group:
                    print(
                        f"encryption {encryption:3}  "
                        f"400 MB {group.run(echo, 400, 3):6.0f} ms  "
                        f"4 MB {group.run(echo, 4, 20):5.1f} ms  "
                        f"small call {group.run(small, 1500):4.0f} us",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
