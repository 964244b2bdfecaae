"""Installations that cannot work: init_rpc raises a sentence with the remedy, and `import torch`
works as ever."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.backend import ROOT

INIT = """
from torch.distributed import rpc
try:
    rpc.init_rpc("a", backend=rpc.BackendType.UCX, rank=0, world_size=1)
except ImportError as error:
    print("refused:", error)
"""
ANOTHER_TORCH = "import torch; torch.__version__ = '2.99.0+cpu'\n" + INIT
ANOTHER_PYTHON = (
    "from torch_rpc_ext._native import build\n"
    "build.EXTENSION_SUFFIXES = ['.cpython-399-x86_64-linux-gnu.so']\n" + INIT
)
# Imitates a torch that was built with USE_DISTRIBUTED=0: torch looks at this name when it imports
# rpc.
WITHOUT_RPC = """
import sys
class Remove:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch.distributed.rpc":
            del sys.modules["torch._C"]._rpc_init
sys.meta_path.insert(0, Remove)
import torch
print("imported", hasattr(torch.distributed.rpc, "init_rpc"))
import torch_rpc_ext
for attempt in (torch_rpc_ext.take_over, lambda: torch_rpc_ext.UcxRpcBackendOptions):
    try:
        attempt()
    except ImportError as error:
        print("refused:", error)
print(torch_rpc_ext.info()["ucx"])
"""
# A release of torch may remove any name that this package uses: here the one that the registry
# needs.
WITHOUT_A_NAME = """
import sys
from torch_rpc_ext._upstream import registry
def broken(rpc):
    raise AttributeError("a name of torch that is gone")
registry.enum_classes = broken
import torch
from torch.distributed import rpc
rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method=f"file://{sys.argv[1]}/store"))
print(rpc.rpc_sync("a", torch.add, args=(torch.ones(1), 1)).item())
rpc.shutdown()
"""


def run(code: str, *arguments: str, **env: str) -> tuple[str, str]:
    """Run code in a fresh Python; return its output on stdout and on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def refusal(code: str, **env: str) -> str:
    """Return the sentence that init_rpc raises; check that nothing else is printed."""
    printed, said = run(code, **env)
    assert printed.startswith("refused: ") and printed.count("\n") == 1 and not said, said
    return printed


def test_no_compiler() -> None:
    assert "install a C++20 compiler (no-compiler is missing)" in refusal(
        ANOTHER_TORCH, CXX="no-compiler", TORCH_EXTENSIONS_DIR="/proc/self/none"
    )


def test_a_wheel_for_another_python() -> None:
    text = refusal(ANOTHER_PYTHON, CXX="no-compiler", TORCH_EXTENSIONS_DIR="/proc/self/none")
    assert "there is one for torch 2." in text and "and Python 3." in text


def test_no_write_permission() -> None:
    # A folder without write permission would not do: root may write there.
    text = refusal(ANOTHER_TORCH, TORCH_EXTENSIONS_DIR="", XDG_CACHE_HOME="/proc/self/none")
    assert "set TORCH_EXTENSIONS_DIR to a folder that can be written to" in text


@pytest.mark.parametrize("missing", ["libucs.so.0", "libucp.so.0"])
def test_a_broken_ucx_wheel(missing: str, tmp_path: Path) -> None:
    import libucx

    lib = tmp_path / "libucx" / "lib"
    lib.mkdir(parents=True)
    (tmp_path / "libucx" / "__init__.py").write_text("")
    for path in (Path(libucx.__file__).parent / "lib").glob("libuc?.so.0"):
        if path.name != missing:
            (lib / path.name).symlink_to(path)
    text = refusal(INIT, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", TORCH_RPC_EXT_UCX="")
    assert missing in text
    assert "-m pip install --force-reinstall --no-deps libucx-cu1" in text


@pytest.mark.parametrize("backend", ["", "ucx"])
def test_a_torch_without_rpc(backend: str) -> None:
    printed, said = run(WITHOUT_RPC, TORCH_RPC_BACKEND=backend)
    assert printed.startswith("imported False\n")
    assert printed.count("was built without torch.distributed.rpc: install a build that has") == 3
    assert said.count("Warning") == (1 if backend else 0), said


def test_a_name_of_torch_that_is_gone(tmp_path: Path) -> None:
    printed, said = run(WITHOUT_A_NAME, str(tmp_path))
    assert printed == "2.0\n"
    assert said.count("torch_rpc_ext cannot offer BackendType.UCX to this torch") == 1, said


def test_info_says_what_is_broken() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_rpc_ext", "info"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_RPC_EXT_UCX": "/proc/self/none"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    text = " ".join(done.stdout.split())
    assert "let TORCH_RPC_EXT_UCX name the folder that holds libucp.so.0" in text


@pytest.mark.parametrize(
    ("rejected", "remedy"),
    [
        ("concepts", "install a newer C++ compiler"),
        ("openssl/evp.h", "`apt-get install libssl-dev`"),
        ("Python.h", "install the headers of Python 3."),
    ],
)
def test_what_a_build_misses(rejected: str, remedy: str, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n! grep -q '{rejected}'\n")
    compiler.chmod(0o755)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("torch_rpc_ext", "csrc", "scripting"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "out"],
        cwd=tmp_path,
        env={**os.environ, "CXX": str(compiler)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("setup.py: torch_rpc_ext cannot be compiled here: ") and remedy in said
    assert not (tmp_path / "out").exists()
