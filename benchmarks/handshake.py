"""What it costs to open a connection: python -m benchmarks.handshake.

Two figures. What both ends compute for the proofs and the keys, in time of the CPU. And the time
from the first call of a fresh connection to its answer, beside a later call: UCX's own connection
set-up is in it, so it is an upper bound of what the handshake adds.
"""

from __future__ import annotations

import statistics
import subprocess
import time

from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group
from tests.support import cxx

WORKERS = 9
SOURCES = (
    "csrc/base/error.cpp",
    "csrc/crypto/crypto.cpp",
    "csrc/transport/ucx/handshake.cpp",
    "csrc/transport/ucx/handshake_session.cpp",
    "csrc/transport/ucx/protocol.cpp",
    "csrc/transport/ucx/secure_channel.cpp",
)


def computed() -> tuple[float, float]:
    """(us of the CPU without encryption, with it), both ends together."""
    program = cxx.build(
        cxx.ROOT / "build" / "handshake_cost",
        {
            "handshake_cost": [
                cxx.ROOT / "tests" / "support" / "handshake_cost.cpp",
                *(cxx.ROOT / source for source in SOURCES),
            ]
        },
        compiler="c++",
        flags=("-O2",),
        libraries=("-lcrypto",),
    )["handshake_cost"]
    plain, encrypted = subprocess.run(
        [program], check=True, capture_output=True, text=True
    ).stdout.split()
    return float(plain), float(encrypted)


def first_and_later() -> tuple[float, float]:
    """Return the medians, over the other workers, of a first call and of a later call, ms."""
    first, later = [], []
    for rank in range(1, WORKERS):
        for took in (first, later):
            start = time.perf_counter()
            rpc.rpc_sync(f"worker{rank}", f.identity, args=(1,))
            took.append((time.perf_counter() - start) * 1e3)
    return statistics.median(first[1:]), statistics.median(later[1:])  # the first one warms up


def main() -> None:
    """Print a line for each."""
    for encryption, cost in zip(("off", "on"), computed(), strict=True):
        # The callers run on rank 1 and above: init and shutdown have opened connections to rank 0
        # only.
        with Group(WORKERS, options={"encryption": encryption}) as group:
            first, later = group.run(first_and_later)
        print(
            f"encryption {encryption:3}  both ends compute {cost:5.0f} us  "
            f"first call {first:5.2f} ms  later call {later:5.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
