"""``python -m tests.chaos --seconds 600 --seed 1``; what `make chaos` runs."""

from __future__ import annotations

import argparse
import random
import sys

from tests.chaos import driver


def main() -> int:
    """Run the command line; the exit status is 1 if there are findings."""
    parser = argparse.ArgumentParser(description=driver.__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    arguments = parser.parse_args()
    return 1 if driver.run(arguments.seconds, arguments.seed).wrong else 0


if __name__ == "__main__":
    sys.exit(main())
