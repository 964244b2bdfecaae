"""Folders from which workers import: for the working tree, and for another revision.

Each folder holds links to packages: torch_rpc_ext and scripting of that revision; benchmarks, and
tests for its network namespaces, of the working tree.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def working() -> Iterator[Path]:
    """Link to the working tree, as it is built."""
    with _linked(ROOT) as folder:
        yield folder


@contextlib.contextmanager
def built(revision: str) -> Iterator[Path]:
    """Build a revision in a temporary git worktree.

    Raises:
        SystemExit: there is no such revision, or it does not build; the output says why.
    """
    with tempfile.TemporaryDirectory(prefix="rpc_bench_tree_") as temporary:
        tree = os.path.join(temporary, "tree")
        _run(ROOT, "git", "worktree", "add", "--quiet", "--detach", tree, revision)
        try:
            print(f"building {revision}, which takes minutes", file=sys.stderr, flush=True)
            _run(Path(tree), sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
            with _linked(Path(tree)) as folder:
                yield folder
        finally:
            _run(ROOT, "git", "worktree", "remove", "--force", tree)


@contextlib.contextmanager
def _linked(tree: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rpc_bench_path_") as folder:
        for package, place in (
            ("torch_rpc_ext", tree),
            ("scripting", tree),
            ("benchmarks", ROOT),
            ("tests", ROOT),  # its namespaces
        ):
            os.symlink(place / package, os.path.join(folder, package))
        yield Path(folder)


def _run(folder: Path, *command: str) -> None:
    environment = {"MAX_JOBS": str(len(os.sched_getaffinity(0))), **os.environ}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
