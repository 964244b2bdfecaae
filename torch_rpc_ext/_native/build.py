"""Building the C++: setup.py does this, and so does the loader for a torch without an extension.

There are two native parts, because almost half of csrc/ does not need torch:

- the core, one shared library, compiled once: CORE_FOLDERS;
- the extension module, which is torch's RpcAgent and the bindings: TORCH_FOLDERS. It is compiled
  for each minor release of torch, because torch's C++ ABI changes with them. Extensions for several
  torches can lie side by side.

Most of the time of compiling a file goes into torch's headers: 7 of 9 s. So the files of a folder
are compiled as a few units that include up to FILES_OF_A_UNIT of them each. Names in anonymous
namespaces must therefore be unique within a folder.

Every process that calls init_rpc() imports this module, and setup.py loads it by its path, when the
package cannot be imported yet. So modules that only compiling needs are imported where they are
used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

CORE_FOLDERS = ("base", "wire", "crypto", "metrics", "memory", "cuda", "transport")
TORCH_FOLDERS = ("compat", "agent", "bindings")
CORE = "core"
# Not ".so": pkgutil would take the file for a module of the package.
CORE_LIBRARY = "libtorch_rpc_ext_core.so.0"
# More files in a unit make fewer units, but each needs more memory (2.3 GB at 13 of bindings/).
FILES_OF_A_UNIT = 8
#: '0' compiles each file alone, which suits developers who change single files and use ccache.
UNITS_VARIABLE = "TORCH_RPC_EXT_BUILD_UNITS"

_PACKAGE = Path(__file__).resolve().parents[1]
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-g0",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # torch's headers have such parameters
)
_UCX = ("-l:libucp.so.0", "-l:libuct.so.0", "-l:libucs.so.0")


def compile_flags(*, core: bool) -> list[str]:
    """Return the flags of the compiler; the user's CXXFLAGS come last and so win."""
    import shlex

    torch_only = (
        "-fvisibility=hidden",
        # torch's RPC headers expect these. Not USE_TENSORPIPE, which needs TensorPipe's headers.
        "-DUSE_DISTRIBUTED",
        "-DUSE_RPC",
        "-DUSE_C10D_GLOO",
    )
    # Calls within the core are then direct, not through the table of the dynamic linker.
    core_only = ("-fno-semantic-interposition",)
    chosen = core_only if core else torch_only
    return [*_FLAGS, *chosen, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def link_flags(*, core: bool) -> list[str]:
    """Return the libraries, by name and without rpath: loader.py loads them before."""
    if core:
        return [*_UCX, "-lcrypto", f"-Wl,-soname,{CORE_LIBRARY}", "-Wl,-Bsymbolic-functions"]
    return [f"-l:{CORE_LIBRARY}"]


def csrc() -> Path:
    """Return the folder of the C++ sources: the source tree's, or the installed package's."""
    tree = _PACKAGE.parent / "csrc"
    return tree if tree.is_dir() else _PACKAGE / "_csrc"


def extension_name(torch_version: str) -> str:
    """Return the file name of the extension module for a torch and the running Python.

    Args:
        torch_version: such as "2.13.0+cpu", from torch.__version__.
    """
    major, minor = torch_version.split(".")[:2]
    return f"_C_torch{major}{minor}{EXTENSION_SUFFIXES[0]}"


def ucx_root() -> Path | None:
    """Return the folder of a libucx wheel, cu12 or cu13, with include/ and lib/; None for none."""
    spec = importlib.util.find_spec("libucx")
    for location in (spec.submodule_search_locations or []) if spec else []:
        return Path(location)
    return None


def sources_digest() -> str:
    """Return a digest of the C++ sources: an extension fits a core of the same sources only."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(csrc().rglob("*.[ch]*")):
        digest.update(f"{path.relative_to(csrc())}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def units(folders: Sequence[str], into: Path) -> list[Path]:
    """Write the units that are compiled.

    Args:
        folders: of csrc/, with all folders below them.
        into: folder for the units; a unit that has not changed is not written again.

    Returns:
        The units, or the sources themselves if UNITS_VARIABLE is '0'.
    """
    from itertools import groupby

    root = csrc()
    found = (path for name in folders for path in (root / name).rglob("*.cpp"))
    sources = sorted(found, key=lambda path: (path.parent, path.name))
    if os.environ.get(UNITS_VARIABLE) == "0":
        return sources
    into.mkdir(parents=True, exist_ok=True)
    made = []
    for folder, paths in groupby(sources, key=lambda path: path.parent.relative_to(root)):
        lines = [f'#include "{path.relative_to(root)}"\n' for path in paths]
        for first in range(0, len(lines), FILES_OF_A_UNIT):
            unit = into / f"{'_'.join(folder.parts)}_{first // FILES_OF_A_UNIT}.cpp"
            text = "".join(lines[first : first + FILES_OF_A_UNIT])
            if not unit.exists() or unit.read_text() != text:
                unit.write_text(text)
            made.append(unit)
    return made


def _cpp_extension() -> Any:
    """Import torch.utils.cpp_extension, without the line about a missing GPU that it logs."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module("torch.utils.cpp_extension")
    finally:
        logger.setLevel(before)


def compiled_extension() -> Path:
    """Return the file that compile_extension() makes for the running torch; it may not exist.

    The file is in $TORCH_EXTENSIONS_DIR, by default torch's folder in the user's cache.
    """
    import torch

    from torch_rpc_ext._build_info import SOURCES

    default = _cpp_extension().get_default_build_root()
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default), f"torch_rpc_ext_{SOURCES}")
    return root / extension_name(torch.__version__)


def compile_extension(*, again: bool = False) -> Path:
    """Compile the extension module for the running torch, against the core that is loaded.

    Of several processes that do this at the same time, one compiles and the others wait. The file
    is kept for later processes.

    Args:
        again: compile even if the file exists, and replace it.

    Returns:
        The extension module's file.

    Raises:
        ImportError: compiling is not possible or fails; the text says why, and what to do.
    """
    import fcntl
    import shutil

    import torch

    made = compiled_extension()
    folder = made.with_suffix("")
    if made.exists() and not again:
        return made
    missing = missing_for_compiling(core=False)
    if missing:
        raise ImportError(
            f"there is no extension module for torch {torch.__version__} and Python "
            f"{_python()} ({made.name}; {_there()}), and it cannot be compiled here: {missing}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # A compilation that was killed has left torch's lock file; torch would wait for ever.
            (folder / "lock").unlink(missing_ok=True)
            if made.exists() and not again:  # another process was first
                return made
            print(
                f"torch_rpc_ext: compiling the extension module for torch {torch.__version__} "
                f"into {folder}, once; this takes a minute or two ...",
                file=sys.stderr,
                flush=True,
            )
            if again:
                # ninja does not notice that torch's headers have changed.
                shutil.rmtree(folder)
            with _ninja_on_path():
                _cpp_extension().load(
                    "_C",
                    [str(unit) for unit in units(TORCH_FOLDERS, folder / "units")],
                    extra_cflags=compile_flags(core=False),
                    extra_ldflags=[f"-L{_PACKAGE}", *link_flags(core=False)],
                    extra_include_paths=[str(csrc()), *_ucx_headers()],
                    build_directory=str(folder),
                    is_python_module=False,
                )
            # Renamed at the end, so that another process only ever finds a complete file.
            (folder / "_C.so").rename(made)
    except OSError as error:
        raise ImportError(
            f"the extension module for torch {torch.__version__} cannot be compiled into "
            f"{folder} ({error}): set TORCH_EXTENSIONS_DIR to a folder that can be written to"
        ) from error
    except RuntimeError as error:
        raise ImportError(
            f"the extension module for torch {torch.__version__} does not compile: {error}"
        ) from error
    return made


def how_to_reinstall() -> str:
    """Return the command that installs this version again without changing other packages."""
    import json
    from importlib import metadata

    from torch_rpc_ext._base.version import __version__

    what = f"torch-rpc-ext=={__version__}"  # as from an index
    try:
        # pip notes here from where it installed a package that is not from an index (PEP 610).
        text = metadata.distribution("torch-rpc-ext").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    if (_PACKAGE.parent / "setup.py").is_file():
        what = f"--no-build-isolation -e {_PACKAGE.parent}"
    elif "dir_info" in origin:
        what = f"--no-build-isolation {origin['url']}"
    elif "url" in origin:
        what = str(origin["url"])
    return f"{sys.executable} -m pip install --force-reinstall --no-deps {what}"


def _ucx_headers() -> list[str]:
    """Return the folder of the UCX wheel's headers; a system's headers need no folder."""
    root = ucx_root()
    return [str(root / "include")] if root else []


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Put the package ninja on the PATH, for an environment that is not activated."""
    import shutil

    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        import ninja

        os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def missing_for_compiling(*, core: bool, torch: bool = True) -> str:
    """Return what the user must do before anything can be compiled; '' for nothing.

    Args:
        core: whether the core library will be compiled.
        torch: whether the extension module will be compiled.
    """
    import shlex
    import shutil
    import subprocess
    import sysconfig

    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]  # the one that torch uses
    if not csrc().is_dir():
        return f"the C++ sources are gone; run `{how_to_reinstall()}`"
    if shutil.which(compiler[0]) is None:
        return (
            f"install a C++20 compiler ({compiler[0]} is missing), for example by "
            "`apt-get install g++` or `dnf install gcc-c++`"
        )
    for probe, remedy in _probes(compiler[0], core=core, torch=torch):
        command = [*compiler, *compile_flags(core=core), "-fsyntax-only", "-x", "c++", "-"]
        tried = subprocess.run(
            [*command, f"-I{sysconfig.get_path('include')}"],
            input=probe,
            text=True,
            capture_output=True,
        )
        if tried.returncode != 0:
            return remedy
    if torch and importlib.util.find_spec("ninja") is None and shutil.which("ninja") is None:
        return f"run `{sys.executable} -m pip install ninja`"
    return ""


def _probes(compiler: str, *, core: bool, torch: bool) -> Iterator[tuple[str, str]]:
    """Yield (program that must compile, what to do if it does not)."""
    yield (
        "#include <concepts>\n#include <span>\n",
        f"install a newer C++ compiler ({compiler} does not know C++20), or name one in CXX",
    )
    if core:
        yield (
            "#include <openssl/evp.h>\n",
            "install OpenSSL's headers, by `apt-get install libssl-dev` or "
            "`dnf install openssl-devel`",
        )
    if torch:
        yield (
            "#include <Python.h>\n",
            f"install the headers of Python {_python()}, for example by "
            "`apt-get install python3-dev` or `dnf install python3-devel`",
        )


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _there() -> str:
    """Return a text that names the existing extension modules."""
    found = []
    for path in sorted(_PACKAGE.glob("_C_torch*.so")):
        number, python = path.name.removeprefix("_C_torch").split(".")[:2]
        digits = python.removeprefix("cpython-").partition("-")[0]
        found.append(f"torch {number[0]}.{number[1:]} and Python {digits[0]}.{digits[1:]}")
    return f"there is one for {', '.join(found)}" if found else "there is none at all"
