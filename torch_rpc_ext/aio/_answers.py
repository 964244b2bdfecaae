"""Answers of functions that did not run on the RPC thread which took the request."""

from __future__ import annotations

import traceback
from typing import Any

from torch.distributed import rpc as _untyped_rpc
from torch.distributed.rpc import internal as _untyped_internal
from torch.futures import Future

# Upstream's functions have no types.
internal: Any = _untyped_internal
rpc: Any = _untyped_rpc


def fail(future: Future[Any], error: BaseException) -> None:
    """Let the caller's call raise an error.

    Future.set_exception() would not do: upstream sends that exception as a result.

    Args:
        future: what an rpc.functions.async_execution function has returned.
        error: what to raise. An error that is no Exception, such as SystemExit, arrives as
            RuntimeError: it must not end the caller's process.
    """
    if not isinstance(error, Exception):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    future.set_result(_remote_exception(error))


def _remote_exception(error: BaseException) -> Any:
    from torch_rpc_ext._upstream import exceptions

    if internal._run_function is exceptions.run_function:  # our agent is running
        return exceptions.describe(error)
    text = f"On {rpc.get_worker_info()}:\n{''.join(traceback.format_exception(error))}"
    return internal.RemoteException(text, type(error))
