"""Executes the notebooks from top to bottom and keeps their outputs; `make tutorials`.

The source of a notebook is a .py file in jupytext's format (py:percent); the .ipynb file beside the
source is made from the source, with outputs. Each notebook runs in an empty folder, so that the
modules that the notebook writes stay out of the repository.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import jupyter_client
import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
LIMIT = 180.0  # s for a whole notebook
CELL_LIMIT = 600.0  # s after which a cell hangs, also on a busy machine
LARGE = "SMALL = False"  # the line with which each notebook chooses its sizes


def sources() -> list[Path]:
    """Return the .py files of the notebooks, in their order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def kernel(folder: str) -> jupyter_client.AsyncKernelManager:
    """Return a kernel for nbclient that has Unix sockets in a folder instead of TCP ports.

    Between jupyter_client's search for a free port and the kernel's start another process may take
    the port, and the kernel would end.
    """
    return jupyter_client.AsyncKernelManager(
        kernel_name="python3",
        transport="ipc",
        connection_file=os.path.join(folder, "kernel.json"),
    )


def execute(source: Path, *, small: bool = False) -> Any:
    """Return the notebook of a .py file, executed.

    Args:
        source: the .py file.
        small: use the notebook's small sizes, as if its reader had set SMALL.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, or did not end.
    """
    notebook = jupytext.read(source)
    if small:
        for cell in notebook.cells:
            cell["source"] = cell["source"].replace(LARGE, "SMALL = True")
    before = os.environ.get("PYTHONPATH")
    # The notebooks import this checkout's package, wherever another one is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tutorial_") as folder,
            tempfile.TemporaryDirectory(prefix="kernel_") as sockets,
        ):
            client = nbclient.NotebookClient(
                notebook,
                km=kernel(sockets),
                timeout=CELL_LIMIT,
                coalesce_streams=True,
                extra_arguments=["--log-level=ERROR"],
                resources={"metadata": {"path": folder}},
            )
            client.execute()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    tidy(notebook)
    return notebook


def tidy(notebook: Any) -> None:
    """Leave out times of execution, random cell ids and paths of this machine."""
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell{index}"
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                text = output["text"].replace(sysconfig.get_path("purelib"), "site-packages")
                output["text"] = text.replace(str(ROOT), "torch-rpc-ext")


def text_outputs(notebook: Any) -> str:
    """Return what the cells printed and returned, as text."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(parts)


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Execute the notebooks and keep their outputs.")
    parser.add_argument("names", nargs="*", help="beginnings of file names; all by default")
    names = tuple(parser.parse_args().names)
    chosen = [path for path in sources() if not names or path.name.startswith(names)]
    if not chosen:
        parser.error(f"no notebook begins with {', '.join(names)}")
    late = []
    for source in chosen:
        begin = time.monotonic()
        print(f"{source.name} ... ", end="", flush=True)
        notebook = execute(source)
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        seconds = time.monotonic() - begin
        print(f"{seconds:.0f} s", flush=True)
        if seconds > LIMIT:
            late.append(source.name)
    if late:
        print(f"longer than {LIMIT:.0f} s: {', '.join(late)}", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
