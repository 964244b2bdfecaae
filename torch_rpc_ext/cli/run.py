"""``python -m torch_rpc_ext run``: run a program on UCX without changing it."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy as _untyped_runpy
import sys
import zipfile
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_rpc_ext._base.environment import BACKEND
from torch_rpc_ext.cli import common

__all__ = ["main"]

runpy: Any = _untyped_runpy  # the function that we need has no types

_DESCRIPTION = f"""Run a program that uses torch.distributed.rpc on UCX, unchanged.

Sets {BACKEND}=ucx, for the program and the processes that it starts, and runs the script in this
process; with torchrun's options before the script, runs them with torchrun.
"""
_EXAMPLES = """examples:
  python -m torch_rpc_ext run train.py --epochs 3
  python -m torch_rpc_ext run -m package.train --epochs 3
  python -m torch_rpc_ext run --nproc-per-node 4 train.py --epochs 3
  python -m torch_rpc_ext run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29400 train.py

torchrun's own options: torchrun --help
"""


def main(arguments: list[str]) -> int:
    """Run a script.

    Args:
        arguments: [torchrun options] script.py arguments.

    Returns:
        The exit status; that of the script where the script calls sys.exit().
    """
    parser = common.parser("run", _DESCRIPTION, _EXAMPLES)
    parser.usage = "%(prog)s [torchrun options] script.py [arguments]"
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if arguments else 2
    os.environ[BACKEND] = "ucx"
    if not any(entry.name == "torch_rpc_ext" for entry in entry_points(group="torch.backends")):
        print(
            "warning: torch_rpc_ext is not installed (no entry point torch.backends), so processes "
            "that the program starts will not run on UCX; run `pip install -e .` first.",
            file=sys.stderr,
        )
    if arguments[0] in ("-m", "--module"):
        if len(arguments) < 2:
            parser.error("-m needs the name of a module")
        sys.argv = arguments[1:]
        return _run_module(arguments[1], os.getcwd(), alter_argv=True)
    if arguments[0].startswith("-"):
        from torch.distributed import run as torchrun

        torchrun.main(arguments)
        return 0
    if not Path(arguments[0]).is_file():
        parser.error(f"there is no script {arguments[0]}")
    return _run_script(arguments[0], arguments[1:])


def _take_over() -> None:
    from torch_rpc_ext.takeover import take_over

    take_over()


def _look_first_in(folder: str) -> None:
    """Let imports look where they would if Python itself had started the program."""
    if not sys.flags.safe_path:
        sys.path[0] = folder  # in place of the folder of this command


def _new_main(**names: Any) -> dict[str, Any]:
    """Put a new module in the place of __main__, and return its namespace.

    The module stays there, because a program's threads and atexit functions run after its last
    line. So runpy.run_path() would not do: it puts the former module back.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, **names)
    return main.__dict__


def _run_script(script: str, arguments: list[str]) -> int:
    sys.argv = [script, *arguments]
    path = os.path.join(os.getcwd(), script)
    if zipfile.is_zipfile(path):  # such as zipapp makes: the program is __main__.py in the file
        if sys.flags.safe_path:
            sys.path.insert(0, path)  # without this flag _run_module() does so
        return _run_module("__main__", path, alter_argv=False)
    _look_first_in(str(Path(script).resolve().parent))
    _take_over()
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    loader: SourceFileLoader | SourcelessFileLoader
    if code is not None:  # a compiled file
        loader = SourcelessFileLoader("__main__", path)
    else:
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
    exec(code, _new_main(__file__=path, __cached__=None, __loader__=loader))
    return 0


def _run_module(module: str, folder: str, *, alter_argv: bool) -> int:
    _look_first_in(folder)
    _take_over()
    _new_main()
    runpy._run_module_as_main(module, alter_argv)  # what Python itself calls
    return 0
