"""Takes away each private name of torch that the package uses, in turn, as another release of torch
may do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.backend import ROOT, needs_ucx
from torch_rpc_ext._upstream import torch_names

# The first test runs the program, which imports the package once for each name.
pytestmark = [needs_ucx("uses no such names"), pytest.mark.timeout(620)]

PROGRAM = Path(__file__).with_name("renamed_names.py")
NAMES = [
    *((who, name) for who, names in torch_names.NEEDED.items() for name in names),
    *(("", name) for name in torch_names.DONE_WITHOUT),
]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """For each name, what a program sees without it."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(NAMES),
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the package is imported after the name is gone
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize(("who", "name"), NAMES, ids=[name for _, name in NAMES])
def test_without(who: str, name: str, found: dict[str, dict[str, Any]]) -> None:
    saw = found[name]
    if saw.get("absent") and not who:
        pytest.skip("this torch does not have it")
    assert len(saw["warnings"]) <= 1
    assert saw.get("TENSORPIPE", "2.0") == "2.0"
    missing = f"has no {name}, which {who} needs: "
    refused = saw["UCX"] if who == torch_names.UCX else saw.get("feature")
    if who != torch_names.UCX:
        assert saw["UCX"] == "2.0"
    if who:
        assert refused.startswith("ImportError: this torch (") and missing in refused, refused
