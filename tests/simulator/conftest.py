"""The simulator is switched on for the whole process, and before numba is imported: these tests
run in a process of their own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel_inputs import start_random

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    # Called early enough only if this folder was asked for by name.
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if all(path.is_relative_to(HERE) for path in paths):
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"


def _share_memory_within_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put our function in the place of numba's, by which two threads of a block that ask for a
    shared array at the same time get one each: numba's looks whether the array exists, and then
    makes the array, without a lock. Both functions know an array by the line that asks for it."""
    from numba.cuda.simulator import kernelapi

    lock = threading.Lock()

    def array(self: Any, shape: Any, dtype: Any) -> Any:
        caller = sys._getframe(1)
        key = (caller.f_code.co_filename, caller.f_lineno)
        with lock:
            if key not in self._allocations:
                dtype = kernelapi.numpy_support.as_dtype(dtype)
                self._allocations[key] = kernelapi.np.empty(shape, dtype)
            return self._allocations[key]

    monkeypatch.setattr(kernelapi.FakeCUDAShared, "array", array)


@pytest.fixture(autouse=True)
def _simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        pytest.skip("needs a process of its own: pytest tests/simulator")
    from torch_rpc_ext.kernels.memory import SIMULATED

    assert SIMULATED
    _share_memory_within_blocks(monkeypatch)
    start_random()
    yield
