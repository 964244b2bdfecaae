"""What all tests share: the header line, the report of workers' output, the pair of workers that
many small tests use, and two hosts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest

from tests.process import group as groups
from tests.support import netns
from tests.support.backend import backend_name, on_ucx


def pytest_report_header() -> str:
    return f"RPC back end under test: {backend_name()}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than 10 seconds or gigabytes of memory")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile what the collected tests need of tests.support.native: the time-out of no test allows
    for a compiler."""
    native = sys.modules.get("tests.support.native")
    if native is None or session.config.option.collectonly or not on_ucx():
        return
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    if any(getattr(module, "native", None) is native for module in modules):
        native.build()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for group in groups.USED:
            report.sections.append(("Workers", group.output()))
    return report


@pytest.fixture(autouse=True)
def _forget_groups() -> Iterator[None]:
    groups.USED.clear()
    yield


@pytest.fixture(autouse=True)
def _no_takeover_stays() -> Iterator[None]:
    """A takeover in this process would change the back end of the tests after this one."""
    before = os.environ.get("TORCH_RPC_BACKEND")
    yield
    assert os.environ.get("TORCH_RPC_BACKEND") == before


@pytest.fixture(scope="module")
def _pairs() -> Iterator[list[groups.Group]]:
    pairs: list[groups.Group] = []
    yield pairs
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(_pairs: list[groups.Group]) -> groups.Group:
    """Two initialised workers, kept for the module's tests; new ones after a test that broke
    them."""
    if not _pairs or _pairs[-1].broken:
        for broken in _pairs:
            broken.close(gently=False)
        _pairs[:] = [groups.Group(2, options={"num_worker_threads": 8})]
    return _pairs[-1]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[netns.Host, netns.Host]]:
    """Two hosts with a cable between them; tests are skipped where there can be none."""
    try:
        with netns.two_hosts() as two:
            yield two
    except netns.NotPossible as reason:
        pytest.skip(str(reason))


# A shell starts its background jobs with SIGINT ignored, and children inherit that: the tests of
# Ctrl-C would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
