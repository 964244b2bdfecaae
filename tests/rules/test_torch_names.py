"""Private names of torch: what the package uses, and what torch_names.py lists, is the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.backend import ROOT
from torch_rpc_ext._upstream import torch_names

#: What the package calls these modules everywhere; upstream's functions have no types.
USUAL = {
    "torch": "torch",
    "rpc": "torch.distributed.rpc",
    "api": "torch.distributed.rpc.api",
    "internal": "torch.distributed.rpc.internal",
    "native_rpc": "torch._C._distributed_rpc",
}
LISTED = [*torch_names.DONE_WITHOUT, *(n for names in torch_names.NEEDED.values() for n in names)]


def sources() -> list[Path]:
    found = [*(ROOT / "torch_rpc_ext").rglob("*.py"), *(ROOT / "scripting").rglob("*.py")]
    return [path for path in found if path.name != "torch_names.py"]


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def used(tree: ast.Module) -> Iterator[str]:
    """Yield the full names of torch in a module's source."""
    known = dict(USUAL)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith("torch."):
                    known[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"

    def full(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            before = full(node.value)
            return before and f"{before}.{node.attr}"
        return None

    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            if name := full(node.value):  # c10d: Any = _untyped_c10d
                known[node.target.id] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := full(node)):
            yield name


def all_used() -> set[str]:
    return {
        name for path in sources() for name in used(ast.parse(path.read_text())) if is_private(name)
    }


def within(name: str, other: str) -> bool:
    return f"{name}.".startswith(f"{other}.")


def test_all_that_is_used_is_listed() -> None:
    unlisted = {
        name
        for name in all_used()
        if not any(within(name, listed) or within(listed, name) for listed in LISTED)
    }
    assert not unlisted, f"add them to torch_rpc_ext/_upstream/torch_names.py: {sorted(unlisted)}"


def test_all_that_is_listed_is_used() -> None:
    names = all_used()
    texts = [path.read_text() for path in sources()]
    for listed in LISTED:
        last = listed.rpartition(".")[2]
        # Some are asked for by their last part, as a text, or of a module that is imported late.
        assert any(within(name, listed) for name in names) or any(
            f'"{last}"' in text or f".{last}" in text for text in texts
        ), f"{listed} is used nowhere"


def test_each_stands_once_and_in_order() -> None:
    assert len(set(LISTED)) == len(LISTED)
    for names in torch_names.NEEDED.values():
        assert list(names) == sorted(names)
