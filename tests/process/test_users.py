"""Workers of different users on one host: the kernel lets the one open the other's memory, and not
the other way round."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group
from tests.support.backend import needs_ucx
from tests.support.ports import free_port

pytestmark = [
    needs_ucx("uses shared memory where it can"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

_SOMEBODY = 54321
# From the kernel's headers prctl.h and capability.h.
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 4, 8
_CAPABILITY_VERSION_3, _CAP_DAC_READ_SEARCH = 0x20080522, 2


def become_somebody() -> None:
    """Become a user who may read all files, as the interpreter may be root's, and nothing more."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(_SOMEBODY, _SOMEBODY, _SOMEBODY)
    os.setresuid(_SOMEBODY, _SOMEBODY, _SOMEBODY)
    reads = 1 << _CAP_DAC_READ_SEARCH
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    assert libc.capset(header, struct.pack("6I", reads, reads, 0, 0, 0, 0)) == 0
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


@contextlib.contextmanager
def root_and_somebody() -> Iterator[Group]:
    with Group(2, init=False, init_method=f"tcp://127.0.0.1:{free_port()}") as group:
        group[1].run(become_somebody)
        for call in [worker.init(2) for worker in group]:
            call.result()
        yield group


def echo(to: str) -> None:
    for elements in (1, 10_000, 5_000_000):
        sent = torch.arange(elements, dtype=torch.float32)
        assert torch.equal(rpc.rpc_sync(to, f.identity, args=(sent,)), sent)


@pytest.mark.parametrize("first", [0, 1], ids=["root calls first", "somebody calls first"])
def test_root_and_somebody(first: int) -> None:
    with root_and_somebody() as group:
        for caller in (first, 1 - first):
            group[caller].run(echo, f"worker{1 - caller}")


def test_root_and_somebody_call_each_other_at_once() -> None:
    with root_and_somebody() as group:
        for call in [group[i].start(echo, f"worker{1 - i}") for i in (0, 1)]:
            call.result()
