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
_PATIENCE = 300.0  # s, for the whole test: on a busy machine, importing torch takes a minute
_LOOK = 0.05  # s, between two looks whether the processes have ended


def run(*, interface: str | None = None) -> dict[str, Any]:
    """Start two workers and measure.

    Args:
        interface: as the option `interface`.

    Returns:
        ``latency_us`` (median of an empty rpc_sync), ``bandwidth_gb_s`` (64 MB there and back,
        both counted), ``control`` and ``bulk`` (the transports), ``why``; or ``error``.
    """
    with tempfile.TemporaryDirectory(prefix="torch_rpc_ext-") as folder:
        workers = [_start(rank, folder, interface) for rank in range(2)]
        end = time.monotonic() + _PATIENCE
        try:
            # Until one has failed: the other one may wait for it as long as init_timeout says.
            while None in (codes := [worker.poll() for worker in workers]) and not any(codes):
                if time.monotonic() > end:
                    return {"error": f"the two processes did not finish within {_PATIENCE:g} s"}
                time.sleep(_LOOK)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        for rank, code in enumerate(codes):
            if code:
                problem = _lines(folder, rank, "err") or [f"exit status {code}"]
                return {"error": problem[-1]}
        result: dict[str, Any] = json.loads(_lines(folder, 0, "out")[-1])
        return result


def _start(rank: int, folder: str, interface: str | None) -> subprocess.Popen[bytes]:
    """Start a worker, which writes its output to files: nobody reads while it runs."""
    files = [_output(folder, rank, kind) for kind in ("out", "err")]
    with files[0].open("wb") as out, files[1].open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(rank), folder] + ([interface] if interface else []),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdout=out,
            stderr=err,
        )


def _output(folder: str, rank: int, kind: str) -> Path:
    return Path(folder) / f"{kind}{rank}"


def _lines(folder: str, rank: int, kind: str) -> list[str]:
    return _output(folder, rank, kind).read_text(errors="replace").strip().splitlines()


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
            init_timeout=_PATIENCE,
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
