"""Fixtures that several files use."""

from __future__ import annotations

import pytest

from tests.support import libcuda
from tests.support.libcuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    for name, value in libcuda.environment(uuids="ab").items():
        monkeypatch.setenv(name, value)
    fake = FakeCuda()
    fake.forget_calls()
    return fake
