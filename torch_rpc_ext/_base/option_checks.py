"""Checks of options, and their defaults.

A check takes the option's name and what the user has given. It returns the value in the one form
that the rest of the package uses, or raises TypeError or ValueError with the option's name, the
value and what to do.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Upstream's defaults (torch/csrc/distributed/rpc/rpc_agent.h, tensorpipe_agent.h). They are copies,
# because reading torch's constants would import torch; a test compares them with torch's.
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_RPC_TIMEOUT = 60.0
UNSET_RPC_TIMEOUT = -1.0  # of a call: the options' rpc_timeout counts
DEFAULT_INIT_METHOD = "env://"
# More calls than a program makes on purpose; a call under way costs its caller about a kilobyte.
DEFAULT_MAX_CALLS_IN_FLIGHT = 100_000
# Processes that are started together are ready seconds apart, so a short rpc_timeout must not
# shorten init_rpc below this, s.
MINIMUM_INIT_TIMEOUT = 3.0
# 30,000 years, s. Upstream's init_rpc makes a timedelta of the option, which holds some more.
MAXIMUM_RPC_TIMEOUT = 1e12
# A year, s: torch's stores take a time-out of more than 292 years, which a clock of C++ cannot
# count, as one that is over.
MAXIMUM_INIT_TIMEOUT = 365 * 24 * 3600.0

# The first numbers that an int and an int64_t of C++ do not hold.
_INT_END, _INT64_END = 1 << 31, 1 << 63

WireDtype = Any  # torch.dtype | Mapping[str, torch.dtype | None] | None: torch is not imported here
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _int(name: str, value: Any, unit: str = "") -> int:
    if not _is_int(value):
        raise TypeError(f"{name} must be an int{unit}, got {value!r}")
    return int(value)


def positive_int(name: str, value: Any) -> int:
    """Accept an int above 0."""
    number = _int(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {number}")
    return _below(name, number, _INT_END)


def count(name: str, value: Any) -> int:
    """Accept an int, 0 included."""
    number = _int(name, value)
    if number < 0:
        raise ValueError(f"{name} must be 0 or more, got {number}")
    return _below(name, number, _INT64_END)


def small_count(name: str, value: Any) -> int:
    """Accept an int that C++ can hold in an int, 0 included."""
    return _below(name, count(name, value), _INT_END)


def byte_count(name: str, value: Any) -> int:
    """Accept a number of bytes, 0 included."""
    number = _int(name, value, " (bytes)")
    if number < 0:
        raise ValueError(f"{name} must be 0 or more bytes, got {number}")
    return _below(name, number, _INT64_END, " bytes")


def _below(name: str, number: int, end: int, unit: str = "") -> int:
    if number >= end:
        raise ValueError(f"{name} must be less than 2**{end.bit_length() - 1}{unit}, got {number}")
    return number


def seconds(name: str, value: Any) -> float:
    """Accept a number that is not NaN."""
    # float() would take text and bool, too.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number of seconds, got nan")
    return float(value)


def rpc_timeout(name: str, value: Any) -> float:
    """Accept seconds; 0 means no time-out. A negative number gets upstream's text."""
    if seconds(name, value) < 0:
        raise ValueError(f"RPC Timeout must be non-negative, got {name}={value}")
    if value > MAXIMUM_RPC_TIMEOUT:
        raise ValueError(
            f"{name} must be at most {MAXIMUM_RPC_TIMEOUT:g} s, or 0 for none, got {value}"
        )
    return float(value)


def duration(name: str, value: Any) -> float:
    """Accept seconds, 0 included."""
    if seconds(name, value) < 0 or math.isinf(value):
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more, got {value}")
    return float(value)


def at_least_100_ms(name: str, value: Any) -> float:
    """Accept seconds, 0.1 or more."""
    if duration(name, value) < 0.1:
        raise ValueError(f"{name} must be at least 0.1 s, got {float(value)!r}")
    return float(value)


def text(name: str, value: Any) -> str:
    """Accept a string that is not empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def boolean(name: str, value: Any) -> bool:
    """Accept True and False only: 0, 1 and 'no' are mistakes more often than not."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def secret(name: str, value: Any) -> bytes | None:
    """Accept text or bytes; the length is checked when the agent starts."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    # The text never holds the value: it is a secret.
    raise TypeError(f"{name} must be a str or bytes, got {type(value).__name__}")


def secret_file(name: str, value: Any) -> str | None:
    """Accept a path."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {value!r}")
    path: str = os.fspath(value)
    return path


ENCRYPTION = ("off", "between_hosts", "on")  # in the order of csrc's enum


def encryption(name: str, value: Any) -> str:
    """Accept one of ENCRYPTION."""
    if value not in ENCRYPTION:
        known = ", ".join(map(repr, ENCRYPTION))
        raise ValueError(f"{name} must be one of {known}, got {value!r}")
    return ENCRYPTION[ENCRYPTION.index(value)]  # a member of a (str, Enum) has another str()


# What float32 tensors may travel as, in the order of csrc's enum.
WIRE_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def wire_dtype_number(name: str, value: Any) -> int:
    """Return the index of a dtype in WIRE_DTYPES; None means float32.

    Raises:
        TypeError: the value is no dtype.
        ValueError: the dtype is not in WIRE_DTYPES.
    """
    if value is None:
        return 0
    # Compared by name, because this module must not import torch.
    if type(value).__name__ != "dtype":
        raise TypeError(f"{name} must be a torch.dtype, such as torch.bfloat16, got {value!r}")
    if str(value) not in WIRE_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(WIRE_DTYPES)}, got {value!r}")
    return WIRE_DTYPES.index(str(value))


def wire_dtype(name: str, value: Any) -> WireDtype:
    """Accept a dtype of WIRE_DTYPES, or None, or a mapping from worker names to these."""
    if not isinstance(value, Mapping):
        wire_dtype_number(name, value)
        return value
    for worker, dtype in value.items():
        text(f"each key of {name}", worker)
        wire_dtype_number(f"{name}[{worker!r}]", dtype)
    return dict(value)


def interface(name: str, value: Any) -> tuple[str, ...]:
    """Accept names and IP addresses of interfaces: one, several comma-separated, or a list.

    The agent checks at its start whether they exist: options may be built on another host.
    """
    if value is None:
        return ()
    if isinstance(value, (ipaddress.IPv4Address, ipaddress.IPv6Address)):
        value = str(value)
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise TypeError(
            f"{name} must be an interface's name or IP address, or a list of them, got {value!r}"
        )
    result: list[str] = []
    for item in items:
        if isinstance(item, (ipaddress.IPv4Address, ipaddress.IPv6Address)):
            item = str(item)
        if not isinstance(item, str):
            raise TypeError(f"{name} must hold names and IP addresses, got {item!r}")
        if not item.strip():
            raise ValueError(f"{name} holds an empty entry, got {value!r}")
        result.append(item.strip())
    return tuple(result)


def port_range(name: str, value: Any) -> tuple[int, int]:
    """Accept 'lo-hi' or (lo, hi), both ends included, or 0 or None for any port."""
    wrong = (
        f"{name} must be 'lo-hi' or (lo, hi) with 1 <= lo < hi <= 65535, because a worker needs "
        f"two ports or more, or 0 for any port; got {value!r}"
    )
    if isinstance(value, str):
        try:
            parts = [int(part) for part in value.split("-")]
        except ValueError:
            raise ValueError(wrong) from None
    elif value is None:
        parts = [0]
    elif _is_int(value):
        parts = [value]
    elif isinstance(value, (tuple, list)) and all(_is_int(part) for part in value):
        parts = list(value)
    else:
        raise TypeError(wrong)
    if parts in ([0], [0, 0]):
        return (0, 0)
    if len(parts) != 2 or not 1 <= parts[0] < parts[1] <= 65535:
        raise ValueError(wrong)
    return (parts[0], parts[1])


def allow_list(name: str, value: Any) -> tuple[str, ...] | None:
    """Accept a list of names, or None for everything.

    The agent checks at its start whether they exist: that check imports the modules.
    """
    if value is None:
        return None
    # A string is iterable too, and would become a list of letters.
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of names, or None for everything, got {value!r}")
    return tuple(text(f"each entry of {name}", entry) for entry in value)


def message_names(name: str, value: Any) -> list[str]:
    """Accept a list of message type names (fault injection)."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} must be a list of message type names, got {value!r}")
    return list(value)


def message_delays(name: str, value: Any) -> dict[str, float]:
    """Accept message type name -> delay in seconds, or None for none (fault injection)."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map message type names to seconds, got {value!r}")
    return {text(name, kind): duration(kind, delay) for kind, delay in value.items()}


def receive_cache(name: str, value: Any) -> int:
    """Replace None by 4 GiB, or by an eighth of the machine's memory where that is less; bytes."""
    return byte_count(name, min(4 << 30, _physical_memory() // 8) if value is None else value)


def receive_budget(name: str, value: Any) -> int:
    """Replace None by an eighth of the memory that this process may use; bytes."""
    if value is None:
        value = min(_physical_memory(), *_cgroup_limits()) // 8
    return byte_count(name, value)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limits() -> list[int]:
    """Return the limits of this process's cgroup and of those above it; bytes.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, memory.max; for version 1
    cgroup-v1/memory.rst, memory.limit_in_bytes.
    """
    limits = [sys.maxsize]
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return limits
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        for directory in (here, *here.parents):
            if directory.is_relative_to(root):
                # The root has no such file; the file holds "max" where there is no limit.
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((directory / name).read_text()))
    return limits


def effective_init_timeout(init_timeout: float, rpc_timeout: float) -> float:
    """Return how long init_rpc waits for the other workers, s.

    Args:
        init_timeout: the option of that name, s; 0 if it is not given.
        rpc_timeout: the option of that name, s; 0 for none.
    """
    seconds = init_timeout or max(rpc_timeout or DEFAULT_RPC_TIMEOUT, MINIMUM_INIT_TIMEOUT)
    return min(float(seconds), MAXIMUM_INIT_TIMEOUT)
