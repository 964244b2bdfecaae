"""Showing texts that other workers have sent."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, longest: int = 1000) -> str:
    """Return a text as it may go to a terminal or a log.

    A worker could otherwise move the cursor, change the colours or the title of the terminal, and
    write lines of its own.

    Args:
        text: of another worker.
        longest: of the text, characters; a longer one is cut.

    Returns:
        The text with each character that cannot be printed, such as ESC, as Python writes it in a
        literal.
    """
    if len(text) > longest:
        text = f"{text[:longest]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
