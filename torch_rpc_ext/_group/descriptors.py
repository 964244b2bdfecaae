"""A look at the process's limit of file descriptors, before UCX needs some."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from torch_rpc_ext import errors

# What UCX opens at its start, 20, and a few for the first connection.
_NEEDED = 24


def require() -> None:
    """Check that enough file descriptors are free for init_rpc.

    Where UCX finds none it says "Input/output error", and at some of its steps it ends the process.

    Raises:
        OverloadedError: too few are free; the text names the limit.
    """
    with contextlib.ExitStack() as opened:
        for free in range(_NEEDED):
            try:
                opened.callback(os.close, os.eventfd(0))
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # UCX will say what is wrong
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise errors.OverloadedError(
                    f"init_rpc needs {_NEEDED} file descriptors, and this process can open only "
                    f"{free} more: {error.strerror} (its limit, ulimit -n, is {limit}). Raise the "
                    "limit: each worker that is called needs more of them."
                ) from error
