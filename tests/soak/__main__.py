"""``python -m tests.soak --seconds 600``; what `make soak` runs."""

from __future__ import annotations

import argparse
import sys

from tests.soak.driver import soak


def main() -> int:
    """Run the command line; the exit status is 1 if a call was wrong or a process grew."""
    parser = argparse.ArgumentParser(description="Mixed calls; nothing may grow.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    wrong = soak(arguments.seconds, arguments.seed)
    print("\n".join(wrong) or "nothing grew, every call was right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
