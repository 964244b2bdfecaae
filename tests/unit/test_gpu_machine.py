"""What begins `make test-gpu` and `make bench-gpu`, as far as it can be tried without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu import __main__ as gpu_tests
from tests.support import gpu

NAME = "torch_rpc_ext_test_package"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "SITE", tmp_path / "site")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "site"


def make_wheel(folder: Path, tag: str = "py3-none-any") -> None:
    folder.mkdir()
    about = f"{NAME}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{NAME}-1.0-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{NAME}.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_packages_come_from_wheels(site: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    with pytest.raises(gpu.NotReady, match=f"(?s)missing here: a-name.*pip download .* {wheels}"):
        gpu.install(wheels)  # there are none
        check(wheels)
    make_wheel(wheels)
    gpu.install(wheels)
    check(wheels)
    assert str(site) in gpu.environment()["PYTHONPATH"]


def check(wheels: Path) -> None:
    gpu.check({"sys": "python", NAME: "a-name"}, wheels)


def test_a_wheel_for_something_else_is_named(site: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "cp27-cp27m-win32")
    with pytest.raises(gpu.NotReady, match="(?s)cannot be installed:.*not a supported wheel"):
        gpu.install(tmp_path / "wheels")
    assert not site.exists()


@pytest.mark.parametrize(
    "what", [["bench", "-m", "benchmarks", "cuda"], ["test", "-m", "tests.gpu"]]
)
def test_without_a_gpu_nothing_is_done(
    what: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "there is no GPU")
    monkeypatch.setattr(subprocess, "run", lambda *_: pytest.fail("it was done"))
    assert gpu.main(what) == gpu.NO_GPU
    assert "nothing is done: there is no GPU" in capsys.readouterr().err


def test_with_a_gpu_it_is_built_and_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "")
    monkeypatch.setattr(gpu, "build", lambda: None)
    wheels = ["--wheels", str(tmp_path)]
    assert (
        gpu.main([*wheels, "test", "-c", "import tests.gpu, torch_rpc_ext; raise SystemExit(5)"])
        == 5
    )

    def fail() -> None:
        raise gpu.NotReady("the extension cannot be built")

    monkeypatch.setattr(gpu, "build", fail)
    assert gpu.main([*wheels, "test", "-c", ""]) == 1
    assert "cannot be built" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["test"])


def test_the_parts_are_there() -> None:
    """What `python -m tests.gpu` names exists; that it can be collected is a part of make test."""
    paths = [path for _, arguments in gpu_tests.PARTS for path in arguments if "/" in path]
    assert paths and all((gpu.ROOT / path).exists() for path in paths)
    names = "".join(path.read_text() for path in (gpu.ROOT / "tests" / "gpu").glob("test_*.py"))
    for _, chosen in gpu_tests.SANITIZED:
        words = [word for word in chosen.split() if word not in ("not", "and")]
        assert all(re.search(rf"def test_\w*{word.removeprefix('test_')}", names) for word in words)


def test_the_sanitizer_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_tests, "why_no_gpu", lambda: "")
    monkeypatch.setattr(gpu_tests, "PARTS", [])
    assert gpu_tests.main() == 1
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert gpu_tests.main() == 0
    monkeypatch.setattr(gpu_tests, "why_no_gpu", lambda: "there is no GPU")
    assert gpu_tests.main() == gpu.NO_GPU
