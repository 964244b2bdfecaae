"""The errors of the UCX back end, sorted by what the caller can do about them.

All are RuntimeErrors, because torch.distributed.rpc raises RuntimeErrors and programs catch these::

    from torch_rpc_ext import errors

    try:
        weights = rpc.rpc_sync("ps", fetch, timeout=5)
    except errors.PeerLostError as lost:
        restart(lost.worker)  # or go on without that worker
    except (errors.CallTimeoutError, errors.OverloadedError, errors.IntegrityError):
        weights = rpc.rpc_sync("ps", fetch, timeout=60)  # may run twice: RetryPolicy does this
    except errors.RefusedError as refused:
        sys.exit(f"{refused}")  # says what to change in the program or in the group
    except errors.ShutDownError:
        return  # "ps" is at its rpc.shutdown()
    except errors.NotInGroupError:
        wait()  # "ps" has left this dynamic group, or has still to join it
    except errors.RpcError as other:
        logger.error("the call failed: %s", other)  # the base class of all these errors
"""

from __future__ import annotations

__all__ = [
    "CallTimeoutError",
    "IntegrityError",
    "NotInGroupError",
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
        worker: the name of the worker that the error is about, None where there is none.
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
    """The other worker, or this one, refused the call. Fix the request."""


class OverloadedError(RpcError):
    """A limit was reached. Wait, then try again."""


class ShutDownError(RpcError):
    """This worker or the other one is shutting down. Give up."""


class NotInGroupError(RpcError):
    """The dynamic group has no such worker now. Wait until the worker joins, or correct the name.

    A worker that has left may join again. In a static group, where nobody joins later, a worker
    that is unknown is a RefusedError.
    """


class IntegrityError(RpcError):
    """Bytes of the call, or of its answer, changed on their way (option integrity).

    Try again, and have the hardware looked at. A program that writes to a tensor before the call
    that sends the tensor is over gets this error too.
    """
