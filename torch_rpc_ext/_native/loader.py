"""Loading UCX and the C++ extension; every obstacle is an error of one sentence with a remedy."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_rpc_ext._base import environment
from torch_rpc_ext._base.requirements import require_rpc
from torch_rpc_ext._native import build

_FOLDER = Path(__file__).resolve().parents[1]

# Each depends on those before it.
_LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")
_INFINIBAND = Path("/sys/class/infiniband")

_module: Any = None
_ucx: Ucx | None = None


class Ucx(NamedTuple):
    """The UCX in use.

    Attributes:
        source: 'wheel', 'system', 'folder', or 'process' where another package had loaded UCX.
        path: file of libucp.
        version: 'major.minor.release'.
        reason: one sentence for people.
        preset: environment variables that were set before UCX was loaded, with their values.
    """

    source: str
    path: str
    version: str
    reason: str
    preset: dict[str, str]


class DoesNotFitError(ImportError):
    """An extension module for this torch exists, but cannot be imported."""


def load() -> Any:
    """Load UCX, the core and torch_rpc_ext._C for the running torch, once.

    If there is no extension module for this minor release of torch, it is compiled first, which
    takes a minute or two (build.py).

    Returns:
        The module torch_rpc_ext._C.

    Raises:
        ImportError: this torch has no RPC, the core is not built, the extension module cannot be
            compiled or does not fit, or UCX is missing or too old; the text says what to do.
    """
    global _module
    if _module is None:
        require_rpc()
        _load_ucx(_built_against())
        _load_core()
        _module = _load_extension()
    return _module


def _load_core() -> None:
    """Load the core by its path; the dynamic linker then finds it for _C by its soname."""
    try:
        ctypes.CDLL(str(_FOLDER / build.CORE_LIBRARY), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        openssl = "libcrypto" in str(error)  # only a core outside of a wheel needs the system's
        raise ImportError(
            f"torch_rpc_ext's core library cannot be loaded ({error}): "
            f"{'install OpenSSL (`apt-get install libssl3`), or ' if openssl else ''}run "
            f"`{build.how_to_reinstall()}`"
        ) from error


def _load_extension() -> Any:
    """Import the extension module of the package, or the one that was compiled on this machine."""
    file = _FOLDER / build.extension_name(torch.__version__)
    if not file.exists():
        file = build.compile_extension()
    try:
        return _import_extension(file)
    except ImportError as error:
        compiled = build.compiled_extension()
        if file != compiled and compiled.exists():
            return _import_extension(compiled)
        raise DoesNotFitError(
            f"the extension module for torch {torch.__version__} cannot be loaded ({error}): run "
            f"`{sys.executable} -m torch_rpc_ext build`, which compiles it again for this torch "
            "and changes nothing else"
        ) from error


def loaded() -> Any:
    """Return the module torch_rpc_ext._C, or None if it has not been loaded."""
    return _module


def ucx() -> Ucx:
    """Return the UCX in use; load it if necessary, which raises as load() does."""
    load()
    assert _ucx is not None
    return _ucx


def _built_against() -> str:
    """Return the UCX whose headers the core was compiled with."""
    try:
        built = importlib.import_module("torch_rpc_ext._build_info")
    except ImportError:
        raise ImportError(
            f"torch_rpc_ext's core library is not built: run `{build.how_to_reinstall()}`"
        ) from None
    return str(built.UCX_VERSION)


def _import_extension(file: Path) -> Any:
    """Import a file as torch_rpc_ext._C, whatever its name is."""
    name = "torch_rpc_ext._C"
    loader = ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


def _load_ucx(built_for: str) -> None:
    """Load UCX; the dynamic linker then finds it for _C by soname, without LD_LIBRARY_PATH."""
    global _ucx
    wanted = os.environ.get(environment.UCX, "").strip() or "wheel"
    there = _mapped("libucp.so")
    if there:
        # Two copies of UCX in a process would disturb each other, so the loaded one is used.
        source, folder = "process", Path(there).parent
        reason = "another package of this process had loaded it before"
    elif wanted == "system":
        source, folder = "system", None
        reason = f"{environment.UCX}=system"
    elif wanted == "wheel":
        source, folder = "wheel", _wheel_folder()
        reason = "the UCX wheel is the default"
    else:
        source, folder = "folder", Path(wanted)
        reason = f"{environment.UCX}={wanted}"
    infiniband = source != "wheel" and infiniband_devices() != []
    preset = environment.preset_ucx(keep_memory_events=infiniband)
    library = _open(folder, source)
    version = _version(library)
    _require(version, built_for, source, reason)
    path = os.path.realpath(folder / _LIBRARIES[-1]) if folder else _mapped("libucp.so")
    _ucx = Ucx(source, path, ".".join(str(n) for n in version), f"{reason}.", preset)


def _wheel_folder() -> Path:
    root = build.ucx_root()
    if root is None:
        raise ImportError(
            "torch_rpc_ext needs UCX, and its wheel is not installed: run "
            f"`{sys.executable} -m pip install libucx-cu13`, or use the system's UCX with "
            f"{environment.UCX}=system."
        )
    return root / "lib"


def _reinstall_wheel(requirement: str = "") -> str:
    """Return the command that installs UCX's wheel again, for the CUDA of this machine."""
    from importlib import metadata

    name = "libucx-cu13"
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.distribution("libucx-cu12")
        name = "libucx-cu12"
    what = f"'{name}{requirement}'" if requirement else name
    return f"{sys.executable} -m pip install --force-reinstall --no-deps {what}"


def _open(folder: Path | None, source: str) -> ctypes.CDLL:
    library: ctypes.CDLL | None = None
    for name in _LIBRARIES:
        path = name if folder is None else str(folder / name)
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            remedy = {
                "wheel": f"run `{_reinstall_wheel()}`",
                "system": f"install UCX (package libucx0 or ucx), or unset {environment.UCX} to "
                "use the wheel's",
            }.get(source, f"let {environment.UCX} name the folder that holds libucp.so.0")
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


def _require(version: tuple[int, int, int], built_for: str, source: str, reason: str) -> None:
    found = ".".join(str(number) for number in version)
    major, minor = (int(part) for part in built_for.split(".")[:2])
    # UCX's ABI is stable within a major version; minor versions add to it.
    if version[0] == major and version[1] >= minor:
        return
    fitting = f">={major}.{minor},<{major + 1}"
    remedy = f"run `{_reinstall_wheel(fitting)}`" if source == "wheel" else f"use UCX {fitting}"
    raise ImportError(
        f"torch_rpc_ext was built for UCX {built_for}, but this one is {found} ({reason}): {remedy}"
    )


def _mapped(name: str) -> str:
    """Return the file of a library that this process has loaded, '' for none.

    Takes 1 ms, because the kernel writes the path of each of some hundred mappings.
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
