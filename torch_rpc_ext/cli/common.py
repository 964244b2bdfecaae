"""Shared by the commands: their parsers, exit statuses, types of arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = [
    "EXIT_STATUSES",
    "MISTAKE",
    "NO_GROUP",
    "OK",
    "UNWELL",
    "CannotJoinError",
    "add_seconds",
    "add_workers",
    "count",
    "parser",
    "positive",
    "program",
]

OK, UNWELL, MISTAKE, NO_GROUP = 0, 1, 2, 3
EXIT_STATUSES = f"""exit status:
  {OK}  fine
  {UNWELL}  a worker did not answer
  {MISTAKE}  a wrong argument, or a worker that is not in the group
  {NO_GROUP}  there is no group that can be joined
"""


class CannotJoinError(Exception):
    """There is no group that a guest could join; the text says why."""


def program() -> str:
    """Return the words by which the user has called us, for texts that say how to call us."""
    script = Path(sys.argv[0]).name if sys.argv else ""
    return script if script == "torch-rpc-ext" else "python -m torch_rpc_ext"


def parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Make the parser of a command.

    Args:
        command: name of the command.
        description: what the command does.
        epilog: text below the options, printed unchanged: examples and the like.
    """
    return argparse.ArgumentParser(
        prog=f"{program()} {command}",
        description=description,
        epilog=epilog.replace("python -m torch_rpc_ext", program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_workers(made: argparse.ArgumentParser) -> None:
    """Add the names of workers as arguments; the user may give none."""
    made.add_argument("workers", nargs="*", metavar="WORKER", help="names; by default all")


def add_seconds(
    made: argparse.ArgumentParser | argparse._ArgumentGroup, flag: str, default: float, what: str
) -> None:
    """Add an option that takes a time above 0.

    Args:
        made: the parser, or a group of it.
        flag: the option.
        default: s.
        what: for --help, without unit and default.
    """
    text = f"{what}, s (default %(default)g)"
    made.add_argument(flag, type=positive, default=default, metavar="S", help=text)


def positive(text: str) -> float:
    """Read a number above 0, for argparse."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return number


def count(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number
