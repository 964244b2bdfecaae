"""What the commands that look at a group share: exit statuses, types of arguments."""

from __future__ import annotations

import argparse

OK, UNWELL, MISTAKE, NO_GROUP = 0, 1, 2, 3
EXIT_STATUSES = f"""exit status:
  {OK}  fine
  {UNWELL}  a worker did not answer
  {MISTAKE}  a wrong argument, or a worker that is not in the group
  {NO_GROUP}  there is no group that can be joined
"""


class CannotJoinError(Exception):
    """There is no group there that a guest could join; the text says why."""


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
