"""Kernels as PTX, compiled once per compute capability and kept on disk.

PTX for a capability runs on every GPU of that capability or a later one; the driver compiles it
further. A capability is (major, minor), as torch.cuda.get_device_capability() returns it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "PTX_VERSIONS",
    "Capability",
    "CompiledKernel",
    "MissingCompilerError",
    "cache_folder",
    "compile_kernel",
    "target_for",
]

Capability = tuple[int, int]

#: Capabilities that we compile for -> the first version of the PTX language that knows them.
#: We write this version into the PTX, because NVVM writes its own latest one, which a driver older
#: than NVVM refuses whatever the code uses. Our kernels need no later version; if they did, ptxas
#: and the driver would say so.
PTX_VERSIONS: dict[Capability, str] = {
    (7, 0): "6.0",
    (7, 5): "6.3",
    (8, 0): "7.0",
    (8, 6): "7.1",
    (8, 9): "7.8",
    (9, 0): "7.8",
    (10, 0): "8.6",
    (12, 0): "8.7",
}

_PREFIX = "torch_rpc_ext_"
_DIGEST = "// sha256 of the rest: "
_log = logging.getLogger(__name__)


class MissingCompilerError(RuntimeError):
    """numba-cuda is not installed."""


@dataclass(frozen=True)
class CompiledKernel:
    """What it takes to load a kernel by the driver and to launch it.

    Attributes:
        ptx: text for cuModuleLoadData.
        entry: name for cuModuleGetFunction.
        arguments: names and counts, in order. Each is that many int64, one after the other, so
            that the parameters are 8 bytes each with no gaps; addresses are such integers too.
        capability: the one that the PTX is for.
    """

    ptx: str
    entry: str
    arguments: tuple[tuple[str, int], ...]
    capability: Capability


def target_for(capability: Capability) -> Capability:
    """Return the capability to compile for, so that the PTX runs on a GPU of the given capability.

    Raises:
        ValueError: the GPU is older than all capabilities that we compile for.
    """
    targets = [target for target in PTX_VERSIONS if target <= capability]
    if not targets:
        oldest = ".".join(map(str, min(PTX_VERSIONS)))
        raise ValueError(
            f"compute capability {capability!r} is not supported: kernels need {oldest} or later"
        )
    return max(targets)


def cache_folder() -> Path | None:
    """Return where PTX is kept for this user; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "torch-rpc-ext" / "ptx"


def compile_kernel(name: str, capability: Capability, folder: Path | None = None) -> CompiledKernel:
    """Compile a kernel, or take it from disk.

    Neither a GPU nor a driver is needed.

    Args:
        name: a key of registry.KERNELS.
        capability: of the GPU.
        folder: where PTX is kept; cache_folder() if None. If nothing can be written there, the
            kernel is compiled each time.

    Returns:
        What to load and launch.

    Raises:
        ValueError: there is no such kernel, or the GPU is too old.
        RuntimeError: it cannot be compiled here, with what to do; a MissingCompilerError without
            numba-cuda.
    """
    registry = _registry()
    if name not in registry.KERNELS:
        raise ValueError(f"there is no kernel {name!r}: it may be {', '.join(registry.KERNELS)}")
    kernel = registry.KERNELS[name]
    target = target_for(capability)
    folder = folder or cache_folder()
    file = None if folder is None else folder / _file_name(name, target)
    ptx = None if file is None else _read(file)
    if ptx is None:
        ptx = _compile(kernel, target)
        if file is not None:
            _write(file, ptx)
    return CompiledKernel(ptx, _PREFIX + name, kernel.arguments, target)


def _registry() -> Any:
    try:
        from torch_rpc_ext.kernels import memory, registry
    except ImportError as problem:
        raise MissingCompilerError(
            "kernels are compiled by numba-cuda: pip install 'torch-rpc-ext[cuda]'"
        ) from problem
    if memory.SIMULATED:
        raise RuntimeError("the CUDA simulator makes no PTX: unset NUMBA_ENABLE_CUDASIM")
    return registry


def _compile(kernel: Any, target: Capability) -> str:
    from numba import cuda, types

    signature = tuple(
        types.int64 if count == 1 else types.UniTuple(types.int64, count)
        for _, count in kernel.arguments
    )
    try:
        ptx, _ = cuda.compile_ptx(kernel.function, signature, cc=target)
    except Exception as problem:
        # Many classes: NVVM may be missing, too old for this GPU, or (CUDA 13) too new.
        raise RuntimeError(
            f"kernel {kernel.name} cannot be compiled for compute capability "
            f"{target[0]}.{target[1]}: {problem}"
        ) from problem
    # Numba's name contains a number that counts compilations, so it differs from run to run.
    entry = re.search(r"\.visible \.entry (\S+)\(", ptx)
    assert entry is not None, "numba-cuda has compiled something that is no kernel"
    ptx = ptx.replace(entry[1], _PREFIX + kernel.name)
    # So do the names of variables that numba makes for each function. Kernels do not use them.
    ptx = re.sub(r"(?m)^\.common .*NumbaEnv.*\n", "", ptx)
    return re.sub(r"(?m)^\.version .*$", f".version {PTX_VERSIONS[target]}", ptx)


def _file_name(name: str, target: Capability) -> str:
    """Return a name that changes with all that the PTX depends on."""
    key = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        key.update(source.read_bytes())
    for package in ("numba-cuda", "numba"):
        key.update(importlib.metadata.version(package).encode())
    return f"{name}-sm_{target[0]}{target[1]}-{key.hexdigest()[:32]}.ptx"


def _read(file: Path) -> str | None:
    """Return the PTX of a file; None if there is none or it is not what was written."""
    try:
        digest, _, ptx = file.read_text().partition("\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as problem:
        _log.warning("cannot read %s, compiling it again: %s", file, problem)
        return None
    if digest != _digest(ptx):
        _log.warning("%s is damaged, compiling it again", file)
        return None
    return ptx


def _write(file: Path, ptx: str) -> None:
    """Write all or nothing: others may read or write the same file at this moment."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem)
        try:
            with open(handle, "w") as writer:
                writer.write(f"{_digest(ptx)}\n{ptx}")
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as problem:
        _log.warning("kernels are not kept, and compiled each time: %s", problem)


def _digest(ptx: str) -> str:
    return _DIGEST + hashlib.sha256(ptx.encode()).hexdigest()
