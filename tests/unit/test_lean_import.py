"""Importing the package costs little and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_rpc_ext

_ROOT = Path(torch_rpc_ext.__file__).parents[1]

_LOOK = """
import json, os, signal, sys, time
def look():
    status = open('/proc/self/status').read()
    return {
        'threads': len(os.listdir('/proc/self/task')),
        'signals': [line for line in status.splitlines() if line.startswith('SigCgt')][0],
        'handlers': [str(signal.getsignal(n)) for n in (1, 2, 7, 8, 11, 15)],
        'ucx': [line for line in open('/proc/self/maps') if 'libuc' in line],
        'cuda': [line for line in open('/proc/self/maps') if 'libcuda.so' in line],
        'environment': dict(os.environ),
    }
"""


def _run(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _LOOK + code],
        env={**os.environ, "PYTHONPATH": str(_ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def test_import_changes_nothing() -> None:
    before, after, _ = _run(
        "import torch; before = look(); import torch_rpc_ext; from torch.distributed import rpc;"
        "rpc.BackendType.UCX; torch_rpc_ext.UcxRpcBackendOptions();"
        "print(json.dumps([before, look(), 0]))"
    )
    assert after["threads"] == before["threads"]
    assert after["signals"] == before["signals"] and after["handlers"] == before["handlers"]
    assert after["environment"] == before["environment"]
    assert not after["ucx"] and not after["cuda"]


def test_import_alone_does_not_even_import_torch() -> None:
    loaded = _run(
        "import torch_rpc_ext;"
        "print(json.dumps([n in sys.modules for n in ('torch', 'numpy', 'torch_rpc_ext._C')]))"
    )
    assert loaded == [False, False, False]


def test_kernels_are_imported_without_numba() -> None:
    loaded = _run(
        "import torch_rpc_ext; assert 'torch_rpc_ext.kernels' not in sys.modules;"
        "import torch_rpc_ext.kernels, torch_rpc_ext.kernels.ptx;"
        "print(json.dumps([n in sys.modules for n in ('numba', 'numba_cuda', 'llvmlite')]))"
    )
    assert loaded == [False, False, False]


def test_autoload_imports_little() -> None:
    # What takes the 5 ms of _autoload.py is modules; time itself tells nothing on a busy machine.
    new = _run(
        "import torch; before = set(sys.modules);"
        "import torch_rpc_ext._autoload as a; a.activate();"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    assert all(name.startswith("torch_rpc_ext") for name in new), new
    assert len(new) <= 12, new


def test_loading_ucx_leaves_signals_alone() -> None:
    before, after, preset = _run(
        "import torch, faulthandler; faulthandler.enable(); before = look();"
        "import torch_rpc_ext._native.loader as n\n"
        "try: n._load_ucx('1.0.0')\n"
        "except ImportError as e: print(e); raise\n"
        "print(json.dumps([before, look(), n._ucx.preset]))"
    )
    assert after["ucx"] and after["signals"] == before["signals"]
    assert after["threads"] == before["threads"]
    assert {"UCX_MEM_EVENTS", "UCX_DEBUG_SIGNO"} <= set(preset) | set(before["environment"])


def test_public_modules_come_with_the_package() -> None:
    names = [
        *(
            "aio",
            "errors",
            "events",
            "kernels",
            "launch",
            "metrics",
            "monitoring",
            "options",
            "profiler",
        ),
        *("retry", "scripting", "sharding", "takeover"),
    ]
    found = _run(
        f"import torch_rpc_ext; names = {names};"
        "assert 'torch' not in sys.modules and set(names) <= set(dir(torch_rpc_ext));"
        "print(json.dumps([bool(getattr(torch_rpc_ext, n).__all__) for n in names]))"
    )
    assert found == [True] * len(names)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        torch_rpc_ext.nothing  # noqa: B018
