"""Answers of functions that did not run on the RPC thread which took the request."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from torch.futures import Future

from torch_rpc_ext._upstream import exceptions

logger = logging.getLogger(__name__)


def answer(future: Future[Any], result: Any) -> None:
    """Complete the caller's call; where the future does not take the result, by that error.

    Raises nothing: the threads that answer serve other calls too.
    """
    try:
        future.set_result(result)
    except BaseException as error:  # noqa: BLE001  upstream looks into the result
        fail(future, error)


def fail(future: Future[Any], error: BaseException) -> None:
    """Let the caller's call raise an error. Raises nothing, as answer().

    Future.set_exception() would not do: upstream sends that exception as a result. What is sent
    here builds the exception on any back end: a caller of such a function has this package too.

    Args:
        future: what an rpc.functions.async_execution function has returned.
        error: what to raise. An error that is no Exception, such as SystemExit, arrives as
            RuntimeError: it must not end the caller's process. So does one whose class raises
            where it is taken apart.
    """
    try:
        if isinstance(error, Exception):
            future.set_result(exceptions.describe(error))
            return
    except BaseException:  # noqa: BLE001  a user's exception may raise anything
        logger.debug("could not describe a %s", type(error).__name__, exc_info=True)
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
        future.set_result(exceptions.describe(RuntimeError(text)))
    except BaseException:
        # The call is answered already, or RPC has ended here and nobody waits.
        logger.debug("could not answer a call", exc_info=True)
