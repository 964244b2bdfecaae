"""What must be there before anything else is tried: a torch that was built with RPC."""

from __future__ import annotations


def require_rpc() -> None:
    """Refuse a torch that was built without RPC.

    Raises:
        ImportError: this torch has no RPC; the text says what to do.
    """
    import torch
    from torch.distributed import rpc

    if not rpc.is_available():
        raise ImportError(
            f"this torch ({torch.__version__}) was built without torch.distributed.rpc: install a "
            "build that has it, such as PyPI's for Linux"
        )
