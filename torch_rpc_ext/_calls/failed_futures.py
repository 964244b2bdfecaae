"""Futures that fail, also for the caller of a function that returns one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch_rpc_ext._base.failed_result import FailedResult
from torch_rpc_ext._upstream.exceptions import another

if TYPE_CHECKING:
    from torch.futures import Future


def fail(future: Future[Any], error: Exception) -> None:
    """Complete a future by an error.

    Future.set_exception() does the same for whoever waits in this process. But when an
    rpc.functions.async_execution function returns such a future, upstream sends the exception as
    the result. And what the frames of the error's traceback refer to would stay for ever, if they
    refer to the future: Python's garbage collector cannot look into a future.

    Args:
        future: is not done.
        error: what its wait() and value() raise copies of, without its traceback, cause and
            context.
    """
    future._set_unwrap_func(_raise)
    future.set_result(FailedResult(cast(Exception, another(error))))


def _raise(failed: FailedResult) -> NoReturn:
    raise another(failed.error)  # the frame of wait() refers to the future, too
