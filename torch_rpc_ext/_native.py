"""Loading UCX and the C++ extension, with a sentence for whatever is in the way."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_rpc_ext import _build, _environment

_FOLDER = Path(__file__).resolve().parent

# In the order of their dependence on each other.
_LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")
_INFINIBAND = Path("/sys/class/infiniband")

_module: Any = None
_ucx: Ucx | None = None


class Ucx(NamedTuple):
    """The UCX in use.

    Attributes:
        source: 'wheel', 'system', 'folder' or 'process' (something else had loaded it before).
        path: file of libucp.
        version: 'major.minor.release'.
        reason: one sentence for people.
        preset: environment variables that were set for it, with their values.
    """

    source: str
    path: str
    version: str
    reason: str
    preset: dict[str, str]


def load() -> Any:
    """Load UCX, the core and torch_rpc_ext._C for the running torch, once.

    An extension module for this minor release of torch that is not there is compiled first, which
    takes a minute or two (_build.py).

    Returns:
        The module torch_rpc_ext._C.

    Raises:
        ImportError: the core is not built, the extension module cannot be compiled, or UCX is
            missing or too old; the text says what to do.
    """
    global _module
    if _module is None:
        _load_ucx(_built_against())
        core = _FOLDER / _build.CORE_LIBRARY
        file = _FOLDER / _build.extension_name(torch.__version__)
        try:
            # By its path, so that _C finds the core by its soname.
            ctypes.CDLL(str(core), mode=os.RTLD_NOW | os.RTLD_LOCAL)
            if not file.exists():
                file = _build.compile_extension()
            _module = _import_extension(file)
        except (ImportError, OSError) as error:
            raise ImportError(
                f"torch_rpc_ext's extension module cannot be loaded ({error}). Build it again: "
                "run `make build` in its source folder, or reinstall the package."
            ) from error
    return _module


def loaded() -> Any:
    """Return the module torch_rpc_ext._C, None while it has not been loaded."""
    return _module


def ucx() -> Ucx:
    """Return the UCX in use, loading it where that has not been done; raises as load()."""
    load()
    assert _ucx is not None
    return _ucx


def _built_against() -> str:
    """Return the UCX whose headers the core was compiled with."""
    try:
        build = importlib.import_module("torch_rpc_ext._build_info")
    except ImportError:
        raise ImportError(
            "torch_rpc_ext's core library is not built. Run `make build` in its source "
            "folder, or reinstall the package."
        ) from None
    return str(build.UCX_VERSION)


def _import_extension(file: Path) -> Any:
    """Import a file as torch_rpc_ext._C, whatever torch its name says."""
    name = "torch_rpc_ext._C"
    loader = ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


def _load_ucx(built_for: str) -> None:
    """Load UCX with local symbols, so that _C finds it by soname without LD_LIBRARY_PATH."""
    global _ucx
    wanted = os.environ.get(_environment.UCX, "").strip() or "wheel"
    there = _mapped("libucp.so")
    if there:
        # Two copies of UCX in one process would fight over its state. Take the one that is there.
        source, folder = "process", Path(there).parent
        reason = "another package of this process had loaded it before"
    elif wanted == "system":
        source, folder = "system", None
        reason = f"{_environment.UCX}=system"
    elif wanted == "wheel":
        source, folder = "wheel", _wheel_folder()
        reason = "the UCX wheel is the default"
    else:
        source, folder = "folder", Path(wanted)
        reason = f"{_environment.UCX}={wanted}"
    infiniband = source != "wheel" and infiniband_devices() != []
    preset = _environment.preset_ucx(keep_memory_events=infiniband)
    library = _open(folder, source)
    version = _version(library)
    _require(version, built_for, reason)
    path = os.path.realpath(folder / _LIBRARIES[-1]) if folder else _mapped("libucp.so")
    _ucx = Ucx(source, path, ".".join(str(n) for n in version), f"{reason}.", preset)


def _wheel_folder() -> Path:
    root = _build.ucx_root()
    if root is None:
        raise ImportError(
            "torch_rpc_ext needs UCX, and its wheel is not installed: run `pip install "
            f"libucx-cu13`, or use the system's UCX with {_environment.UCX}=system."
        )
    return root / "lib"


def _open(folder: Path | None, source: str) -> ctypes.CDLL:
    library: ctypes.CDLL | None = None
    for name in _LIBRARIES:
        path = name if folder is None else str(folder / name)
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            remedy = {
                "wheel": "reinstall it: `pip install --force-reinstall libucx-cu13`",
                "system": f"install UCX (package libucx0 or ucx), or unset {_environment.UCX} to "
                "use the wheel's",
            }.get(source, f"let {_environment.UCX} name the folder that holds libucp.so.0")
            raise ImportError(
                f"UCX ({source}) cannot be loaded: {error}. To mend it, {remedy}."
            ) from None
    assert library is not None
    return library


def _version(library: ctypes.CDLL) -> tuple[int, int, int]:
    numbers = [ctypes.c_uint() for _ in range(3)]
    library.ucp_get_version(*(ctypes.byref(number) for number in numbers))
    major, minor, release = (number.value for number in numbers)
    return major, minor, release


def _require(version: tuple[int, int, int], built_for: str, reason: str) -> None:
    found = ".".join(str(number) for number in version)
    needed = tuple(int(part) for part in built_for.split(".")[:2])
    # UCX keeps its ABI within a major version, and adds to it in minor ones.
    if version[0] != needed[0] or version[:2] < needed:
        raise ImportError(
            f"torch_rpc_ext was built for UCX {built_for}, but this one is {found} "
            f"({reason}): install UCX {needed[0]}.{needed[1]} or a later {needed[0]}.x, or build "
            "torch_rpc_ext against this one."
        )


def _mapped(name: str) -> str:
    """Return the file of a library that is loaded in this process, '' for none.

    It takes 1 ms: the kernel writes the path of each of some hundred mappings.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            maps = file.read()
    except OSError:
        return ""
    at = maps.find(f"/{name}")
    if at < 0:
        return ""
    start, end = maps.rfind("\n", 0, at) + 1, maps.find("\n", at)
    return "/" + maps[start:end].partition("/")[2]


def infiniband_devices() -> list[str]:
    """Return the names of this host's InfiniBand, RoCE and EFA devices."""
    try:
        return sorted(entry.name for entry in _INFINIBAND.iterdir())
    except OSError:
        return []
