"""Answers of functions that did not run on the RPC thread which took the request."""

from __future__ import annotations

from typing import Any

from torch.futures import Future

from torch_rpc_ext._upstream import exceptions


def fail(future: Future[Any], error: BaseException) -> None:
    """Let the caller's call raise an error.

    Future.set_exception() would not do: upstream sends that exception as a result. What is sent
    here builds the exception on any back end: a caller of such a function has this package too.

    Args:
        future: what an rpc.functions.async_execution function has returned.
        error: what to raise. An error that is no Exception, such as SystemExit, arrives as
            RuntimeError: it must not end the caller's process.
    """
    if not isinstance(error, Exception):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    future.set_result(exceptions.describe(error))
