"""A short run of `make chaos`; tests/chaos describes it."""

from __future__ import annotations

import pytest

from tests.chaos import driver
from tests.support.backend import needs_ucx

pytestmark = needs_ucx("its workers do not come back, and its errors have no kinds")


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1])
def test_a_minute_of_chaos(seed: int) -> None:
    findings = driver.run(60, seed)
    assert not findings.wrong, "\n".join(findings.wrong)
    assert findings.calls > 100 and findings.restarts > 0, "nothing happened"
