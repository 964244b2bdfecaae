"""Every environment variable that this package reads or sets, in one table.

The docs and ``python -m torch_rpc_ext info`` are made from it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

BACKEND = "TORCH_RPC_BACKEND"
UCX = "TORCH_RPC_EXT_UCX"
SECRET = "TORCH_RPC_EXT_SECRET"
SECRET_FILE = "TORCH_RPC_EXT_SECRET_FILE"
LOG = "TORCH_RPC_EXT_LOG"
_LOG_LEVELS = ("debug", "info", "warning", "error")  # as csrc/base/log.cpp reads them


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: the variable.
        meaning: what it does, one sentence.
        values: what it may hold.
        preset: the value that we set before UCX is loaded, only where the user has set none; None
            for a variable that we only read.
        is_secret: no text may hold the value.
    """

    name: str
    meaning: str
    values: str
    preset: str | None = None
    is_secret: bool = False


VARIABLES: tuple[Variable, ...] = (
    Variable(
        BACKEND,
        "Runs programs that ask for TENSORPIPE, or for no back end at all, on UCX.",
        "'ucx'; 'tensorpipe' or empty for no change",
    ),
    Variable(
        UCX,
        "Which UCX to load; a system UCX may have InfiniBand, that of libucx-cu13 has none.",
        "'wheel' (default), 'system', or the folder that holds libucp.so.0",
    ),
    Variable(
        SECRET,
        "The group's secret, where the options secret and secret_file are not given. Other users "
        "of the machine can often see a process's variables: a file is better.",
        "16 bytes or more",
        is_secret=True,
    ),
    Variable(
        SECRET_FILE,
        "File that holds the group's secret, readable for its owner only.",
        "a path",
    ),
    Variable(
        "TORCH_RPC_EXT_LIBCUDA",
        "The CUDA driver to load, where it is not the system's; tests have one without a GPU.",
        "a file, 'libcuda.so.1' by default",
    ),
    Variable(
        LOG,
        "Lowest level of the agent's log lines on standard error; init_rpc refuses another value.",
        "'debug', 'info', 'warning' (default), 'error'",
    ),
    Variable(
        "MASTER_ADDR",
        "With init_method env://, the interface that routes there is the one that TCP uses.",
        "host name or address",
    ),
    Variable(
        "TP_SOCKET_IFNAME",
        "Network interface for TCP, where the option `interface` is not given.",
        "interface names, comma-separated",
    ),
    Variable(
        "GLOO_SOCKET_IFNAME",
        "As TP_SOCKET_IFNAME, which wins over this variable.",
        "interface names, comma-separated",
    ),
    Variable(
        "UCX_MEM_EVENTS",
        "'n' stops UCX from patching mmap, munmap and brk when it loads; left alone where "
        "InfiniBand is there, because its registration cache needs the patches.",
        "'y', 'n'",
        preset="n",
    ),
    Variable(
        "UCX_DEBUG_SIGNO",
        "0 stops UCX from installing a SIGHUP handler when it loads.",
        "a signal number, 0 for none",
        preset="0",
    ),
    Variable(
        "UCX_HANDLE_ERRORS",
        "'none' keeps UCX from replacing the handlers of SIGSEGV and the like, so that Python's "
        "faulthandler stays in charge.",
        "'none', 'bt', 'freeze', 'debug'",
        preset="none",
    ),
)


def check_backend() -> bool:
    """Return whether TORCH_RPC_BACKEND asks for UCX.

    Raises:
        ValueError: the variable holds another value; the text says which values it may hold.
    """
    value = os.environ.get(BACKEND, "").strip().lower()
    if value not in ("", "tensorpipe", "ucx"):
        raise ValueError(
            f"{BACKEND}={os.environ[BACKEND]!r} means nothing: it may be 'ucx' (run "
            "torch.distributed.rpc on UCX) or 'tensorpipe' (change nothing)."
        )
    return value == "ucx"


def check_log_level() -> None:
    """Check TORCH_RPC_EXT_LOG: the C++ code reads it, and takes a wrong value for 'warning'.

    Raises:
        ValueError: the variable holds no level; the text says which there are.
    """
    value = os.environ.get(LOG)
    if value and value.lower() not in _LOG_LEVELS:
        levels = ", ".join(map(repr, _LOG_LEVELS))
        raise ValueError(f"TORCH_RPC_EXT_LOG={value!r} means nothing: it may be one of {levels}.")


def preset_ucx(*, keep_memory_events: bool) -> dict[str, str]:
    """Set the presets of VARIABLES, each only where the user has not set the variable.

    UCX's constructors read these variables while the library is loaded, so setting them later has
    no effect (UCX: ucs/sys/init.c, ucs/config/global_opts.c).

    Args:
        keep_memory_events: leave UCX_MEM_EVENTS alone (InfiniBand needs the events).

    Returns:
        The variables that were set here, with their values.
    """
    done: dict[str, str] = {}
    for variable in VARIABLES:
        if variable.preset is None or variable.name in os.environ:
            continue
        if keep_memory_events and variable.name == "UCX_MEM_EVENTS":
            continue
        os.environ[variable.name] = variable.preset
        done[variable.name] = variable.preset
    return done


def in_force() -> dict[str, str]:
    """Return the variables of VARIABLES that are set, and all other UCX_* variables.

    The value of a secret variable is '...', or '' where the variable is empty.
    """
    secret = {variable.name for variable in VARIABLES if variable.is_secret}
    names = {variable.name for variable in VARIABLES}
    names.update(name for name in os.environ if name.startswith("UCX_"))
    return {
        name: "..." if name in secret and os.environ[name] else os.environ[name]
        for name in sorted(names)
        if name in os.environ
    }
