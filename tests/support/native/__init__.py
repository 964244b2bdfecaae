"""What only tests use of the core library: the checksum and throwing at boundaries (base), the
cache of receive buffers (memory), the CUDA driver (cuda), sealed messages and the states of a peer
(transport).

The functions are in a module of their own, so that the extension that is shipped does not have
them. The module is linked to the core library that the extension uses, so both have the same state.
It is compiled once, into build/, and loaded at the first use of a submodule::

    from tests.support import native

    native.base.throw_at("send", True)

A submodule is in the .cpp file of its name, its types are in the .pyi file.
"""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from tests.support import core, cxx
from torch_rpc_ext._native import loader
from torch_rpc_ext._native.build import ucx_root

_HERE = Path(__file__).parent
_SUBMODULES = ("base", "cuda", "memory", "transport")
#: Of csrc, but not in the core library.
_FROM_CSRC = ("bindings/ptx_source.cpp",)

if TYPE_CHECKING:
    from tests.support.native import base as base
    from tests.support.native import cuda as cuda
    from tests.support.native import memory as memory
    from tests.support.native import transport as transport
else:

    def __getattr__(name: str) -> ModuleType:
        if name in _SUBMODULES:
            return getattr(_load(), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def build() -> Path:
    """Return the file of the module. Compiles it if its sources, or headers of csrc, are newer."""
    torch_folder, ucx = Path(torch.__file__).parent, ucx_root()
    headers = [torch_folder / "include", Path(sysconfig.get_path("include"))]
    if ucx is not None:  # else the headers are the system's
        headers.append(ucx / "include")
    built = cxx.build(
        cxx.ROOT / "build" / "native" / torch.__version__,
        {"native.so": [*sorted(_HERE.glob("*.cpp")), *(cxx.CSRC / file for file in _FROM_CSRC)]},
        # As for the extension.
        compiler=os.environ.get("CXX") or "c++",
        flags=[
            "-O0",
            "-fPIC",
            "-fvisibility=hidden",
            *(f"-isystem {path}" for path in headers),
        ],
        libraries=[
            "-shared",
            str(core.LIBRARY),
            f"-Wl,-rpath,{core.LIBRARY.parent}",
            f"-L{torch_folder / 'lib'}",
            "-lc10",
        ],
    )
    return built["native.so"]


@cache
def _load() -> ModuleType:
    loader.load()  # the dynamic linker then finds the core, and what that needs, by name
    file = build()
    name = f"{__name__}._compiled"
    spec = spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
