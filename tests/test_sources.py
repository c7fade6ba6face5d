"""What the sources must not use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[1] / "csrc"


@pytest.mark.parametrize("header", ["sstream", "fstream", "iostream", "iomanip", "locale", "regex"])
def test_the_core_uses_no_streams(header):
    """They need the locale of the libstdc++ that the process has loaded, and array libraries bring
    one of their own: with cupy's or torch's first, a stream in the core crashes.
    """
    sources = [p for p in CORE.rglob("*") if p.suffix in (".cpp", ".hpp")]
    assert len(sources) > 60
    assert not [
        p.name
        for p in sources
        if re.search(rf"#include\s*<{header}>|std::[io]?{header}\b", p.read_text())
    ]
