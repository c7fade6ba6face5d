"""A progress bar on standard error, for what takes longer than two seconds on a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

_AFTER = 2.0  # seconds without a bar
_EVERY = 0.1  # seconds between two looks
_WIDTH = 24
_LINE = 79  # columns, where the terminal has them


def _line(stream: TextIO) -> int:
    """Columns that a bar may take: after the last one some terminals begin another line."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # nobody knows
        columns = 0
    return min(_LINE, columns - 1) if columns else _LINE


def clear_line(stream: TextIO | None = None) -> None:
    """Takes away what a bar, of this process or of a rank of it, has left on a terminal."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        stream.write("\r" + " " * _line(stream) + "\r")
        stream.flush()


class Progress:
    """Counts steps. Shows nothing if standard error is no terminal, or if `shown` is False."""

    def __init__(self, total: int, *, shown: bool = True, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = max(1, total)
        self._done = 0
        self._start = time.monotonic()
        self._next = self._start + _AFTER
        self._visible = False
        self._shown = shown and self._stream.isatty()

    def step(self, what: str = "") -> None:
        """One step is done; `what` comes next."""
        self._done += 1
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + _EVERY
        share = min(1.0, self._done / self._total)
        left = (now - self._start) * (1 - share) / share if share else 0.0
        bar = "█" * int(share * _WIDTH)
        text = f"{bar:·<{_WIDTH}} {share:4.0%}  {left:.0f} s left  {what}"
        width = _line(self._stream)
        self._stream.write("\r" + text[:width].ljust(width))
        self._stream.flush()
        self._visible = True

    def clear(self) -> None:
        """Takes the bar away, so that a line can be printed in its place."""
        if self._visible:
            clear_line(self._stream)
            self._visible = False
