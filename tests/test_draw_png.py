"""`draw` as PNG."""

from __future__ import annotations

import itertools
import struct

import pytest

from collectives import Transfer, algorithm, cli, schedule, unregister
from collectives.drawing import label_places
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


def test_png_is_no_wider_than_viewers_show():
    """Of 78 rounds those that have room are drawn, and the others told of."""
    assert size(draw_png(schedule("ring", "all_reduce", 40)))[0] < 8192


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_labels_do_not_hide_each_other(ranks):
    """Of direct parts, where each rank sends to each: places are a label apart."""
    arrows = [(0, 46 * a, 190, 46 * b) for a in range(ranks) for b in range(ranks) if a != b]
    places = label_places(arrows, [18.0] * len(arrows), 13)
    apart = [
        abs(a[0] - b[0]) >= 18 or abs(a[1] - b[1]) >= 13
        for a, b in itertools.combinations(places, 2)
    ]
    assert all(apart)
    for (x1, y1, x2, y2), (x, y) in zip(arrows, places, strict=True):
        assert (y - y1) * (x2 - x1) == pytest.approx((x - x1) * (y2 - y1))


def test_draw_command_writes_png(tmp_path, capsys):
    file = tmp_path / "ring.png"
    assert cli.main(["draw", "ring", "all_reduce", "-n", "4", "-o", str(file)]) == 0
    size(file.read_bytes())
    assert cli.main(["draw", "ring", "all_reduce", "--format", "png"]) == 2
    assert "add -o FILE.png" in capsys.readouterr().err


def test_a_name_is_drawn_as_it_is():
    """Two $ would make a formula of what is between them."""

    @algorithm("broadcast", name="my$x^^ring$")
    def rounds(n):
        yield [Transfer(0, r, 0) for r in range(1, n)]

    try:
        size(draw_png(schedule("my$x^^ring$", "broadcast", 3)))
    finally:
        unregister("my$x^^ring$")
