"""How numbers read."""

from __future__ import annotations

import pytest

from collectives.words import counted, size_words


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (100_000, "100000 ranks")]
)
def test_one_is_singular(number: int, words: str) -> None:
    assert counted(number, "rank") == words


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (1, "1 B"), (1000, "1000 B"), (1 << 10, "1 KiB"), (3 << 20, "3 MiB"),
     ((1 << 20) + 1, "1048577 B"), (1 << 40, "1 TiB")],
)  # fmt: skip
def test_sizes_have_the_largest_whole_unit(nbytes: int, words: str) -> None:
    assert size_words(nbytes) == words
