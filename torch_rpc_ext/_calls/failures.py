"""Reading the error of a failed call, on any back end, for the commands and the profiler."""

from __future__ import annotations

import re

from torch_rpc_ext._base.printable import printable
from torch_rpc_ext.errors import CallTimeoutError, RpcError


def is_timeout(problem: BaseException) -> bool:
    """Return whether a call had no answer in time, on any back end.

    Args:
        problem: what the call has raised.
    """
    if isinstance(problem, RpcError):
        return isinstance(problem, CallTimeoutError)
    # The text of TENSORPIPE's error begins with upstream's code for a time-out
    # (RPCErrorType::TIMEOUT).
    return str(problem).startswith("RPCErr:1:")


def is_remote(problem: BaseException) -> bool:
    """Return whether the called function raised the error, on any back end.

    Args:
        problem: what the call has raised.
    """
    # TENSORPIPE's text begins with the class of the error.
    return re.match(r"(\w+: )?On WorkerInfo\(", str(problem)) is not None


def brief(problem: BaseException) -> str:
    """Return the one line of an error's text that says what happened, as it may be printed.

    The text of an error that a remote function raised is a traceback: the line behind its last
    indented ones names the error. Of any other error this is the first line, without upstream's
    code ("RPCErr:1:").
    """
    text = str(problem).partition("\n\nAt:\n")[0]  # pybind11 adds the place in our process
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return type(problem).__name__
    if is_remote(problem):
        indented = [line[0].isspace() for line in lines]
        named = [lines[at] for at in range(1, len(lines)) if indented[at - 1] and not indented[at]]
        return printable(named[-1] if named else lines[-1])
    return printable(re.sub(r"^RPCErr:\d+:", "", lines[0]))
