"""Builds torch_rpc_ext._C against the installed torch and the UCX of the libucx wheel."""

import importlib.util
import os
import platform
import shlex
import sys
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent


def ucx_root() -> Path:
    """Folder with UCX's include/ and lib/: any libucx wheel, cu12 or cu13."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "setup.py: UCX's headers are missing; run `pip install libucx-cu13` "
            "(or libucx-cu12) and build again with --no-build-isolation"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def ucx_version(root: Path) -> str:
    """Release of UCX whose headers are compiled against."""
    return (root / "UCX_WHEEL_VERSION.txt").read_text().strip()


def write_build_info(root: Path) -> None:
    """Leaves a note of what was built for: the loader compares before it loads."""
    lines = [
        '"""What torch_rpc_ext._C was built for; written by setup.py."""',
        "",
        f'TORCH_VERSION = "{torch.__version__.split("+")[0]}"',
        f'PYTHON_VERSION = "{platform.python_version()}"',
        f'UCX_VERSION = "{ucx_version(root)}"',
        "",
    ]
    (ROOT / "torch_rpc_ext" / "_build_info.py").write_text("\n".join(lines))


def extension(root: Path) -> CppExtension:
    """The one extension module, from all sources under csrc/."""
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp"))
    return CppExtension(
        name="torch_rpc_ext._C",
        sources=sources,
        include_dirs=[str(ROOT / "csrc"), str(root / "include")],
        library_dirs=[str(root / "lib")],
        # Found at run time without LD_LIBRARY_PATH or rpath: the package loads the
        # UCX that the user chose before it loads this module (_native.py).
        extra_link_args=["-l:libucp.so.0", "-l:libuct.so.0", "-l:libucs.so.0", "-lcrypto"],
        extra_compile_args=[
            "-std=c++20",
            "-O2",
            "-g0",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",  # torch's headers
            "-fvisibility=hidden",
            # What torch's RPC headers expect; USE_TENSORPIPE would need its headers.
            "-DUSE_DISTRIBUTED",
            "-DUSE_RPC",
            "-DUSE_C10D_GLOO",
            # Last, so that they win over those above.
            *shlex.split(os.environ.get("CXXFLAGS", "")),
        ],
    )


UCX_ROOT = ucx_root()
write_build_info(UCX_ROOT)
setup(
    ext_modules=[extension(UCX_ROOT)],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
