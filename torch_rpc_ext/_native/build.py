"""How the C++ is built: by setup.py, and by the loader for a torch that has no extension here.

There are two native parts, because almost half of csrc/ does not know torch:

- the core, one shared library, compiled once: CORE_FOLDERS;
- the extension module, which is torch's RpcAgent and the bindings: TORCH_FOLDERS. It is compiled
  for each minor release of torch, because torch's C++ ABI changes with them. Extensions for several
  torches can lie side by side.

Most of the time of compiling a file goes into torch's headers: 7 of 9 s. So the files of a folder
are compiled as a few units that include up to FILES_OF_A_UNIT of them each. Names in anonymous
namespaces must therefore be unique within a folder.

Every process that calls init_rpc() imports this module, and setup.py loads it by its path, because
the package cannot be imported yet. So what only compiling needs is imported where it is used.
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
# A library's file that ended in .so would be a module of the package to pkgutil.
CORE_LIBRARY = "libtorch_rpc_ext_core.so.0"
# More files make fewer, longer units, that need more memory (2.3 GB at 13 of bindings/).
FILES_OF_A_UNIT = 8
#: '0' compiles each file alone, which is right for whoever changes single files with ccache.
UNITS_VARIABLE = "TORCH_RPC_EXT_BUILD_UNITS"

_PACKAGE = Path(__file__).resolve().parents[1]
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-g0",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # torch's headers
)
_UCX = ("-l:libucp.so.0", "-l:libuct.so.0", "-l:libucs.so.0")


def compile_flags(*, core: bool) -> list[str]:
    """Flags of the compiler, the user's CXXFLAGS last so that they win."""
    import shlex

    torch_only = (
        "-fvisibility=hidden",
        # What torch's RPC headers expect; USE_TENSORPIPE would need its headers.
        "-DUSE_DISTRIBUTED",
        "-DUSE_RPC",
        "-DUSE_C10D_GLOO",
    )
    # A function of the core that calls another one of the core needs no detour by the linker.
    core_only = ("-fno-semantic-interposition",)
    chosen = core_only if core else torch_only
    return [*_FLAGS, *chosen, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def link_flags(*, core: bool) -> list[str]:
    """Libraries, by name and without rpath: the loader has loaded them before (loader.py)."""
    if core:
        return [*_UCX, "-lcrypto", f"-Wl,-soname,{CORE_LIBRARY}", "-Wl,-Bsymbolic-functions"]
    return [f"-l:{CORE_LIBRARY}"]


def csrc() -> Path:
    """Folder of the C++ sources: of the source tree, or those that are installed."""
    tree = _PACKAGE.parent / "csrc"
    return tree if tree.is_dir() else _PACKAGE / "_csrc"


def extension_name(torch_version: str) -> str:
    """File of the extension module for a torch and for the running Python.

    Args:
        torch_version: as torch.__version__, "2.13.0+cpu".
    """
    major, minor = torch_version.split(".")[:2]
    return f"_C_torch{major}{minor}{EXTENSION_SUFFIXES[0]}"


def ucx_root() -> Path | None:
    """Folder with UCX's include/ and lib/: any libucx wheel, cu12 or cu13; None for none."""
    spec = importlib.util.find_spec("libucx")
    for location in (spec.submodule_search_locations or []) if spec else []:
        return Path(location)
    return None


def sources_digest() -> str:
    """Names the C++ sources by their content: extensions for other sources do not fit the core."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(csrc().rglob("*.[ch]*")):
        digest.update(f"{path.relative_to(csrc())}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def units(folders: Sequence[str], into: Path) -> list[Path]:
    """Write what the compiler is given.

    Args:
        folders: of csrc/, with all below them.
        into: folder for the units; a unit that has not changed is left as it is.

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
    """Import it without what a torch with CUDA logs then: that there is no GPU here."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module("torch.utils.cpp_extension")
    finally:
        logger.setLevel(before)


def compiled_extension() -> Path:
    """File that compile_extension() makes for the running torch, whether it is there or not.

    It is in $TORCH_EXTENSIONS_DIR, by default torch's folder in the user's cache.
    """
    import torch

    from torch_rpc_ext._build_info import SOURCES

    default = _cpp_extension().get_default_build_root()
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default), f"torch_rpc_ext_{SOURCES}")
    return root / extension_name(torch.__version__)


def compile_extension(*, again: bool = False) -> Path:
    """Compile the extension module for the running torch, against the core that is loaded.

    Processes that ask at the same time wait for the first. The result is kept, so later processes
    find it.

    Args:
        again: also where there is one, which is then replaced.

    Returns:
        The extension module's file.

    Raises:
        ImportError: it cannot be compiled; the text says why, and what to do.
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
            # The lock file of a compilation that was killed; torch would wait for ever.
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
            # Only now: a file that somebody finds there is complete.
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
    """Return the command that installs this version again, and nothing else with it."""
    import json
    from importlib import metadata

    from torch_rpc_ext._base.version import __version__

    what = f"torch-rpc-ext=={__version__}"  # as from an index
    try:
        # Where pip had it from, if not from an index (PEP 610).
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
    """Return the folder of the UCX wheel's headers; a system's headers are found without."""
    root = ucx_root()
    return [str(root / "include")] if root else []


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Let torch find the package ninja also where its environment is not activated."""
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
    """Return what has to be done before anything can be compiled; '' for nothing.

    Args:
        core: whether the core library is to be compiled.
        torch: whether the extension module is.
    """
    import shlex
    import shutil
    import subprocess
    import sysconfig

    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]  # as torch looks for it
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
    """Yield programs that must compile, and what to do for each that does not."""
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
    """Say which extension modules there are."""
    found = []
    for path in sorted(_PACKAGE.glob("_C_torch*.so")):
        number, python = path.name.removeprefix("_C_torch").split(".")[:2]
        digits = python.removeprefix("cpython-").partition("-")[0]
        found.append(f"torch {number[0]}.{number[1:]} and Python {digits[0]}.{digits[1:]}")
    return f"there is one for {', '.join(found)}" if found else "there is none at all"
