"""Builds the core library and the extension module for the installed torch; see _build.py."""

import importlib.util
import os
import resource
import sys
import time
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent


def load_build_module():
    """torch_rpc_ext/_build.py by its file: the package itself cannot be imported yet."""
    spec = importlib.util.spec_from_file_location("_build", ROOT / "torch_rpc_ext" / "_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build_module()


class Build(BuildExtension):
    """Names the files, links the extension to the core, and says what it cost."""

    def get_ext_filename(self, name: str) -> str:
        """File of a library, from the package's folder on."""
        core = name.endswith(build.CORE)
        file = build.CORE_LIBRARY if core else build.extension_name(torch.__version__)
        return os.path.join(*name.split(".")[:-1], file)

    def build_extension(self, extension: Extension) -> None:
        """Compile and link; the core comes first."""
        if not extension.name.endswith(build.CORE):
            extension.library_dirs.append(os.path.dirname(self.get_ext_fullpath(extension.name)))
        super().build_extension(extension)

    def build_extensions(self) -> None:
        """Build both."""
        started, before = time.monotonic(), _cpu()
        super().build_extensions()
        print(
            f"torch_rpc_ext: built for torch {torch.__version__} in "
            f"{time.monotonic() - started:.0f} s, {_cpu() - before:.0f} s of CPU",
            file=sys.stderr,
        )


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def write_build_info(ucx: Path) -> None:
    """Leaves a note of what the core was built from and against: the loader compares."""
    (ROOT / "torch_rpc_ext" / "_build_info.py").write_text(
        '"""What the core was built from and against; written by setup.py."""\n\n'
        f'SOURCES = "{build.sources_digest()}"\n'
        f'UCX_VERSION = "{(ucx / "UCX_WHEEL_VERSION.txt").read_text().strip()}"\n'
    )


def extensions(ucx: Path) -> list[Extension]:
    """The core library, then the extension module."""
    made = []
    for kind, name, folders in (
        (Extension, build.CORE, build.CORE_FOLDERS),
        (CppExtension, "_C", build.TORCH_FOLDERS),
    ):
        core = name == build.CORE
        units = build.units(folders, ROOT / "build" / "units")
        made.append(
            kind(
                name=f"torch_rpc_ext.{name}",
                # Relative to this folder, as setuptools wants sources to be.
                sources=[str(unit.relative_to(ROOT)) for unit in units],
                include_dirs=[str(build.csrc()), str(ucx / "include")],
                library_dirs=[str(ucx / "lib")],
                extra_link_args=build.link_flags(core=core),
                extra_compile_args=build.compile_flags(core=core),
                language="c++",
            )
        )
    return made


UCX = build.ucx_root()
if UCX is None:
    sys.exit(
        "setup.py: UCX's headers are missing; run `pip install libucx-cu13` "
        "(or libucx-cu12) and build again with --no-build-isolation"
    )
write_build_info(UCX)
setup(
    ext_modules=extensions(UCX),
    cmdclass={"build_ext": Build.with_options(use_ninja=True)},
)
