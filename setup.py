"""Builds the core library, and the extension module where there is a torch; see _native/build.py.

Under build isolation there is no torch: the extension is then compiled when it is first used.
"""

import gzip
import importlib.util
import os
import re
import resource
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
PACKAGE = "torch_rpc_ext"


def load_build_module():
    """Import torch_rpc_ext/_native/build.py by its path: the package cannot be imported yet."""
    spec = importlib.util.spec_from_file_location("build", ROOT / PACKAGE / "_native" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build_module()
# An installed torch_rpc_ext must not be loaded by `import torch`: it could disturb this build.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    Compiler = BuildExtension.with_options(use_ninja=True)
except ImportError:
    torch = None
    Compiler = build_ext


class Build(Compiler):
    """Builds core and extension: checks what is missing, names the files, prints the time taken."""

    def get_ext_filename(self, name: str) -> str:
        """Return the file of a library, relative to the package's folder."""
        core = name.endswith(build.CORE)
        file = build.CORE_LIBRARY if core else build.extension_name(torch.__version__)
        return os.path.join(*name.split(".")[:-1], file)

    def build_extension(self, extension: Extension) -> None:
        """Compile and link one library."""
        if not extension.name.endswith(build.CORE):
            extension.library_dirs.append(os.path.dirname(self.get_ext_fullpath(extension.name)))
        super().build_extension(extension)

    def build_extensions(self) -> None:
        """Build the core and the extension module."""
        ucx = build.ucx_root()
        if ucx is None:
            sys.exit(
                "setup.py: UCX's headers are missing; run `pip install libucx-cu13` "
                "(or libucx-cu12) and build again"
            )
        missing = build.missing_for_compiling(core=True, torch=torch is not None)
        if missing:
            sys.exit(f"setup.py: torch_rpc_ext cannot be compiled here: {missing}")
        started, before = time.monotonic(), _cpu()
        for extension in self.extensions:
            describe(extension, ucx)
        if torch is None:
            _compile_in_parallel(self.compiler)
        super().build_extensions()
        write_build_info(Path(self.get_ext_fullpath(f"{PACKAGE}.{build.CORE}")).parent, ucx)
        print(
            f"torch_rpc_ext: built {f'for torch {torch.__version__}' if torch else 'the core'} in "
            f"{time.monotonic() - started:.0f} s, {_cpu() - before:.0f} s of CPU",
            file=sys.stderr,
        )

    def copy_extensions_to_source(self) -> None:
        """Copy what was built into the source tree, for an editable installation."""
        super().copy_extensions_to_source()
        write_build_info(ROOT / PACKAGE, build.ucx_root())


class Sdist(sdist):
    """Makes an archive whose bytes depend on the sources and SOURCE_DATE_EPOCH only."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **options):
        """Write the archive of a folder; setuptools writes formats other than pip's."""
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, **options)
        epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.mode = 0o644
            return entry

        name = f"{base_name}.tar.gz"
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in sorted(Path(base_dir).rglob("*")):
                if path.is_file():
                    archive.add(path, recursive=False, filter=plain)
        return name


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _compile_in_parallel(compiler) -> None:
    """Let a compiler object of setuptools compile MAX_JOBS files at a time, as torch's does."""
    one_by_one = compiler.compile
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)

    def compile_all(sources, *arguments, **options):
        with ThreadPoolExecutor(jobs) as pool:
            made = pool.map(lambda each: one_by_one([each], *arguments, **options), sources)
            return [file for files in made for file in files]

    compiler.compile = compile_all


def write_build_info(folder: Path, ucx: Path) -> None:
    """Write from which sources and against which UCX the core was built: the loader compares."""
    header = (ucx / "include" / "ucp" / "api" / "ucp_version.h").read_text()
    major, minor = re.findall(r"define UCP_API_M(?:AJ|IN)OR\s+(\d+)", header)
    (folder / "_build_info.py").write_text(
        '"""What the core was built from and against; written by setup.py."""\n\n'
        f'SOURCES = "{build.sources_digest()}"\n'
        f'UCX_VERSION = "{major}.{minor}"\n'
    )


def describe(extension: Extension, ucx: Path) -> None:
    """Fill in sources and folders of a library, just before it is built: an sdist has no units."""
    core = extension.name.endswith(build.CORE)
    folders = build.CORE_FOLDERS if core else build.TORCH_FOLDERS
    kind = Extension if core else CppExtension
    units = build.units(folders, ROOT / "build" / "units")
    described = kind(
        name=extension.name,
        # Relative to this folder, as setuptools wants sources to be.
        sources=[str(unit.relative_to(ROOT)) for unit in units],
        include_dirs=[str(build.csrc()), str(ucx / "include")],
        library_dirs=[str(ucx / "lib")],
        extra_link_args=build.link_flags(core=core),
        extra_compile_args=build.compile_flags(core=core),
        language="c++",
    )
    vars(extension).update(vars(described))


# The core comes first: the extension module is linked to it.
NAMES = (build.CORE, "_C") if torch else (build.CORE,)
setup(
    ext_modules=[Extension(f"{PACKAGE}.{name}", [], language="c++") for name in NAMES],
    cmdclass={"build_ext": Build, "sdist": Sdist},
)
