"""Builds small C++ programs with the core library, and so with UCX."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.sanitize.programs import compiler
from tests.support import cxx
from torch_rpc_ext._native import build as native
from torch_rpc_ext._native import loader

#: The core library that the extension uses.
LIBRARY = Path(loader.__file__).resolve().parents[1] / native.CORE_LIBRARY


def build(
    folder: Path, programs: Mapping[str, Sequence[Path]]
) -> tuple[dict[str, Path], dict[str, str]]:
    """Build programs.

    Args:
        folder: where objects and programs go; made if it does not exist.
        programs: name -> its source files that are not in the core library.

    Returns:
        Name -> the program's file; and the environment to run the programs with.
    """
    ucx = native.ucx_root()
    assert ucx is not None
    found = [LIBRARY.parent, ucx / "lib", *ucx.parent.glob("libucx*.libs")]
    built = cxx.build(
        folder,
        programs,
        compiler=compiler(),
        flags=("-O1", "-pthread", f"-isystem {ucx / 'include'}"),
        libraries=(
            str(LIBRARY),
            *(f"-L{path} -Wl,-rpath-link,{path}" for path in found),
            "-l:libucp.so.0 -l:libuct.so.0 -l:libucs.so.0",
        ),
    )
    # Also for what these libraries need themselves, which an rpath is not.
    return built, {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, found))}
