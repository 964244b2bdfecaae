"""The manual builds without a warning, and its reference has every public name."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sphinx.util.inventory import InventoryFile

import torch_rpc_ext
from tests.support.backend import ROOT, needs_ucx

pytestmark = [needs_ucx("is not what the manual is about"), pytest.mark.timeout(1600)]
#: Public names of the commands that programs use; docs/cli.md shows their use.
FROM_INSIDE = [
    "torch_rpc_ext.cli.ping.ping",
    "torch_rpc_ext.cli.poller.Poller",
    "torch_rpc_ext.cli.top.show",
]


def test_every_class_has_an_example() -> None:
    """In a block of code of its docstring, or of its module's."""
    classes = {name: value for name, value in public_names() if inspect.isclass(value)}
    assert len(classes) > 25
    missing = [name for name, value in classes.items() if not has_example(name, value)]
    assert not missing, missing


def has_example(name: str, cls: type) -> bool:
    short = name.rpartition(".")[2]
    if re.search(r"::\n\n? {4}", inspect.getdoc(cls) or ""):
        return True
    homes = {name.rpartition(".")[0], cls.__module__}
    pages = [importlib.import_module(home).__doc__ or "" for home in homes]
    return any(
        short in block for page in pages for block in re.findall(r"::\n((?:\n| {4}.*\n)+)", page)
    )


def test_the_manual(tmp_path: Path) -> None:
    """One test, because several tests that run in parallel would each build the manual."""
    build(tmp_path)
    manual = tmp_path / "html"
    check_names(manual)
    check_pages(manual)


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    ended = subprocess.run(
        [*command, "-d", str(folder / "trees"), ".", str(folder / "html")],
        cwd=ROOT,
        # As on a machine without a network.
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert ended.returncode == 0, ended.stderr


def public_modules() -> Iterator[ModuleType]:
    yield torch_rpc_ext
    for found in pkgutil.iter_modules(torch_rpc_ext.__path__):
        # The modules of the commands are for the command line, except for the names in FROM_INSIDE.
        if not found.name.startswith("_") and found.name != "cli":
            yield importlib.import_module(f"torch_rpc_ext.{found.name}")
    yield importlib.import_module("torch_rpc_ext.scripting")  # is a folder, not a module


def public_names() -> Iterator[tuple[str, Any]]:
    """(full name, object) of everything public, methods and properties included."""
    for module in public_modules():
        names = getattr(module, "__all__", None)
        if names is None:
            names = [
                name
                for name, value in vars(module).items()
                if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
            ]
        for name in names:
            value = getattr(module, name)
            yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                for member, its in vars(value).items():
                    if not member.startswith("_") and (inspect.isroutine(its) or is_property(its)):
                        yield f"{module.__name__}.{name}.{member}", its


def is_property(value: Any) -> bool:
    return isinstance(value, property)


def check_names(manual: Path) -> None:
    inventory = InventoryFile.loads((manual / "objects.inv").read_bytes(), uri="")
    described = {
        name for kind, items in inventory.data.items() if kind.startswith("py:") for name in items
    }
    objects = [value for name in described if (value := find(name)) is not None]
    missing = [
        name
        for name, value in public_names()
        if name not in described and not any(value is other for other in objects)
    ]
    assert not missing
    assert set(FROM_INSIDE) <= described
    assert len(described) > 100


def find(name: str) -> Any:
    """The object with this full name; None where there is none, such as for an attribute of
    instances."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = inspect.getattr_static(found, part, None)
        return found
    return None


def check_pages(manual: Path) -> None:
    """Every source file has a page, pages with outputs show them, and the root leads to the start
    page."""
    for kind in ("docs/*.md", "docs/*/*.md", "tutorials/[0-9]*.ipynb"):
        for source in ROOT.glob(kind):
            assert (manual / source.relative_to(ROOT).with_suffix(".html")).exists(), source
    assert "docs/index.html" in (manual / "index.html").read_text()
    notebook = (manual / "tutorials" / "01_getting_started.html").read_text()
    assert "tensor([42., 42., 42.])" in notebook and "<img" in notebook
