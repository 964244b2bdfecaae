"""What a failed call's error says, on any back end: for the commands and the profiler."""

from __future__ import annotations

import re

from torch_rpc_ext.errors import CallTimeoutError, RpcError


def is_timeout(problem: BaseException) -> bool:
    """Return whether a call had no answer in time, on any back end.

    Args:
        problem: what the call has raised.
    """
    if isinstance(problem, RpcError):
        return isinstance(problem, CallTimeoutError)
    # TENSORPIPE's RuntimeErrors begin with upstream's code for it (RPCErrorType::TIMEOUT).
    return str(problem).startswith("RPCErr:1:")


def brief(problem: BaseException) -> str:
    """Return one line of an error's text: what happened, without the way there.

    Args:
        problem: any. Of one that a remote function raised, whose text is a traceback, the line
            that names it; of others the first line, without upstream's mark of its kind.
    """
    lines = [line for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return type(problem).__name__
    if lines[0].startswith("On WorkerInfo("):
        return lines[-1]
    return re.sub(r"^RPCErr:\d+:", "", lines[0])
