"""The load: calls of all kinds to random workers, each of which is checked."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

from tests.process import functions as f

#: Time-out of every call, and how much later than that a call may end at most; s.
TIMEOUT = 2.0
GRACE = 2.0
THREADS = 2
BULK = 300_000  # elements: more bytes than travel inside of a frame
#: What the plain RuntimeError says that upstream raises for an RRef whose creation failed.
RREF_TIMED_OUT = "timed out, and it is possible that the RRef on the owner node does not exist"


@dataclass(frozen=True)
class Call:
    """One call, as its caller saw it. Times are those of CLOCK_MONOTONIC, which all processes
    share."""

    kind: str
    targets: tuple[str, ...]
    start: float
    end: float
    outcome: str


@dataclass
class Report:
    """The calls that one worker made in one round, and what was wrong."""

    calls: list[Call] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Clock:
    """Measures for how long this process was stopped: a stopped caller cannot end its calls in
    time."""

    STEP = 0.05

    def __init__(self) -> None:
        self.lost = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._done.wait(self.STEP):
            now = time.monotonic()
            self.lost += max(0.0, now - before - 2 * self.STEP)
            before = now

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def relay(to: str, value: int) -> int:
    """A nested call."""
    return int(rpc.rpc_sync(to, f.identity, args=(value,), timeout=TIMEOUT / 2))


def _small(source: random.Random, to: str, via: str) -> bool:
    value = source.randrange(1 << 30)
    return bool(rpc.rpc_sync(to, f.identity, args=(value,), timeout=TIMEOUT) == value)


def _builtins(source: random.Random, to: str, via: str) -> bool:
    value = source.randrange(1000)
    futures = [
        rpc.rpc_async(to, torch.add, args=(torch.full((8,), float(i)), value), timeout=TIMEOUT)
        for i in range(8)
    ]
    results: list[torch.Tensor] = []
    problem: Exception | None = None
    for future in futures:
        try:
            results.append(future.wait())
        except Exception as error:  # noqa: BLE001
            problem = error  # but every future must end
    if problem is not None:
        raise problem
    return all(bool((r == i + value).all()) for i, r in enumerate(results))


def _bulk(source: random.Random, to: str, via: str) -> bool:
    value = float(source.randrange(1000))
    tensor = torch.full((BULK,), value)
    back = rpc.rpc_sync(to, f.times, args=(tensor, 2.0), timeout=TIMEOUT)
    return bool((back == 2 * value).all())


def _rref(source: random.Random, to: str, via: str) -> bool:
    value = source.randrange(1 << 30)
    rref = rpc.remote(to, f.identity, args=(value,), timeout=TIMEOUT)
    return bool(rref.to_here(timeout=TIMEOUT) == value)


def _nested(source: random.Random, to: str, via: str) -> bool:
    value = source.randrange(1 << 30)
    return bool(rpc.rpc_sync(via, relay, args=(to, value), timeout=TIMEOUT) == value)


Kind = Callable[[random.Random, str, str], bool]
#: Each kind of call, and how many time-outs it may take one after another.
KINDS: dict[str, tuple[Kind, int]] = {
    "small": (_small, 1),
    "builtins": (_builtins, 1),
    "bulk": (_bulk, 1),
    "rref": (_rref, 2),
    "nested": (_nested, 1),
}


def run(others: list[str], seconds: float, seed: int) -> Report:
    """Call from several threads for ``seconds``, and check every call."""
    clock, report, lock = Clock(), Report(), threading.Lock()
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        source = random.Random(f"{seed}/{number}")
        while time.monotonic() < end:
            call, wrong = _one(source, others, clock)
            with lock:
                report.calls.append(call)
                report.wrong.extend(wrong)
            time.sleep(0.005)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 4 * (TIMEOUT + GRACE) + clock.lost)
        if thread.is_alive():
            report.wrong.append("a call does not end")
    clock.stop()
    return report


def _one(source: random.Random, others: list[str], clock: Clock) -> tuple[Call, list[str]]:
    from torch_rpc_ext.errors import RpcError

    kind = source.choice(list(KINDS))
    function, timeouts = KINDS[kind]
    to, via = source.choice(others), source.choice(others)
    targets = (to, via) if kind == "nested" else (to,)
    start, lost = time.monotonic(), clock.lost
    wrong: list[str] = []
    try:
        outcome = "right" if function(source, to, via) else "WRONG"
    except RpcError as error:
        outcome = type(error).__name__
    except Exception as error:  # noqa: BLE001  no error may end the load
        upstreams = isinstance(error, RuntimeError) and RREF_TIMED_OUT in str(error)
        outcome = "RRef timed out" if upstreams else "UNTYPED"
        if not upstreams:
            wrong.append(f"{kind} to {targets}: untyped {error!r}")
    stop = time.monotonic()
    took = stop - start - (clock.lost - lost)
    if outcome == "WRONG":
        wrong.append(f"{kind} to {targets}: a wrong result")
    if took > timeouts * TIMEOUT + GRACE:
        wrong.append(f"{kind} to {targets}: ended after {took:.1f} s with {outcome}")
    return Call(kind, targets, start, stop, outcome), wrong


def serves(others: list[str]) -> None:
    """Check that all other workers answer, also those that were started again; after a cut of the
    link this waits until they are connected again."""
    from torch_rpc_ext.errors import PeerLostError

    end = time.monotonic() + 20
    for other in others:
        while True:
            try:
                assert rpc.rpc_sync(other, f.name_here, timeout=20) == other
                break
            except PeerLostError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated() -> int:
    """Bytes taken from malloc() and not given back, in all arenas; 0 before glibc 2.33."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def footprint() -> dict[str, float]:
    """What this process holds while it makes no calls."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    debug: Any = rpc.api._get_current_rpc_agent().get_debug_info()
    return {
        "memory": int(status["RssAnon"].split()[0]) * 1024 / 1e6,
        "allocated": allocated() / 1e6,
        "shared": int(status["RssShmem"].split()[0]) * 1024 / 1e6,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "pending": float(debug["agent.pending_calls"]),
    }


def peers() -> list[dict[str, Any]]:
    """The state of the connections to all other workers."""
    import torch_rpc_ext

    known: list[dict[str, Any]] = torch_rpc_ext.info()["agent"]["peers"]
    return known


def descriptors() -> dict[str, int]:
    """The number of open descriptors of this process, by kind."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            found[re.sub(r":?\[?\d+\]?| .*|(?<=posix_)[0-9a-f]+", "", target)] += 1
    return dict(found)
