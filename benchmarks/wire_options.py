"""What the options wire_dtype and integrity cost: python -m benchmarks.wire_options.

Echoes between two workers of one host, then between two hosts (network namespaces; needs root).
Rounds with each option take turns; before them the speed of the checksum on one core.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.encryption import echo, small
from tests.process.group import Group
from tests.support import native, netns

PORT = "29521"
ROUNDS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "integrity": {"integrity": True},
    "bfloat16": {"wire_dtype": torch.bfloat16},
    "float16": {"wire_dtype": torch.float16},
}


def checksum_speed(size: int) -> float:
    """Best of 5, GB/s."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy()
    checksum = native.base.checksum  # compiled before time counts
    took = []
    for _ in range(5):
        start = time.perf_counter()
        checksum(data)
        took.append(time.perf_counter() - start)
    return size / min(took) / 1e9


def measure(name: str, **place: Any) -> None:
    """Print a line for one option."""
    with Group(2, options=OPTIONS[name], **place) as group:
        print(
            f"{name:10} 400 MB {group.run(echo, 400, 3):6.0f} ms  "
            f"4 MB {group.run(echo, 4, 20):5.1f} ms  "
            f"small call {group.run(small, 1500):4.0f} us",
            flush=True,
        )


def main() -> None:
    """Print all."""
    for size in (64 << 10, 4 << 20, 400 << 20):
        print(f"checksum of {size >> 10:7} KiB  {checksum_speed(size):5.1f} GB/s")
    with ExitStack() as stack:
        for hosts in (None, stack.enter_context(netns.two_hosts())):
            print("one host" if hosts is None else "two hosts")
            place: dict[str, Any] = {}
            if hosts is not None:
                address = hosts[0].ipv4
                place = {
                    "hosts": hosts,
                    "init_method": f"tcp://{address}:{PORT}",
                    "env": {"MASTER_ADDR": address, "MASTER_PORT": PORT},
                }
            for _ in range(ROUNDS):
                for name in OPTIONS:
                    measure(name, **place)


if __name__ == "__main__":
    main()
