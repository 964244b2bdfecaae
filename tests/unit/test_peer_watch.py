"""What is known of a peer, whatever comes first: UCX's error, its process's end, its goodbye."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest

from tests.support import native

#: What may be said of a worker that was connected to.
WORDS = (
    "path lost",
    "process ended",
    "doubt over",
    "goodbye",
    "broke there",
    "given up",
    "closed here",
)
OVER = {"left", "broken", "dead", "closed"}


def orders() -> Iterator[tuple[str, ...]]:
    """All orders of all selections of WORDS."""
    for count in range(len(WORDS) + 1):
        yield from permutations(WORDS, count)


def states(*words: str, watched: bool = True) -> list[str]:
    """What the peer is after each of the words; it is open before."""
    return native.transport.peer_states(["established", *words], watched)[1:]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # The four that race when a process of this host is killed, or ends by itself.
        (["path lost"], "doubted"),
        (["path lost", "process ended"], "dead"),
        (["process ended", "path lost"], "dead"),
        (["path lost", "doubt over"], "broken"),
        (["path lost", "doubt over", "process ended"], "dead"),
        (["goodbye", "path lost", "process ended"], "left"),
        (["path lost", "goodbye", "process ended"], "left"),
        (["path lost", "process ended", "goodbye"], "dead"),
        (["broke there"], "broken"),
        (["broke there", "process ended"], "dead"),
        (["given up", "process ended"], "dead"),
        (["closed here"], "closed"),
        (["closed here", "goodbye"], "closed"),
        (["closed here", "process ended"], "dead"),
        (["doubt over"], "open"),
        (["established"], "open"),
    ],
)
def test_of_this_host(words: list[str], expected: str) -> None:
    assert states(*words)[-1] == expected


def test_of_another_host() -> None:
    assert states("path lost", watched=False) == ["open", "broken"]
    assert states("goodbye", "path lost", watched=False)[-1] == "left"


def test_a_process_that_ended_is_dead_in_every_order() -> None:
    """Unless it said goodbye before anybody had seen its end."""
    for words in orders():
        if "process ended" not in words:
            continue
        before = words[: words.index("process ended")]
        # A goodbye counts where it was heard before the connection was over.
        over = [state for state in states(*before) if state in OVER]
        expected = "left" if over[:1] == ["left"] else "dead"
        assert states(*words)[-1] == expected, words


def test_the_verdict_stands() -> None:
    for words in orders():
        for watched in (True, False):
            seen = states(*words, watched=watched)
            over = next((i for i, state in enumerate(seen) if state in OVER), len(seen))
            later = set(seen[over:])
            assert "open" not in later and "doubted" not in later, (words, seen)
            # The one change: nobody can read our memory any more.
            assert len(later) <= 1 or later in ({"broken", "dead"}, {"closed", "dead"}), seen


def test_every_doubt_ends() -> None:
    for words in orders():
        assert states(*words, "doubt over")[-1] != "doubted", words


def test_nothing_is_doubted_that_nobody_will_see_end() -> None:
    for words in orders():
        assert "doubted" not in states(*words, watched=False), words


def test_connecting() -> None:
    for word, expected in (("path lost", "broken"), ("closed here", "closed")):
        assert native.transport.peer_states([word], False)[-1] == expected


def test_a_word_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="no word"):
        native.transport.peer_states(["hello"], True)
