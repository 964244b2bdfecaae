"""What protoc makes of an application's .proto, in build/applications/: made where it is older than
the .proto, never committed."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_BUILD = _HERE.parent.parent / "build" / "applications"


def stubs(application: str) -> tuple[Any, Any]:
    """Return the modules of an application's messages and services."""
    generate(application)
    if str(_BUILD) not in sys.path:
        sys.path.append(str(_BUILD))
    name = f"{application}_pb2"
    return importlib.import_module(name), importlib.import_module(f"{name}_grpc")


def generate(application: str) -> list[Path]:
    """Return the generated files, made if need be.

    Raises:
        ImportError: grpcio-tools is not installed.
        RuntimeError: protoc does not take the .proto.
    """
    proto = _HERE / application / f"{application}.proto"
    made = [_BUILD / f"{application}_pb2{kind}.py" for kind in ("", "_grpc")]
    if all(file.exists() and file.stat().st_mtime > proto.stat().st_mtime for file in made):
        return made
    protoc: Any = importlib.import_module("grpc_tools.protoc")
    _BUILD.mkdir(parents=True, exist_ok=True)
    # Several processes may do so at once: each makes its own, and puts it in place as a whole.
    with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
        where = [f"-I{proto.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
        if protoc.main(["protoc", *where, proto.name]) != 0:
            raise RuntimeError(f"protoc does not take {proto.name}; its errors stand above")
        for file in made:
            os.replace(Path(folder) / file.name, file)
    return made
