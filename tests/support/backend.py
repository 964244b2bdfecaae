"""Which back end the tests run on.

``RPC_TEST_BACKEND`` is ``UCX`` (the default once the extension is built) or ``TENSORPIPE``. The
same tests run on both, so running them on TENSORPIPE shows what upstream does. A test that fails on
both is probably wrong itself.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

BACKENDS = ("UCX", "TENSORPIPE")
ROOT = Path(__file__).resolve().parents[2]


def extension_built() -> bool:
    """Whether torch_rpc_ext and its compiled part exist. Does not import them."""
    found = importlib.util.find_spec("torch_rpc_ext")
    places = list(found.submodule_search_locations or []) if found else []
    return any(list(Path(place).glob("_C*.so")) for place in places)


def backend_name() -> str:
    """The back end under test, by its name in rpc.BackendType."""
    name = os.environ.get("RPC_TEST_BACKEND") or ("UCX" if extension_built() else "TENSORPIPE")
    if name not in BACKENDS:
        raise ValueError(f"RPC_TEST_BACKEND={name!r}: expected one of {', '.join(BACKENDS)}")
    return name


def on_ucx() -> bool:
    """Whether the tests run on our own back end."""
    return backend_name() == "UCX"


def backend_type() -> Any:
    """The member of rpc.BackendType to pass to init_rpc. Registers our back end if it is the one
    under test."""
    if on_ucx():
        import torch_rpc_ext  # noqa: F401
    from torch.distributed.rpc import backend_registry

    return backend_registry.BackendType[backend_name()]


def backend_options(init_method: str, **options: Any) -> Any:
    """Options of the back end under test; keywords are those of TensorPipeRpcBackendOptions and, on
    UCX, our own."""
    if on_ucx():
        from torch_rpc_ext import UcxRpcBackendOptions

        return UcxRpcBackendOptions(init_method=init_method, **options)
    from torch.distributed.rpc import TensorPipeRpcBackendOptions

    return TensorPipeRpcBackendOptions(init_method=init_method, **options)


def needs_ucx(reason: str) -> pytest.MarkDecorator:
    """Marks a test that TENSORPIPE fails or cannot run; ``reason`` says what TENSORPIPE lacks."""
    return pytest.mark.skipif(not on_ucx(), reason=f"TENSORPIPE: {reason}")
