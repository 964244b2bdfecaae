"""Waiting for ports of the option port_range that an ended worker has left in TIME_WAIT."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch_rpc_ext import errors
from torch_rpc_ext._group.stores import Deadline, poll

T = TypeVar("T")

logger = logging.getLogger(__name__)

_TIME_WAIT = "06"


def when_free(start: Callable[[], T], ports: tuple[int, int], seconds: float) -> T:
    """Call start(), and again while it finds too few ports of a range and some are in TIME_WAIT.

    The kernel keeps a port for a minute after a worker that had connections there has ended, and
    UCX does not take such a port.

    Args:
        start: raises OverloadedError where too few ports are free.
        ports: the first and the last of the range; (0, 0) for any port.
        seconds: how long to go on. Ctrl-C ends the waiting.

    Returns:
        What start() has returned.

    Raises:
        OverloadedError: too few ports are free, and none is in TIME_WAIT or the time is over.
    """
    deadline = Deadline(seconds)
    here: set[int] = set()
    said = False

    def changed() -> bool:
        return in_time_wait(ports) != here

    while True:
        try:
            return start()
        except errors.OverloadedError:
            here = in_time_wait(ports)
            if not here or deadline.remaining() <= 0:
                raise
        if not said:
            said = True
            logger.warning(
                "fewer than two of the ports %d to %d (port_range) are free, and %d of them are in "
                "TIME_WAIT: waiting up to %g s for them",
                *ports,
                len(here),
                seconds,
            )
        poll(changed, deadline)


def in_time_wait(ports: tuple[int, int]) -> set[int]:
    """Return the ports of a range that this host's kernel has in TIME_WAIT.

    Source: the kernel's Documentation/networking/proc_net_tcp.rst.
    """
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6 has no tcp6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                port = int(local.rpartition(":")[2], 16)
                if state == _TIME_WAIT and ports[0] <= port <= ports[1]:
                    found.add(port)
    return found
