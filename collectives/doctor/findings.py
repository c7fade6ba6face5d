"""What an examination says, and with which cure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

LEVELS = ("ok", "advice", "problem")


class Finding(NamedTuple):
    """One thing that was looked at.

    level  "ok"; "advice" where something could be better, or fails under other circumstances;
           "problem" where something that this package needs does not work
    topic  what was looked at
    words  what was found
    cure   what to do about it, "" for "ok"
    """

    level: str
    topic: str
    words: str
    cure: str = ""


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each, with its cure below; then how many there are of each level."""
    lines: list[str] = []
    for f in findings:
        lines += _wrapped(f"{f.level:8} {f.topic:18} ", f.words)
        if f.cure:
            lines += _wrapped(" " * 28 + "-> ", f.cure)
    counts = {level: sum(f.level == level for f in findings) for level in LEVELS}
    lines.append("")
    lines.append(", ".join(f"{count} {level}" for level, count in counts.items() if count))
    return "\n".join(lines)


def _wrapped(head: str, words: str) -> list[str]:
    return textwrap.wrap(
        words, 100, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False
    )
