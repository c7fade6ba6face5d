"""For tests that need torch in this process: a module that imports this is skipped without it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

__all__ = ["torch"]
