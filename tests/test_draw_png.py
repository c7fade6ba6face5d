"""`draw` as PNG."""

from __future__ import annotations

import struct

import pytest

from collectives import cli, schedule
from collectives.drawing_png import draw_png

pytest.importorskip("matplotlib")


def size(png):
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_png_grows_with_ranks_and_rounds():
    small = size(draw_png(schedule("ring", "all_reduce", 3)))
    more_ranks = size(draw_png(schedule("direct_two_shot", "all_reduce", 9)))
    more_rounds = size(draw_png(schedule("ring", "all_reduce", 6)))
    assert more_ranks[1] > small[1]
    assert more_rounds[0] > small[0]


@pytest.mark.parametrize(
    ("name", "collective", "ranks", "node"),
    [
        ("ring", "all_gather", 1, ()),
        ("recursive_doubling", "barrier", 5, ()),
        ("hierarchical(direct_two_shot, ring)", "all_reduce", 6, (0, 1, 0, 1, 2, 2)),
        ("direct_two_shot", "all_reduce", 30, ()),
    ],
)
def test_png_of_anything(name, collective, ranks, node):
    size(draw_png(schedule(name, collective, ranks, node=node)))


def test_draw_command_writes_png(tmp_path, capsys):
    file = tmp_path / "ring.png"
    assert cli.main(["draw", "ring", "all_reduce", "-n", "4", "-o", str(file)]) == 0
    size(file.read_bytes())
    assert cli.main(["draw", "ring", "all_reduce", "--format", "png"]) == 2
    assert "add -o FILE.png" in capsys.readouterr().err
