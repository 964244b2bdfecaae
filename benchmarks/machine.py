"""What the figures were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil


def describe() -> dict[str, Any]:
    """Return machine and versions, without paths, so that the record is the same in any folder."""
    import torch_rpc_ext

    info = torch_rpc_ext.info()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(psutil.virtual_memory().total),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_before": os.getloadavg()[0],
        "wake_up_us": round(_wake_up() * 1e6, 1),
        "memcpy_gb_per_s": round(_memcpy() / 1e9, 1),
        **info["versions"],
        "ucx": info["ucx"].get("version", ""),
        "revision": _revision(),
    }


class Others:
    """How much of the machine others used since this was made.

    Thread: the driver's.
    """

    def __init__(self) -> None:
        self._busy, self._ours = _busy_seconds(), _our_seconds()
        self._idle = float(psutil.cpu_times().idle)

    def share(self) -> float:
        """Return the share, 0 to 1 of all cores; call this when all workers have ended."""
        # Steal time counts as others' use: the host gave it to its other guests.
        busy = _busy_seconds() - self._busy
        total = busy + float(psutil.cpu_times().idle) - self._idle
        ours = _our_seconds() - self._ours
        return min(1.0, max(0.0, (busy - ours) / total)) if total > 0 else 0.0


def _wake_up() -> float:
    """Return how long a process takes to wake another one, s: half of a ping-pong over pipes.

    A small call needs two such wake-ups. On a virtual machine this time differs most from day to
    day.
    """
    there, back = os.pipe(), os.pipe()
    # On two cores: on one core the scheduler may switch between the processes without a wake-up.
    cores = os.sched_getaffinity(0)
    child = os.fork()
    os.sched_setaffinity(0, {max(cores) if child == 0 else min(cores)})
    if child == 0:
        while os.read(there[0], 1) == b"x":
            os.write(back[1], b"x")
        os._exit(0)
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        os.write(there[1], b"x")
        os.read(back[0], 1)
        times.append(time.perf_counter() - start)
    os.sched_setaffinity(0, cores)
    os.write(there[1], b"q")
    os.waitpid(child, 0)
    for end in (*there, *back):
        os.close(end)
    return statistics.median(times) / 2


def _memcpy() -> float:
    """Return the speed of a large copy between pages that are in memory already, bytes/s."""
    source = np.ones(200_000_000, dtype=np.uint8)
    target = source.copy()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(times)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "steal")))


def _our_seconds() -> float:
    # The fork server's times include those of the workers, its children, which it has waited for.
    here = psutil.Process()
    return sum(float(sum(one.cpu_times()[:4])) for one in (here, *here.children()))


def _cpu_model() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _revision() -> str:
    """Return git's short name of the revision, with '+' if files differ from it."""
    here = Path(__file__).parent
    try:
        name, changed = (
            subprocess.run(
                ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name + ("+" if changed else "")
