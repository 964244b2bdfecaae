"""Loading the extension: what is in the way is said in a sentence, with the remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torch_rpc_ext import _native


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been loaded."""
    monkeypatch.setattr(_native, "_module", None)
    monkeypatch.setattr(_native, "_ucx", None)
    monkeypatch.setattr(_native, "_mapped", lambda name: "")


def build_info(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    module: Any = ModuleType("torch_rpc_ext._build_info")
    module.TORCH_VERSION = given.get("torch", torch.__version__)
    module.PYTHON_VERSION = given.get("python", sys.version.split()[0])
    module.UCX_VERSION = given.get("ucx", "1.18.0")
    monkeypatch.setitem(sys.modules, "torch_rpc_ext._build_info", module)


def test_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_rpc_ext._build_info", None)
    with pytest.raises(ImportError, match="is not built. Run `make build`"):
        _native.load()


@pytest.mark.parametrize("what", ["torch", "python"])
def test_built_for_another(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    build_info(monkeypatch, **{what: "1.2.3"})
    with pytest.raises(ImportError, match=r"was built for (torch|Python) 1\.2.* is running"):
        _native.load()


def test_ucx_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_version", lambda library: (1, 17, 0))
    with pytest.raises(ImportError, match=r"built for UCX 1\.18\.0, but this one is 1\.17\.0"):
        _native._load_ucx("1.18.0")
    monkeypatch.setattr(_native, "_version", lambda library: (2, 0, 0))
    with pytest.raises(ImportError, match=r"this one is 2\.0\.0"):
        _native._load_ucx("1.18.0")


def test_ucx_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_RPC_EXT_UCX", str(tmp_path))
    with pytest.raises(ImportError, match=r"UCX \(folder\) cannot be loaded: .*libuc"):
        _native._load_ucx("1.18.0")


def test_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_RPC_EXT_UCX", raising=False)
    monkeypatch.setattr(_native.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install libucx-cu13"):
        _native._load_ucx("1.18.0")


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", "2.13.0"), ("2.15.0a0+git12ab", "2.15.0"), ("2.11.1rc2", "2.11.1")],
)
def test_release(version: str, release: str) -> None:
    assert _native._release(version) == release
