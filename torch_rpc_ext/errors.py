"""The errors of the UCX back end, sorted by what the caller can do about them.

All are RuntimeErrors, because that is what torch.distributed.rpc raises and programs catch.
"""

from __future__ import annotations

__all__ = [
    "CallTimeoutError",
    "IntegrityError",
    "OverloadedError",
    "PeerLostError",
    "RefusedError",
    "RpcError",
    "ShutDownError",
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
