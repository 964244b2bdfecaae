"""``python -m torch_rpc_ext info`` and ``python -m torch_rpc_ext run``."""

from __future__ import annotations

import argparse
import sys

_EXAMPLES = """examples:
  python -m torch_rpc_ext info
      what is installed, which transports work here and why, and a self-test
  python -m torch_rpc_ext run train.py --epochs 3
      run a program that uses torch.distributed.rpc on UCX, without changing it
  python -m torch_rpc_ext run --nproc-per-node 4 train.py
      the same, four processes, with torchrun's options
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None for sys.argv's.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torch_rpc_ext",
        description="torch.distributed.rpc over UCX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["info", "run"], help="what to do; each has a --help")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    given = parser.parse_args(arguments)
    if given.command == "info":
        from torch_rpc_ext.cli import info

        return info.main(given.arguments)
    from torch_rpc_ext.cli import run

    return run.main(given.arguments)


if __name__ == "__main__":
    sys.exit(main())
