"""Probes of this host, without UCX: which ways of moving data it allows, and why not others."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torch_rpc_ext._base.environment import UCX

__all__ = [
    "Finding",
    "cuda",
    "direct_copy",
    "findings",
    "infiniband",
    "read_remote",
    "shared_memory",
]

_SHARED_MEMORY = Path("/dev/shm")
_SMALL_SHARED_MEMORY = 64 << 20  # bytes; the 64 MB of a container's default are already tight
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")

# A program that prints its pid and the address of a buffer, then waits while the buffer is read.
_TARGET = (
    "import ctypes, os, sys; buffer = ctypes.create_string_buffer(b'torch_rpc_ext');"
    "print(os.getpid(), ctypes.addressof(buffer), flush=True); sys.stdin.read()"
)


@dataclass(frozen=True)
class Finding:
    """One way of moving data on this host.

    Attributes:
        name: of this way.
        usable: whether this way works.
        why: one sentence.
    """

    name: str
    usable: bool
    why: str


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def findings() -> list[Finding]:
    """Run all probes."""
    return [shared_memory(), direct_copy(), infiniband(), cuda()]


def shared_memory() -> Finding:
    """Look for room in /dev/shm."""
    name = "shared memory"
    try:
        stats = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        return Finding(name, False, f"{_SHARED_MEMORY}: {error.strerror}.")
    free = stats.f_bavail * stats.f_frsize
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return Finding(name, False, f"{_SHARED_MEMORY} cannot be written to.")
    text = f"{free / 2**20:.0f} MiB free in {_SHARED_MEMORY}."
    if free < _SMALL_SHARED_MEMORY:
        return Finding(name, False, f"{text} Give the container more, e.g. docker --shm-size=1g.")
    return Finding(name, True, text)


def direct_copy() -> Finding:
    """Have one child process read the memory of another, as workers do (process_vm_readv)."""
    name = "direct copy between processes (CMA)"
    with _start(_TARGET) as target:
        assert target.stdout is not None and target.stdin is not None
        pid, address = target.stdout.readline().split()
        reader = _start(_READER, pid, address)
        answer = reader.communicate()[0].strip()
        target.stdin.close()
    if answer == "ok":
        return Finding(name, True, "process_vm_readv works between two processes.")
    why = f"process_vm_readv fails: {answer}."
    try:
        scope = _PTRACE_SCOPE.read_text(encoding="ascii").strip()
    except OSError:
        scope = "0"
    if scope != "0":
        why += f" {_PTRACE_SCOPE} is {scope}, so only processes that allow it can be read."
    else:
        why += " A container needs the right: docker --cap-add=SYS_PTRACE."
    return Finding(name, False, why)


_READER = (
    "import sys; from torch_rpc_ext.cli import probes;"
    "print(probes.read_remote(int(sys.argv[1]), int(sys.argv[2])))"
)


def _start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_remote(pid: int, address: int) -> str:
    """Read a few bytes of another process.

    Args:
        pid: the process.
        address: of at least 13 bytes in that process.

    Returns:
        'ok', or the system's text for the error.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(13)
    here = _IoVec(ctypes.addressof(buffer), 13)
    there = _IoVec(address, 13)
    count = libc.process_vm_readv(
        pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), 0
    )
    return "ok" if count == 13 else os.strerror(ctypes.get_errno())


def infiniband() -> Finding:
    """Look for devices, and for a UCX that can use them."""
    # Imported late: the child process that reads memory uses this file too, and needs no torch.
    from torch_rpc_ext._native import loader

    name = "InfiniBand, RoCE"
    devices = loader.infiniband_devices()
    if not devices:
        return Finding(name, False, "this host has no such device.")
    try:
        ucx = loader.ucx()
        transports = loader.load().ucx_transports()
    except ImportError as error:
        return Finding(name, False, str(error))
    if any(device.split(":")[0] in devices for _, device, _ in transports):
        return Finding(name, True, f"{', '.join(devices)}, through {ucx.source} UCX.")
    return Finding(
        name,
        False,
        f"this host has {', '.join(devices)}, but the {ucx.source} UCX cannot use them "
        f"(the wheel's is built without verbs). Install the system's UCX and set {UCX}=system.",
    )


def cuda() -> Finding:
    """Look for CUDA in this torch and on this host, without initialising it."""
    import torch

    name = "CUDA"
    if torch.version.cuda is None:
        return Finding(name, False, f"torch {torch.__version__} is built without CUDA.")
    count = torch.cuda.device_count()
    return Finding(name, count > 0, f"{count} device(s).")
