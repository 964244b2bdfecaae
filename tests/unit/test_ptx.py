"""PTX for every compute capability: compiled by NVVM, assembled by ptxas, kept on disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from torch_rpc_ext.kernels import ptx
from torch_rpc_ext.kernels.table import MAX_DIMS

KERNEL = "segments"  # where one is as good as the other


@pytest.fixture(autouse=True)
def _compiler() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        pytest.skip("NUMBA_ENABLE_CUDASIM is set: nothing is compiled")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ptx")


def names(target: ptx.Capability) -> list[str]:
    """All kernels for the oldest and the latest ones; elsewhere one of each way to write them."""
    from torch_rpc_ext.kernels.registry import KERNELS

    if target in ((7, 5), (9, 0), (10, 0)):
        return list(KERNELS)
    return ["segments", "segments_float32_to_float16", "strided_16", "checksum"]


def compile_or_skip(name: str, target: ptx.Capability, folder: Path) -> ptx.CompiledKernel:
    try:
        return ptx.compile_kernel(name, target, folder)
    except RuntimeError as problem:
        # NVVM of CUDA 13 ends at 7.5, that of CUDA 12 does not know the latest.
        if "is not supported" in str(problem):
            pytest.skip(str(problem))
        raise


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are compiled, and not taken from disk."""
    compiled = []
    real = ptx._compile

    def count(kernel: Any, target: ptx.Capability) -> str:
        compiled.append(kernel.name)
        return real(kernel, target)

    monkeypatch.setattr(ptx, "_compile", count)
    return compiled


@pytest.mark.parametrize(
    "target", ptx.PTX_VERSIONS, ids=lambda target: f"sm_{target[0]}{target[1]}"
)
def test_all_kernels_are_compiled_and_assembled(target: ptx.Capability, shared: Path) -> None:
    ptxas = shutil.which("ptxas")
    for name in names(target):
        kernel = compile_or_skip(name, target, shared)
        assert kernel.capability == target
        assert f".target sm_{target[0]}{target[1]}" in kernel.ptx
        assert f".version {ptx.PTX_VERSIONS[target]}\n" in kernel.ptx
        check_interface(kernel)
        assert "NumbaEnv" not in kernel.ptx
        # Numba makes a float of an int64 and an unsigned: sums above 2**53 would be wrong.
        assert not re.search(r"\.f(16|32|64)\b", kernel.ptx), name
    if ptxas is None:
        pytest.skip("compiled; not assembled, because there is no ptxas here")
    for file in shared.glob(f"*-sm_{target[0]}{target[1]}-*.ptx"):
        check_assembles(ptxas, file, target)


def check_interface(kernel: ptx.CompiledKernel) -> None:
    """The parameters of the entry are what `arguments` promises: 8 bytes each, in order."""
    entry = re.findall(r"\.visible \.entry (\S+)\(([^)]*)\)", kernel.ptx)
    assert len(entry) == 1 and entry[0][0] == kernel.entry
    parameters = [line.split()[:2] for line in entry[0][1].split(",")]
    assert parameters == [[".param", ".u64"]] * sum(count for _, count in kernel.arguments)


def check_assembles(ptxas: str, file: Path, target: ptx.Capability) -> None:
    ended = subprocess.run(
        [ptxas, f"-arch=sm_{target[0]}{target[1]}", "-v", file, "-o", "/dev/null"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, f"{file.name}: {ended.stderr}"
    # Local memory lies in the device's memory: a kernel that only copies must not need any.
    assert "0 bytes stack frame, 0 bytes spill stores" in ended.stderr, ended.stderr


def test_arguments_are_named(shared: Path) -> None:
    strided = dict(ptx.compile_kernel("strided_4", (9, 0), shared).arguments)
    assert strided["sizes"] == MAX_DIMS and strided["elements"] == 1
    assert list(strided)[:2] == ["source", "destination"]


def test_a_capability_in_between_takes_the_one_below(shared: Path) -> None:
    assert ptx.target_for((8, 7)) == (8, 6)
    assert ptx.target_for((12, 1)) == max(ptx.PTX_VERSIONS)
    assert ptx.compile_kernel(KERNEL, (10, 3), shared).capability == (10, 0)


def test_errors_say_what_may_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(6, 1\) is not supported: kernels need 7.0"):
        ptx.compile_kernel(KERNEL, (6, 1), tmp_path)
    with pytest.raises(ValueError, match="no kernel 'transpose': it may be segments, "):
        ptx.compile_kernel("transpose", (9, 0), tmp_path)


def test_compiled_once(tmp_path: Path, counted: list[str]) -> None:
    first = ptx.compile_kernel(KERNEL, (9, 0), tmp_path)
    assert ptx.compile_kernel(KERNEL, (9, 0), tmp_path) == first
    assert counted == [KERNEL]
    ptx.compile_kernel(KERNEL, (8, 0), tmp_path)
    assert counted == [KERNEL, KERNEL]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "binary"])
def test_a_damaged_file_is_made_again(
    damage: str, tmp_path: Path, counted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = ptx.compile_kernel(KERNEL, (9, 0), tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    changed = {
        "cut": whole[: len(whole) // 2],
        "changed": whole.replace(b"add.s64", b"sub.s64", 1),
        "empty": b"",
        "binary": b"\xff\xfe" + whole,
    }
    file.write_bytes(changed[damage])
    assert ptx.compile_kernel(KERNEL, (9, 0), tmp_path) == first
    assert counted == [KERNEL, KERNEL] and file.name in caplog.text
    assert file.read_bytes() == whole


def test_other_sources_or_another_numba_make_another_file(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ptx.compile_kernel(KERNEL, (9, 0), tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0")
    ptx.compile_kernel(KERNEL, (9, 0), tmp_path)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"other source")
    ptx.compile_kernel(KERNEL, (9, 0), tmp_path)
    assert len(counted) == 3 and len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    kernel = ptx.compile_kernel(KERNEL, (9, 0), tmp_path / "file" / "folder")
    assert kernel.entry in kernel.ptx
    assert "compiled each time" in caplog.text


def test_no_half_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    ptx.compile_kernel(KERNEL, (9, 0), tmp_path)
    assert not list(tmp_path.iterdir())


def test_where_the_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ptx.cache_folder() == tmp_path / "torch-rpc-ext" / "ptx"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    assert ptx.cache_folder() == Path.home() / ".cache" / "torch-rpc-ext" / "ptx"
