"""The self-test: two processes of this host exchange calls and a tensor, and time this."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["echo", "main", "nothing", "run"]

_CALLS = 200
_TENSOR_BYTES = 64_000_000
_ECHOES = 5
# Not by `-m`: then the functions would be in __main__, where the other process does not find them.
_WORKER = "import sys; from torch_rpc_ext.cli import selftest; selftest.main(sys.argv[1:])"
_PATIENCE = 60.0  # s, for the whole test


def run(*, interface: str | None = None) -> dict[str, Any]:
    """Start two workers and measure.

    Args:
        interface: as the option `interface`.

    Returns:
        ``latency_us`` (median of an empty rpc_sync), ``bandwidth_gb_s`` (64 MB there and back,
        both counted), ``control`` and ``bulk`` (the transports), ``why``; or ``error``.
    """
    with tempfile.TemporaryDirectory(prefix="torch_rpc_ext-") as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(rank), folder]
                + ([interface] if interface else []),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        end = time.monotonic() + _PATIENCE
        try:
            outputs = [w.communicate(timeout=max(1.0, end - time.monotonic())) for w in workers]
        except subprocess.TimeoutExpired:
            return {"error": f"the two processes did not finish within {_PATIENCE:g} s"}
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    for worker, (_, problem) in zip(workers, outputs, strict=True):
        if worker.returncode != 0:
            lines = problem.strip().splitlines() or [f"exit status {worker.returncode}"]
            return {"error": lines[-1]}
    result: dict[str, Any] = json.loads(outputs[0][0].strip().splitlines()[-1])
    return result


def nothing() -> None:
    """Do nothing; a call of this is timed."""


def echo(tensor: Any) -> Any:
    """Return the tensor."""
    return tensor


def _work(rank: int, folder: str, interface: str | None) -> dict[str, Any]:
    import torch
    from torch.distributed import rpc as untyped_rpc

    from torch_rpc_ext._lifecycle.info import info
    from torch_rpc_ext.options import UcxRpcBackendOptions

    rpc: Any = untyped_rpc
    rpc.init_rpc(
        f"selftest{rank}",
        backend=rpc.BackendType.UCX,
        rank=rank,
        world_size=2,
        rpc_backend_options=UcxRpcBackendOptions(
            init_method=f"file://{Path(folder) / 'store'}",
            interface=interface,
            init_timeout=_PATIENCE / 2,
        ),
    )
    result: dict[str, Any] = {}
    if rank == 0:
        latencies = []
        for _ in range(_CALLS):
            begin = time.perf_counter()
            rpc.rpc_sync("selftest1", nothing)
            latencies.append(time.perf_counter() - begin)
        tensor = torch.ones(_TENSOR_BYTES // 4)
        durations = []
        for _ in range(_ECHOES):
            begin = time.perf_counter()
            back = rpc.rpc_sync("selftest1", echo, args=(tensor,))
            durations.append(time.perf_counter() - begin)
        if not torch.equal(back, tensor):
            raise RuntimeError("the tensor came back changed")
        agent = info()["agent"]
        peers = {peer["worker"]: peer for peer in agent["peers"]}
        peer: dict[str, str] = peers.get("selftest1", {})
        result = {
            "latency_us": statistics.median(latencies) * 1e6,
            "bandwidth_gb_s": 2 * _TENSOR_BYTES / statistics.median(durations) / 1e9,
            "control": peer.get("control", ""),
            "bulk": peer.get("bulk", ""),
            "why": peer.get("why", ""),
        }
    rpc.shutdown()
    return result


def main(arguments: list[str]) -> None:
    """Run one of the two workers; print the result.

    Args:
        arguments: rank, folder for the store, and the interface if one was given.
    """
    rank, folder, *interface = arguments
    print(json.dumps(_work(int(rank), folder, interface[0] if interface else None)))
