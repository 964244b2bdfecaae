"""``python -m torch_rpc_ext build``: compile the extension module for the installed torch."""

from __future__ import annotations

import sys

from torch_rpc_ext.cli import common

__all__ = ["main"]

_DESCRIPTION = """Compile the extension module for the torch that is installed, unless one fits.

What is compiled stays in TORCH_EXTENSIONS_DIR, by default torch's folder in the user's cache. No
package is installed, changed or removed.
"""
_EXAMPLE = """examples:
  python -m torch_rpc_ext build
  TORCH_EXTENSIONS_DIR=/opt/extensions python -m torch_rpc_ext build     # in an image's recipe
"""


def main(arguments: list[str]) -> int:
    """Compile the extension module.

    Args:
        arguments: of the command.

    Returns:
        0, or 1 where the module cannot be compiled or loaded.
    """
    common.parser("build", _DESCRIPTION, _EXAMPLE).parse_args(arguments)
    from torch_rpc_ext._native import build, loader

    try:
        try:
            module = loader.load()
        except loader.DoesNotFitError:
            build.compile_extension(again=True)
            module = loader.load()
    except ImportError as error:
        print(f"build: {error}", file=sys.stderr)
        return common.UNWELL
    print(f"{module.__file__} fits this torch")
    return common.OK
