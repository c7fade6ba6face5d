"""How numbers read in text that people read."""

from __future__ import annotations

from .config import format_size


def size_words(nbytes: int) -> str:
    """ "64 KiB"."""
    text = format_size(nbytes)
    return f"{text[:-1]} {text[-1]}iB" if text[-1] in "KMGT" else f"{text} B"


def counted(number: int, what: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number} {what}{'s' * (number != 1)}"
