"""No exception passes through C code or ends a thread: what UCX or a thread calls goes through
csrc/base/boundary.h."""

from __future__ import annotations

import re

import pytest

from tests.rules.test_layers import CSRC, sources

# params.cb.send = FromUcx<base::Boundary::kSent, &ActiveSend::left, &ActiveSend::failed>::sentLast;
REGISTRATION = re.compile(r"\.(?:cb|cb\.\w+)\s*=\s*([^;]+);")
#: The one way in.
ENTRANCE = CSRC / "transport" / "ucx" / "from_ucx.h"
ENTERS = re.compile(r"FromUcx<\s*base::Boundary::k\w+,[^;]*>::\s*(\w+)$", re.DOTALL)
THREAD = re.compile(r"\bstd::thread\(|\bpthread_create\(")
# fork() is C, and what it calls has no one to tell of an exception.
AT_FORK = re.compile(r"\bpthread_atfork\((.*?)\);\n", re.DOTALL)
GUARDS = ("base::guarded(", "base::caughtHere(", "guarded(")


def unguarded(text: str) -> list[str]:
    """The callbacks that a file registers and that are no functions of FromUcx."""
    entrances = re.findall(r"static (?:ucs_status_t|void)\s+(\w+)\(", ENTRANCE.read_text())
    wrong = []
    for callback in REGISTRATION.findall(text):
        found = ENTERS.fullmatch(callback.strip())
        if found is None or found.group(1) not in {*entrances} - {"enter"}:
            wrong.append(callback.strip())
    return wrong


def test_callbacks_of_ucx_let_no_exception_through() -> None:
    registered = 0
    for path in sources():
        text = path.read_text()
        registered += len(REGISTRATION.findall(text)) if "ucp/" in text or "ucp_" in text else 0
        if "ucp_" in text:
            assert not unguarded(text), f"{path.relative_to(CSRC)}: through FromUcx"
    assert registered >= 7


def test_the_entrance_lets_no_exception_through() -> None:
    text = ENTRANCE.read_text()
    functions = re.findall(
        r"static [\w ]+?\s+(\w+)\([^;{}]*\)\s*(noexcept)?\s*\{(.*?)\n  \}", text, re.DOTALL
    )
    assert len(functions) >= 5
    for name, noexcept, body in functions:
        assert noexcept, name
        assert (
            "base::guarded(" in body if name == "enter" else re.search(r"\b(enter|sent)\(", body)
        ), name


def test_threads_let_no_exception_through() -> None:
    found = 0
    for path in sources():
        text = path.read_text()
        if THREAD.search(text):
            found += 1
            assert any(guard in text for guard in GUARDS), path.relative_to(CSRC)
    assert found >= 3


def test_handlers_of_fork_throw_nothing() -> None:
    handlers = [found for path in sources() for found in AT_FORK.findall(path.read_text())]
    assert len(handlers) >= 2
    for handler in handlers:
        assert handler.count("[]") == handler.count("noexcept"), handler


@pytest.mark.parametrize(
    "registration",
    [
        "params.cb.send = [](void*) { f(); };",
        "params.cb = &A::on;\nvoid A::on(void* p) noexcept {\n  base::guarded(b, f);\n}",
        "params.cb.send = FromUcx<base::Boundary::kSent, &A::on>::enter;",
        "params.cb.send = other::FromUcx<base::Boundary::kSent, &A::on>::sent;",
    ],
)
def test_the_rule_finds_what_breaks_it(registration: str) -> None:
    assert unguarded(registration)


def test_the_rule_lets_what_keeps_it_pass() -> None:
    assert not unguarded("p.cb.send = FromUcx<\n  base::Boundary::kSent,\n  &A::on>::sent;")
