"""The pages that are made from the code are what the code says."""

from __future__ import annotations

import subprocess
import sys

from tests.support.backend import ROOT


def test_generated_pages_are_up_to_date() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
