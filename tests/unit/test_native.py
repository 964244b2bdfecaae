"""Loading the extension: what is in the way is said in a sentence, with the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torch_rpc_ext import _build_info
from torch_rpc_ext.__main__ import main
from torch_rpc_ext._native import build, loader

RUNNING = torch.__version__


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been loaded."""
    monkeypatch.setattr(loader, "_module", None)
    monkeypatch.setattr(loader, "_ucx", None)
    monkeypatch.setattr(loader, "_mapped", lambda name: "")


def test_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_rpc_ext._build_info", None)
    with pytest.raises(ImportError, match=r"is not built: run `.* pip install .*--no-deps .*-e /"):
        loader.load()


@pytest.fixture
def another_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch that there is no extension module for, and where modules are compiled into."""
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    return tmp_path


def test_another_torch_and_no_compiler(
    another_torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    here = ".".join(RUNNING.split(".")[:2]).replace(".", r"\.")
    with pytest.raises(
        ImportError,
        match=rf"no extension module for torch 2\.99\.0.* one for torch {here} and Python 3.*"
        r"install a C\+\+20 compiler \(no-such-compiler is missing\), .* `apt-get install g\+\+`",
    ):
        loader.load()


def test_another_torch_and_a_folder_that_is_none(another_torch: Path) -> None:
    (another_torch / "compiled").write_text("a file")
    with pytest.raises(ImportError, match="set TORCH_EXTENSIONS_DIR to a folder that can be"):
        loader.load()


def test_another_torch_and_sources_that_do_not_compile(
    another_torch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = another_torch / "csrc"
    (broken / "compat").mkdir(parents=True)
    (broken / "compat" / "broken.cpp").write_text("#error of this test")
    monkeypatch.setattr(build, "csrc", lambda: broken)
    with pytest.raises(ImportError, match=r"torch 2\.99\.0\+cpu does not compile"):
        loader.load()
    assert "compiling the extension module for torch 2.99.0+cpu" in capfd.readouterr().err


def test_a_module_that_was_compiled_is_found(another_torch: Path) -> None:
    """Nothing is compiled again: the file is made by hand, and its content is the error's."""
    name = build.extension_name("2.99.0")
    folder = another_torch / "compiled" / f"torch_rpc_ext_{_build_info.SOURCES}"
    folder.mkdir(parents=True)
    (folder / name).write_text("no ELF")
    with pytest.raises(ImportError, match="file too short|invalid ELF header"):
        loader.load()


class Fits:
    """Stands for the extension module: the real one can be loaded once in a process."""

    __file__ = "_C.so"


@pytest.fixture
def does_not_fit(another_torch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An extension module that cannot be imported; the file that fits, once it is there."""
    name = build.extension_name("2.99.0")
    (another_torch / name).write_text("undefined symbol")
    (another_torch / build.CORE_LIBRARY).symlink_to(loader._FOLDER / build.CORE_LIBRARY)
    monkeypatch.setattr(loader, "_FOLDER", another_torch)
    original = loader._import_extension
    fits = build.compiled_extension()
    monkeypatch.setattr(
        loader, "_import_extension", lambda file: Fits() if file == fits else original(file)
    )

    def compile_extension(*, again: bool) -> Path:
        assert again
        fits.parent.mkdir(parents=True)
        fits.write_text("")
        return fits

    monkeypatch.setattr(build, "compile_extension", compile_extension)
    return fits


def test_a_module_that_does_not_fit(does_not_fit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportError) as refused:
        loader.load()
    command = f"{sys.executable} -m torch_rpc_ext build"
    assert f"run `{command}`, which compiles it again for this torch" in str(refused.value)
    assert not does_not_fit.exists()
    # The remedy, and what it leaves for the next process.
    assert main(["build"]) == 0
    assert "fits this torch" in capsys.readouterr().out
    loaded, loader._module = loader._module, None
    assert isinstance(loaded, Fits) and isinstance(loader.load(), Fits)


def test_the_command_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    loader._module = Fits()
    assert main(["build"]) == 0
    assert capsys.readouterr().out == "_C.so fits this torch\n"


def test_the_command_cannot(
    another_torch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["build"]) == 1
    assert capsys.readouterr().err.startswith("build: there is no extension module for torch 2.99")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "torch-rpc-ext=="),
        ('{"url": "file:///x/y.whl", "archive_info": {}}', "file:///x/y.whl"),
        ('{"url": "file:///x/y", "dir_info": {}}', "--no-build-isolation file:///x/y"),
    ],
)
def test_reinstalling_goes_where_it_came_from(
    origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Installed:
        @staticmethod
        def read_text(name: str) -> str | None:
            assert name == "direct_url.json"
            return origin

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed)
    monkeypatch.setattr(build, "_PACKAGE", tmp_path / "torch_rpc_ext")
    beginning = f"{sys.executable} -m pip install --force-reinstall --no-deps {command}"
    assert build.how_to_reinstall().startswith(beginning)


def test_units_hold_every_source_once(tmp_path: Path) -> None:
    folders = (*build.CORE_FOLDERS, *build.TORCH_FOLDERS)
    units = build.units(folders, tmp_path)
    lines = [line for unit in units for line in unit.read_text().splitlines()]
    root = build.csrc()
    assert sorted(lines) == sorted(
        f'#include "{path.relative_to(root)}"' for path in root.rglob("*.cpp")
    )


def test_sources_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.UNITS_VARIABLE, "0")
    assert build.units(["crypto"], tmp_path) == [build.csrc() / "crypto" / "crypto.cpp"]


def test_ucx_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_version", lambda library: (1, 17, 0))
    with pytest.raises(ImportError, match=r"built for UCX 1\.18\.0, but this one is 1\.17\.0"):
        loader._load_ucx("1.18.0")
    monkeypatch.setattr(loader, "_version", lambda library: (2, 0, 0))
    with pytest.raises(ImportError, match=r"2\.0\.0 .*--no-deps 'libucx-cu1.>=1\.18,<2'`$"):
        loader._load_ucx("1.18.0")


def test_ucx_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_RPC_EXT_UCX", str(tmp_path))
    with pytest.raises(ImportError, match=r"UCX \(folder\) cannot be loaded: .*libuc"):
        loader._load_ucx("1.18.0")


def test_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_RPC_EXT_UCX", raising=False)
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install libucx-cu13"):
        loader._load_ucx("1.18.0")
