"""Profiling from another worker adds nothing to the output of a worker."""

from __future__ import annotations

import ctypes
import os
import sys

from torch.distributed import rpc

from tests.process import functions as f
from tests.process.group import Group
from tests.support.backend import needs_ucx
from torch_rpc_ext.profiler import profile, quiet

pytestmark = needs_ucx("is not what is profiled")


def profile_twice() -> None:
    for _ in range(2):
        with profile() as prof:
            rpc.rpc_sync("worker1", f.identity, args=(1,))
        assert prof.recordings["worker1"].operators and not prof.missing


def write_while_a_recording_begins() -> None:
    """Write by C's stdio, by the file descriptor, and by Python while a recording begins; then by
    C's stdio after that."""
    libc = ctypes.CDLL(None)
    to = ctypes.c_void_p.in_dll(libc, "stderr")
    with quiet.first_use():
        libc.fputs(b"stdio within\n", to)
        libc.fputs(
            b"ERROR: External init callback must run in same thread as registerClient (1 != 2)\n",
            to,
        )
        os.write(2, b"descriptor within\n")
        print("Python within", file=sys.stderr, flush=True)
        if os.fork() == 0:
            forked = ctypes.c_void_p.in_dll(libc, "stderr")
            libc.fputs(b"a fork within\n", forked)
            libc.fflush(forked)
            os._exit(0)
        os.wait()
    libc.fputs(b"stdio behind\n", ctypes.c_void_p.in_dll(libc, "stderr"))


def test_nothing_of_the_profiler_is_written() -> None:
    with Group(2) as group:
        group.run(profile_twice)
        printed = [worker.child.log.read_text() for worker in group]
    assert printed == ["", ""]


def test_what_others_write_meanwhile_is_kept() -> None:
    with Group(1) as group:
        group.run(write_while_a_recording_begins)
        lines = group[0].child.log.read_text().splitlines()
    assert sorted(lines) == [
        "Python within",
        "a fork within",
        "descriptor within",
        "stdio behind",
        "stdio within",
    ]
