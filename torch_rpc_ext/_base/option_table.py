"""The table of options: name, default, unit, meaning and check, each once.

UcxRpcBackendOptions is built on it, and the docs are made from it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Upstream's defaults (torch/csrc/distributed/rpc/rpc_agent.h, tensorpipe_agent.h); a test holds
# them to torch's own constants, which are not read here because that would import torch.
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_INIT_METHOD = "env://"
# More than any program needs on purpose; each costs its caller about a kilobyte.
DEFAULT_MAX_CALLS_IN_FLIGHT = 100_000
# Processes that are started together are ready seconds apart, however short their calls may be.
MINIMUM_INIT_TIMEOUT = 3.0

Check = Callable[[str, Any], Any]


class Option(NamedTuple):
    """One option.

    Attributes:
        name: keyword of UcxRpcBackendOptions, and attribute.
        default: what is used where it is not given.
        check: takes (name, given value), returns the value to keep, raises TypeError or
            ValueError with the name, the value and what to do.
        unit: '' for none.
        doc: what it does.
        keyword: the keyword where it differs from the name; those are for tests only.
    """

    name: str
    default: Any
    check: Check
    unit: str
    doc: str
    keyword: str = ""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def positive_int(name: str, value: Any) -> int:
    """Accept an int above 0."""
    if not _is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return int(value)


def count(name: str, value: Any) -> int:
    """Accept an int, 0 included."""
    if not _is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")
    return int(value)


def byte_count(name: str, value: Any) -> int:
    """Accept a number of bytes, 0 included."""
    if not _is_int(value):
        raise TypeError(f"{name} must be an int (bytes), got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be 0 or more bytes, got {value}")
    if value > sys.maxsize:
        raise ValueError(f"{name} must be less than 2**63 bytes, got {value}")
    return int(value)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number of seconds, got nan")
    return float(value)


def rpc_timeout(name: str, value: Any) -> float:
    """Accept seconds, 0 for none; upstream's text for a negative number."""
    seconds = _seconds(name, value)
    if seconds < 0:
        raise ValueError(f"RPC Timeout must be non-negative, got rpc_timeout={value}")
    return seconds


def duration(name: str, value: Any) -> float:
    """Accept seconds, 0 included."""
    seconds = _seconds(name, value)
    if seconds < 0 or math.isinf(seconds):
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more, got {value}")
    return seconds


def at_least_100_ms(name: str, value: Any) -> float:
    """Accept seconds, 0.1 or more."""
    seconds = duration(name, value)
    if seconds < 0.1:
        raise ValueError(f"{name} must be at least 0.1 s, got {value!r}")
    return seconds


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
    """Accept text or bytes; how long it is is looked at when the agent starts."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"{name} must be a str or bytes, got {type(value).__name__}")  # never the value


def optional_path(name: str, value: Any) -> str | None:
    """Accept a path."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {value!r}")
    return os.fspath(value)


ENCRYPTION = ("off", "between_hosts", "on")  # in the order of csrc's enum


def encryption(name: str, value: Any) -> str:
    """Accept one of ENCRYPTION."""
    if value not in ENCRYPTION:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, ENCRYPTION))}, got {value!r}")
    return str(value)


# What float32 tensors may travel as, in the order of csrc's enum.
WIRE_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def wire_dtype_number(name: str, value: Any) -> int:
    """Return the place of a dtype in WIRE_DTYPES; None means float32.

    Raises:
        TypeError: it is no dtype.
        ValueError: it is another one.
    """
    if value is None:
        return 0
    # By names: torch is not imported here.
    if type(value).__name__ != "dtype":
        raise TypeError(f"{name} must be a torch.dtype, such as torch.bfloat16, got {value!r}")
    if str(value) not in WIRE_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(WIRE_DTYPES)}, got {value!r}")
    return WIRE_DTYPES.index(str(value))


def wire_dtype(name: str, value: Any) -> Any:
    """Accept a dtype of WIRE_DTYPES or None, or worker -> such a dtype."""
    if isinstance(value, Mapping):
        for worker, dtype in value.items():
            wire_dtype_number(f"{name}[{text(f'each key of {name}', worker)!r}]", dtype)
        return dict(value)
    wire_dtype_number(name, value)
    return value


def interface(name: str, value: Any) -> tuple[str, ...]:
    """Accept an interface's name or IP address, several of them comma-separated or as a list.

    Whether they exist is looked up when the agent starts: options may be built elsewhere.
    """
    if value is None:
        return ()
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
    """Accept a port, 'lo-hi' or (lo, hi), both ends included; 0 or None for any port."""
    wrong = f"{name} must be a port, 'lo-hi' or (lo, hi) with 1 <= lo <= hi <= 65535, got {value!r}"
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


def allow_list(name: str, value: Any) -> tuple[str, ...] | None:
    """Accept a list of names, or None for everything.

    Whether they exist is looked up when the agent starts: that imports the modules.
    """
    if value is None:
        return None
    # A string alone would be taken for a list of letters.
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of names, or None for everything, got {value!r}")
    return tuple(text(f"each entry of {name}", entry) for entry in value)


def message_names(name: str, value: Any) -> list[str]:
    """Accept a list of message type names (fault injection)."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} must be a list of message type names, got {value!r}")
    return list(value)


def message_delays(name: str, value: Any) -> dict[str, float]:
    """Accept message type name -> delay in seconds (fault injection)."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must map message type names to seconds, got {value!r}")
    return {text(name, key): duration(name, delay) for key, delay in value.items()}


def default_receive_cache() -> int:
    """Return 4 GiB, or an eighth of the machine's memory where that is less; bytes."""
    return min(4 << 30, _physical_memory() // 8)


def default_receive_budget() -> int:
    """Return an eighth of the memory that this process may use; bytes."""
    return min(_physical_memory(), *_cgroup_limits()) // 8


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
                # Not there at the root; "max" where there is no limit.
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((directory / name).read_text()))
    return limits


def default_init_timeout(timeout: float) -> float:
    """Return how long init_rpc waits where init_timeout is not given, from rpc_timeout; s."""
    return max(float(timeout) or DEFAULT_RPC_TIMEOUT, MINIMUM_INIT_TIMEOUT)


OPTIONS: tuple[Option, ...] = (
    Option(
        "num_worker_threads",
        DEFAULT_NUM_WORKER_THREADS,
        positive_int,
        "",
        "Threads that run the requests of other workers.",
    ),
    Option(
        "rpc_timeout",
        DEFAULT_RPC_TIMEOUT,
        rpc_timeout,
        "s",
        "Time-out of a call that names none itself; 0 for none.",
    ),
    Option(
        "init_method",
        DEFAULT_INIT_METHOD,
        text,
        "",
        "URL of the store through which the workers find each other: env://, tcp://host:port "
        "or file:///path.",
    ),
    Option(
        "init_timeout",
        0.0,
        duration,
        "s",
        "How long init_rpc waits for the other workers; 0 for rpc_timeout, but at least "
        f"{MINIMUM_INIT_TIMEOUT:.0f} s.",
    ),
    Option(
        "interface",
        (),
        interface,
        "",
        "Network interfaces that TCP may use: a name, an IP address, or several "
        "comma-separated. By default the one that routes to MASTER_ADDR.",
    ),
    Option(
        "port_range",
        (0, 0),
        port_range,
        "",
        "Ports to listen on, for firewalls: 'lo-hi' or (lo, hi), two for each worker of a host; "
        "0 for any.",
    ),
    Option(
        "use_cma",
        True,
        boolean,
        "",
        "Move bulk data directly between processes of one host: through memory that they share, or "
        "by process_vm_readv.",
    ),
    Option(
        "use_shared_memory",
        True,
        boolean,
        "",
        "Use shared memory between processes of one host.",
    ),
    Option(
        "use_cuda_ipc",
        True,
        boolean,
        "",
        "Copy CUDA tensors directly between processes of one host, both ways. See "
        "[cuda.md](cuda.md).",
    ),
    Option(
        "keepalive",
        2.0,
        at_least_100_ms,
        "s",
        "After how long a silent worker on another host is suspected to be dead.",
    ),
    Option(
        "secret",
        None,
        secret,
        "",
        "What the workers of a group must know to speak to each other, 16 bytes or more, the same "
        "for all. By default rank 0 draws one and the store gives it out. See "
        "[security.md](security.md).",
    ),
    Option(
        "secret_file",
        None,
        optional_path,
        "",
        "A file that holds it, readable for its owner only.",
    ),
    Option(
        "encryption",
        "off",
        encryption,
        "",
        "Which connections are encrypted: `'off'`, `'between_hosts'` or `'on'`.",
    ),
    Option(
        "receive_cache_bytes",
        None,
        byte_count,
        "bytes",
        "Memory kept for large tensors on their way, at both ends; "
        "by default 4 GiB, or an eighth of the machine's "
        "memory where that is less.",
    ),
    Option(
        "receive_cache_idle",
        30.0,
        at_least_100_ms,
        "s",
        "After how long unused some of that memory is given back to the system. When less than "
        "1/16 of the machine's memory is left, all of it is.",
    ),
    Option(
        "receive_budget",
        None,
        byte_count,
        "bytes",
        "Memory for the tensors of requests that have been received and that no thread serves "
        "yet; more stay with their callers. By default an eighth of the machine's memory, or of "
        "the cgroup's limit; 0 for no limit. See [faults.md](faults.md#load).",
    ),
    Option(
        "max_message_bytes",
        0,
        byte_count,
        "bytes",
        "Largest message to accept; 0 for as much as the receiver's memory holds.",
    ),
    Option(
        "max_calls_in_flight",
        DEFAULT_MAX_CALLS_IN_FLIGHT,
        count,
        "",
        "Calls that this worker may have under way to each other one. One more waits for room, "
        "and fails with an OverloadedError at its time-out; 0 for no limit.",
    ),
    Option(
        "max_bytes_in_flight",
        0,
        byte_count,
        "bytes",
        "The same for the bytes of those calls; a larger call goes alone.",
    ),
    Option(
        "wire_dtype",
        None,
        wire_dtype,
        "",
        "What float32 tensors travel as, to other workers and back: `torch.bfloat16` or "
        "`torch.float16`, half the bytes and less precise, for all workers or by worker: "
        "`{'worker1': torch.bfloat16}`. By default float32. See "
        "[the guide](howto/wire_dtype.md).",
    ),
    Option(
        "integrity",
        False,
        boolean,
        "",
        "Send checksums with the bytes of each call of this worker, and of its answer. A call "
        "whose bytes have changed on the way fails with an IntegrityError. See "
        "[faults.md](faults.md#bytes-that-change-on-the-way).",
    ),
    Option(
        "allow_list",
        None,
        allow_list,
        "",
        "What peers may call here: names of modules, functions, classes and operators "
        "(`aten::add`). By default everything. See [faults.md](faults.md#what-peers-may-call).",
    ),
    Option(
        "messages_to_fail",
        [],
        message_names,
        "",
        "Fault injection: message types of which the first sends fail.",
        keyword="_messages_to_fail",
    ),
    Option(
        "messages_to_lose",
        [],
        message_names,
        "",
        "Fault injection: message types of which the first sends lose the connection, at this end "
        "only.",
        keyword="_messages_to_lose",
    ),
    Option(
        "messages_to_corrupt",
        [],
        message_names,
        "",
        "Fault injection: message types of which the first sends have one bit changed.",
        keyword="_messages_to_corrupt",
    ),
    Option(
        "messages_to_forge",
        [],
        message_names,
        "",
        "Fault injection: message types of which the first sends claim that their large tensors "
        "lie in memory of the receiver.",
        keyword="_messages_to_forge",
    ),
    Option(
        "messages_to_delay",
        {},
        message_delays,
        "s",
        "Fault injection: message type -> delay.",
        keyword="_messages_to_delay",
    ),
    Option(
        "num_fail_sends",
        0,
        byte_count,
        "",
        "Fault injection: how many sends of each such message fail.",
        keyword="_num_fail_sends",
    ),
)

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
