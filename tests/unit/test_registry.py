"""BackendType.UCX in torch's registry, and what must not change for others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
from torch.distributed import rpc

import torch_rpc_ext
from torch_rpc_ext._lifecycle import entry
from torch_rpc_ext._upstream import registry

_ROOT = Path(torch_rpc_ext.__file__).parents[1]


def _run(code: str, **env: str) -> str:
    """Run code in a fresh process; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment.pop("TORCH_RPC_BACKEND", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_member() -> None:
    ucx = rpc.BackendType.UCX
    assert rpc.BackendType["UCX"] is ucx
    assert rpc.backend_registry.BackendType is rpc.BackendType
    assert rpc.backend_registry.backend_registered("UCX")
    assert repr(ucx) == "BackendType.UCX"
    members = list(rpc.BackendType)
    assert members.index(rpc.BackendType.TENSORPIPE) < members.index(ucx)
    assert rpc.BackendType(ucx.value) is ucx
    assert pickle.loads(pickle.dumps(ucx)) is ucx
    assert len({rpc.BackendType.TENSORPIPE, ucx}) == 2
    assert isinstance(ucx, rpc.BackendType)


def test_idempotent() -> None:
    before = rpc.BackendType.UCX
    entry.register(rpc)
    assert rpc.BackendType.UCX is before
    assert [member.name for member in rpc.BackendType].count("UCX") == 1


def test_options_through_the_registry() -> None:
    options = rpc.backend_registry.construct_rpc_backend_options(
        rpc.BackendType.UCX, init_method="file:///x", num_worker_threads=3, _transports=["shm"]
    )
    assert isinstance(options, torch_rpc_ext.UcxRpcBackendOptions)
    assert (options.num_worker_threads, options.init_method) == (3, "file:///x")


def test_any_enum_class() -> None:
    # What Python's own enum machinery fills in, on the Python that runs.
    made = Enum("made", {"A": 1, "B": 2})
    grown = Enum("grown", {"A": 1})
    registry.add_member(grown, "B", 2)
    assert set(vars(made.B)) == set(vars(grown.B))
    assert grown.B.name == "B" and grown.B.value == 2 and grown(2) is grown.B
    assert list(grown) == [grown.A, grown["B"]]
    assert "B" in grown.__members__ and grown.B in grown
    with pytest.raises(AttributeError):
        grown.B = 3


def test_survives_register_backend() -> None:
    output = _run(
        "import torch_rpc_ext, torch.distributed.rpc as rpc\n"
        "import torch.distributed.rpc._testing\n"
        "types = rpc.backend_registry.BackendType\n"
        "print([m.name for m in types], types.UCX.value == rpc.BackendType.UCX.value)\n"
        "o = rpc.backend_registry.construct_rpc_backend_options(types.FAULTY_TENSORPIPE,"
        " num_worker_threads=8, num_fail_sends=3, messages_to_fail=[], messages_to_delay={})\n"
        "print(type(o).__name__)\n"
    )
    assert "['FAULTY_TENSORPIPE', 'TENSORPIPE', 'UCX'] True" in output
    assert "FaultyTensorPipeRpcBackendOptions" in output


@pytest.mark.parametrize("first", ["torch_rpc_ext", "torch", "torch.distributed.rpc"])
def test_any_order_of_imports(first: str) -> None:
    output = _run(
        f"import {first}, torch_rpc_ext, torch.distributed.rpc as r; print(r.BackendType.UCX)"
    )
    assert "BackendType.UCX" in output


def test_import_hook_where_rpc_comes_late(tmp_path: Path) -> None:
    # Stands for a torch whose `import torch` does not bring RPC.
    package = tmp_path / "torch" / "distributed" / "rpc"
    package.mkdir(parents=True)
    for folder in (tmp_path / "torch", tmp_path / "torch" / "distributed", package):
        (folder / "__init__.py").write_text("")
    output = _run(
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(_ROOT)!r}]\n"
        "from torch_rpc_ext._upstream import import_hook\n"
        "before = len(sys.meta_path)\n"
        "import_hook.when_rpc_is_imported(lambda m: print('fired', m.__name__, m.__loader__))\n"
        "import torch.distributed.rpc\n"
        "print('hooks left', len(sys.meta_path) - before + 1)\n".replace("before + 1", "before")
    )
    assert "fired torch.distributed.rpc <_frozen_importlib_external.SourceFileLoader" in output


def test_tensorpipe_is_as_before(tmp_path: Path) -> None:
    output = _run(
        "import torch_rpc_ext, torch, torch.distributed.rpc as rpc\n"
        f"o = rpc.TensorPipeRpcBackendOptions(init_method='file://{tmp_path}/store')\n"
        "rpc.init_rpc('a', rank=0, world_size=1, rpc_backend_options=o)\n"
        "print(type(rpc.api._get_current_rpc_agent()).__name__)\n"
        "print(rpc.rpc_sync('a', torch.add, args=(torch.ones(1), 1)).item())\n"
        "rpc.shutdown()\n"
    )
    assert "TensorPipeAgent" in output and "2.0" in output


def test_takeover_values() -> None:
    output = _run(
        "import pickle, torch, torch.distributed.rpc as rpc\n"
        "captured = rpc.BackendType.TENSORPIPE\n"
        "import torch_rpc_ext\n"
        "torch_rpc_ext.take_over(); torch_rpc_ext.take_over()\n"
        "print(captured is rpc.BackendType.TENSORPIPE, captured.value[1].__module__)\n"
        "print(pickle.loads(pickle.dumps(captured)) is captured)\n"
        "o = rpc.backend_registry.construct_rpc_backend_options(captured, _transports=['shm'])\n"
        "print(type(o).__name__)\n"
        "import os; print(os.environ['TORCH_RPC_BACKEND'])\n"
        "from torch_rpc_ext._lifecycle import entry\n"
        "o.set_device_map('b', {'cuda:0': 'cuda:1'}); print(entry.to_ucx_options(o))\n"
    )
    assert "True torch_rpc_ext._lifecycle.entry" in output
    assert "TensorPipeRpcBackendOptions" in output and "\nucx\n" in output
    assert "device(type='cuda', index=1)" in output


@pytest.mark.parametrize("value", ["ucx", "UCX"])
def test_takeover_by_environment(value: str) -> None:
    output = _run(
        "import torch_rpc_ext, torch\n"
        "from torch_rpc_ext._upstream import tensorpipe\n"
        "import torch.distributed.rpc; print(tensorpipe.is_active())",
        TORCH_RPC_BACKEND=value,
    )
    assert "True" in output


def test_wrong_environment_warns() -> None:
    output = _run(
        "import torch_rpc_ext, torch.distributed.rpc as rpc\n"
        "from torch_rpc_ext._upstream import tensorpipe; print(tensorpipe.is_active())",
        TORCH_RPC_BACKEND="ucxx",
    )
    assert "TORCH_RPC_BACKEND='ucxx' means nothing" in output and "'tensorpipe'" in output
    assert "False" in output
