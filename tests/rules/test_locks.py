"""Locks are types: what needs the lock of a UCX worker takes its token, and other state that
several threads share is inside of a base::Synchronized."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rules.test_layers import CSRC

#: A sentence that the type has taken the place of.
COMMENT = re.compile(r"under (?:the|its|a|(?:the )?\w+ ?worker's) lock", re.IGNORECASE)
#: A token that would outlive the call it was passed to: a member, an object of one's own, or what a
#: closure that runs later captures.
STORED = re.compile(
    r"\b(?:Bulk)?Locked(?:&|\*| const&)\s+\w+_;"
    r"|std::(?:reference_wrapper|\w+_ptr|optional|vector)<(?:\w+::)?(?:Bulk)?Locked>"
    r"|(?:post|postAfter|defer|makeTask)\(\s*\[[^\]]*&(?:\s*[,\]]|locked\b)"
)
#: Makes the token, and says what the lock is.
WORKER = "worker.h"
MUTEX = re.compile(r"\bstd::\w*mutex\s+\w+\s*[;{=]")
#: Files with a mutex of their own -> why the mutex is not in a Synchronized.
WITH_MUTEX = {
    "base/synchronized.h": "the Synchronized itself",
    "transport/ucx/worker.h": "its token is Locked: the lock guards UCX and all connections",
    "transport/ucx/lanes/lane_set.h": "its token is Locked: the lock guards two classes' state",
    "memory/shared_map.cpp": "one handler of fork() locks it, another one unlocks it",
}


def sources() -> list[Path]:
    return sorted((CSRC / "transport" / "ucx").rglob("*.[ch]*"))


def test_no_comment_stands_for_the_token() -> None:
    for path in sources():
        if path.name != WORKER:
            assert not COMMENT.search(path.read_text()), path.name


def test_a_mutex_and_what_it_guards_are_one_value() -> None:
    files = [path for path in CSRC.rglob("*.[ch]*") if MUTEX.search(path.read_text())]
    assert {str(path.relative_to(CSRC)) for path in files} == set(WITH_MUTEX)


@pytest.mark.parametrize(
    "text", ["  std::mutex mutex_;", "mutable std::shared_mutex lock_;", "static std::mutex m{};"]
)
def test_the_rule_finds_a_mutex(text: str) -> None:
    assert MUTEX.search(text)


def stored(text: str) -> list[str]:
    """Places where a token is kept."""
    return [found.group() for found in STORED.finditer(text)]


def test_no_token_is_kept() -> None:
    for path in sources():
        if path.name != WORKER:
            assert not stored(path.read_text()), path.name


@pytest.mark.parametrize(
    "text",
    [
        "  Locked& locked_;",
        "  BulkLocked* held_;",
        "std::optional<Locked> held;",
        "locked.defer([&] { f(locked); });",
        "locked.defer([self, &locked] { self->end(locked); });",
        "worker().post([self, &locked](Locked&) {});",
    ],
)
def test_the_rule_finds_what_breaks_it(text: str) -> None:
    assert stored(text)


def test_the_rule_lets_what_keeps_it_pass() -> None:
    assert not stored(
        "locked.defer([self, id] { self->end(id); }); void f(Locked& locked, int& n_);"
    )
