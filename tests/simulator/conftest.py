"""The simulator is switched on for the whole process, and before numba is imported: these tests
run in a process of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel_inputs import start_random

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    # Called early enough only if this folder was asked for by name.
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if all(path.is_relative_to(HERE) for path in paths):
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"


@pytest.fixture(autouse=True)
def _simulator() -> Iterator[None]:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        pytest.skip("needs a process of its own: pytest tests/simulator")
    from torch_rpc_ext.kernels.memory import SIMULATED

    assert SIMULATED
    start_random()
    yield
