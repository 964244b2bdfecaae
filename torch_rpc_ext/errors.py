"""The errors of the UCX back end, sorted by what the caller can do about them.

All are RuntimeErrors, because that is what torch.distributed.rpc raises and programs catch.
"""

from __future__ import annotations

import re

__all__ = [
    "CallTimeoutError",
    "IntegrityError",
    "OverloadedError",
    "PeerLostError",
    "RefusedError",
    "RpcError",
    "ShutDownError",
    "brief",
    "is_timeout",
]


class RpcError(RuntimeError):
    """A call or an initialisation failed.

    Args:
        message: what happened, to which worker and function, and what to do.
        worker: the name of the worker that it is about, None where there is none.
    """

    worker: str | None

    def __init__(self, message: str = "", *, worker: str | None = None) -> None:
        super().__init__(message)
        self.worker = worker


class PeerLostError(RpcError):
    """The other worker died or cannot be reached. Reconnect or give up."""


class CallTimeoutError(RpcError):
    """No answer in time. Try again if the function is idempotent."""


class RefusedError(RpcError):
    """The other worker, or this one, refused it. Fix the request."""


class OverloadedError(RpcError):
    """A limit was reached. Wait, then try again."""


class ShutDownError(RpcError):
    """This worker or the other one is shutting down. Give up."""


class IntegrityError(RpcError):
    """Bytes of the call, or of its answer, changed on their way (option integrity).

    Try again, and have the hardware looked at. It also comes from a program that writes to a tensor
    before the call that sends it is over.
    """


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
