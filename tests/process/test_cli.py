"""The command line: how it is called, and what it prints without a command."""

from __future__ import annotations

import importlib.metadata
import os
import py_compile
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import torch_rpc_ext
from tests.support.backend import ROOT, needs_ucx

pytestmark = needs_ucx("is not what the commands are about")

#: What an installer writes into the file of a console script.
SCRIPT = """\
import sys
from {module} import {function}
sys.exit({function}())
"""


@pytest.fixture(params=["module", "script"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """`python -m torch_rpc_ext`, and the console script as pyproject.toml names it."""
    if request.param == "module":
        return [sys.executable, "-m", "torch_rpc_ext"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, entry)] = project["scripts"].items()
    module, function = entry.split(":")
    (tmp_path / name).write_text(SCRIPT.format(module=module, function=function))
    return [sys.executable, str(tmp_path / name)]


def called(command: list[str]) -> str:
    """The name that the texts of the command use for it."""
    return "python -m torch_rpc_ext" if "-m" in command else "torch-rpc-ext"


def run(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=150
    )


def test_version(command: list[str]) -> None:
    ended = run(command, "--version")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"torch-rpc-ext {torch_rpc_ext.__version__}\n"
    installed = importlib.metadata.version("torch-rpc-ext")
    assert ended.stdout.split()[1] == installed


def test_without_a_command_it_shows_its_help(command: list[str]) -> None:
    ended = run(command)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert ended.stdout.startswith(f"usage: {called(command)} ")
    for name in ("info", "run", "build", "top", "ping", "trace"):
        assert f"\n  {called(command)} {name}" in ended.stdout
    assert ended.stdout == run(command, "--help").stdout


def test_the_help_of_a_command_names_the_program_as_it_was_called(command: list[str]) -> None:
    ended = run(command, "ping", "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"usage: {called(command)} ping ")
    assert f"{called(command)} ping worker1" in ended.stdout
    assert ("python -m" in ended.stdout) == ("-m" in command)


def test_a_wrong_command_is_named(command: list[str]) -> None:
    ended = run(command, "tpo")
    assert ended.returncode == 2 and "'tpo'" in ended.stderr and "top" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_run_finds_a_module_where_it_is_started(command: list[str], tmp_path: Path) -> None:
    package = tmp_path / "work" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "import sys, package; print(sys.argv[1:], sys.path[0], __name__); sys.exit(3)"
    )
    ended = subprocess.run(
        [*command, "run", "-m", "package.train", "--flag"],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 3, ended
    assert ended.stdout == f"['--flag'] {package.parent} __main__\n", ended


#: Prints what a program can see of itself, and what it can still do when its last line has run.
PROGRAM = """
import atexit, pickle, sys, threading

def later(how):
    print(how, pickle.loads(pickle.dumps(later)) is later, flush=True)

def main_thread_has_ended():
    threading.main_thread().join()
    later("in a thread")

if __name__ == "__main__":
    atexit.register(later, "at exit")
    threading.Thread(target=main_thread_has_ended).start()
    print(sys.argv, sys.path[0], __file__, __package__, getattr(__spec__, "name", None))
    print(type(__loader__), type(__builtins__), sorted(globals()), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        *((["prog.py"], ""), (["./link.py"], ""), (["-m", "prog"], ""), (["prog.pyz"], "")),
        *((["compiled.pyc"], ""), (["prog.py"], "safe path"), (["prog.pyz"], "safe path")),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else value,
)
def test_run_runs_a_program_as_python_does(
    command: list[str], how: list[str], flags: str, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (work / "scripts").mkdir(parents=True)
    (work / "prog.py").write_text(PROGRAM)
    (work / "scripts" / "prog.py").write_text(PROGRAM)
    (work / "link.py").symlink_to("scripts/prog.py")
    with zipfile.ZipFile(work / "prog.pyz", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    py_compile.compile(str(work / "prog.py"), str(work / "compiled.pyc"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": flags}
    ours, pythons = (
        subprocess.run(
            [*program, *how, "--flag"], cwd=work, env=env, capture_output=True, text=True
        )
        for program in ([*command, "run"], [sys.executable])
    )
    assert pythons.stdout.splitlines()[2:] == ["in a thread True", "at exit True"], pythons
    assert (ours.stdout, ours.stderr, ours.returncode) == (pythons.stdout, "", 0), ours
