"""Checks of options: validators, which accept a value or refuse it, and converters.

A validator has attrs' form: it takes (options, attribute, value) and raises TypeError or ValueError
with the option's name, the value and what to do. A converter takes what the user gave, checks it,
and returns it in the one form that the rest of the package uses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

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

Attribute = attrs.Attribute
WireDtype = Any  # torch.dtype | Mapping[str, torch.dtype | None] | None: torch is not imported here
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def positive_int(_: object, option: Attribute[int], value: Any) -> None:
    """Accept an int above 0."""
    if not _is_int(value):
        raise TypeError(f"{option.name} must be an int, got {value!r}")
    if value <= 0:
        raise ValueError(f"{option.name} must be positive, got {value}")


def count(_: object, option: Attribute[int], value: Any) -> None:
    """Accept an int, 0 included."""
    if not _is_int(value):
        raise TypeError(f"{option.name} must be an int, got {value!r}")
    if value < 0:
        raise ValueError(f"{option.name} must be 0 or more, got {value}")


def byte_count(_: object, option: Attribute[int], value: Any) -> None:
    """Accept a number of bytes, 0 included."""
    if not _is_int(value):
        raise TypeError(f"{option.name} must be an int (bytes), got {value!r}")
    if value < 0:
        raise ValueError(f"{option.name} must be 0 or more bytes, got {value}")
    if value > sys.maxsize:
        raise ValueError(f"{option.name} must be less than 2**63 bytes, got {value}")


def _seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number of seconds, got nan")


def as_float(value: float) -> float:
    """Convert an int to a float and leave everything else to the validator: float() takes text."""
    return float(value) if _is_int(value) else value


def rpc_timeout(_: object, option: Attribute[float], value: Any) -> None:
    """Accept seconds; 0 means no time-out."""
    require_rpc_timeout(value)


def require_rpc_timeout(value: Any) -> None:
    """Raise for a value that is no time-out; a negative number gets upstream's text."""
    _seconds("rpc_timeout", value)
    if value < 0:
        raise ValueError(f"RPC Timeout must be non-negative, got rpc_timeout={value}")


def require_call_timeout(seconds: float) -> None:
    """Raise for a call's time-out that is negative or NaN, as csrc/agent/ucx_agent.cpp does.

    Raises:
        ValueError: the value is neither 0 or more nor UNSET_RPC_TIMEOUT.
    """
    if not seconds >= 0 and seconds != UNSET_RPC_TIMEOUT:
        raise ValueError(
            "timeout must be a number of seconds, 0 for none, or -1 for the default of the "
            f"options, got {seconds:g}"
        )


def duration(_: object, option: Attribute[float], value: Any) -> None:
    """Accept seconds, 0 included."""
    _finite(option.name, value)


def _finite(name: str, value: Any) -> None:
    _seconds(name, value)
    if value < 0 or math.isinf(value):
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more, got {value}")


def at_least_100_ms(_: object, option: Attribute[float], value: Any) -> None:
    """Accept seconds, 0.1 or more."""
    _finite(option.name, value)
    if value < 0.1:
        raise ValueError(f"{option.name} must be at least 0.1 s, got {value!r}")


def text(_: object, option: Attribute[str], value: Any) -> None:
    """Accept a string that is not empty."""
    _text(option.name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def boolean(_: object, option: Attribute[bool], value: Any) -> None:
    """Accept True and False only: 0, 1 and 'no' are mistakes more often than not."""
    if not isinstance(value, bool):
        raise TypeError(f"{option.name} must be True or False, got {value!r}")


def secret(value: str | bytes | None) -> bytes | None:
    """Accept text or bytes; the length is checked when the agent starts."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    # The text never holds the value: it is a secret.
    raise TypeError(f"secret must be a str or bytes, got {type(value).__name__}")


def secret_file(value: str | os.PathLike[str] | None) -> str | None:
    """Accept a path."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"secret_file must be a path, got {value!r}")
    return os.fspath(value)


ENCRYPTION = ("off", "between_hosts", "on")  # in the order of csrc's enum


def encryption(_: object, option: Attribute[str], value: Any) -> None:
    """Accept one of ENCRYPTION."""
    if value not in ENCRYPTION:
        known = ", ".join(map(repr, ENCRYPTION))
        raise ValueError(f"{option.name} must be one of {known}, got {value!r}")


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


def wire_dtype(value: WireDtype) -> WireDtype:
    """Accept a dtype of WIRE_DTYPES, or None, or a mapping from worker names to these."""
    if not isinstance(value, Mapping):
        wire_dtype_number("wire_dtype", value)
        return value
    for worker, dtype in value.items():
        _text("each key of wire_dtype", worker)
        wire_dtype_number(f"wire_dtype[{worker!r}]", dtype)
    return dict(value)


def interface(
    value: str | IpAddress | Iterable[str | IpAddress] | None, name: str = "interface"
) -> tuple[str, ...]:
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


def port_range(value: int | str | tuple[int, int] | None) -> tuple[int, int]:
    """Accept a port, 'lo-hi' or (lo, hi), both ends included; 0 or None for any port."""
    wrong = (
        f"port_range must be a port, 'lo-hi' or (lo, hi) with 1 <= lo <= hi <= 65535, got {value!r}"
    )
    if value is None:
        return (0, 0)
    if isinstance(value, str):
        parts: list[Any] = value.split("-")
        try:
            parts = [int(part) for part in parts]
        except ValueError:
            raise ValueError(wrong) from None
    elif _is_int(value):
        parts = [value]
    elif isinstance(value, (tuple, list)) and all(_is_int(part) for part in value):
        parts = list(value)
    else:
        raise TypeError(wrong)
    if len(parts) == 1:
        parts *= 2
    if len(parts) != 2:
        raise ValueError(wrong)
    low, high = parts
    if (low, high) != (0, 0) and not 1 <= low <= high <= 65535:
        raise ValueError(wrong)
    return (low, high)


def allow_list(value: Sequence[str] | None) -> tuple[str, ...] | None:
    """Accept a list of names, or None for everything.

    The agent checks at its start whether they exist: that check imports the modules.
    """
    if value is None:
        return None
    # A string is iterable too, and would become a list of letters.
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(
            f"allow_list must be a list of names, or None for everything, got {value!r}"
        )
    return tuple(_text("each entry of allow_list", entry) for entry in value)


def message_names(_: object, option: Attribute[list[str]], value: Any) -> None:
    """Accept a list of message type names (fault injection)."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{option.name} must be a list of message type names, got {value!r}")


def message_delays(_: object, option: Attribute[dict[str, float]], value: Any) -> None:
    """Accept message type name -> delay in seconds (fault injection)."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{option.name} must map message type names to seconds, got {value!r}")
    for name, delay in value.items():
        _finite(_text(option.name, name), delay)


def receive_cache(value: int | None) -> int:
    """Replace None by 4 GiB, or by an eighth of the machine's memory where that is less; bytes."""
    return min(4 << 30, _physical_memory() // 8) if value is None else value


def receive_budget(value: int | None) -> int:
    """Replace None by an eighth of the memory that this process may use; bytes."""
    return min(_physical_memory(), *_cgroup_limits()) // 8 if value is None else value


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


def default_init_timeout(timeout: float) -> float:
    """Return how long init_rpc waits where init_timeout is not given, s.

    Args:
        timeout: the option rpc_timeout, s; 0 for none.
    """
    return max(float(timeout) or DEFAULT_RPC_TIMEOUT, MINIMUM_INIT_TIMEOUT)
