"""The command draw: every schedule as text and as SVG."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
from commands import run

import collectives
from collectives import _core, drawing
from collectives.schedule import why_unsupported

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_draw_a_ring(capsys):
    status, out, _ = run(capsys, "draw", "ring", "all_reduce", "-n", 3)
    assert status == 0
    assert out.splitlines()[2:5] == [
        "         rank 0     rank 1     rank 2",
        "round 0  ├── 0+ ───▶│          │",
        "         │          ├── 1+ ───▶│",
    ]
    assert "2+: chunk 2 is combined" in out


def test_files_of_unknown_kinds_are_refused(capsys, tmp_path):
    file = tmp_path / "ring.pdf"
    status, out, err = run(capsys, "draw", "ring", "all_reduce", "-o", file)
    assert (status, out) == (2, "") and "nothing writes .pdf; end it with .svg" in err
    assert not file.exists()
    for name, more in (("ring.txt", ()), ("ring", ()), ("ring.pdf", ("--format", "svg"))):
        status, _, err = run(capsys, "draw", "ring", "all_reduce", "-o", tmp_path / name, *more)
        assert status == 0, err
        assert (tmp_path / name).read_text().startswith("<svg" if more else "ring")


def test_the_case_of_an_ending_does_not_matter(capsys, tmp_path):
    for name, begins in (("r.SVG", b"<svg"), ("r.Png", b"\x89PNG"), ("r.TXT", b"ring")):
        status, _, err = run(capsys, "draw", "ring", "all_reduce", "-o", tmp_path / name)
        assert status == 0, err
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_auto_is_not_offered(capsys):
    status, _, err = run(capsys, "draw", "foo", "all_reduce")
    assert status == 2 and "unknown algorithm 'foo'; known: binomial_tree" in err
    assert "auto" not in err


@pytest.mark.parametrize(("name", "chunk"), [("binomial_tree", 0), ("ring", 2)])
def test_a_legend_is_of_a_chunk_that_there_is(name, chunk):
    schedule = collectives.schedule(name, "reduce" if chunk == 0 else "all_reduce", 4)
    assert f"{chunk}+: chunk {chunk} is combined with" in schedule.draw()
    assert f"receiver holds ({chunk}+)" in schedule.draw("svg")
    if chunk:
        assert f"stored by the receiver ({chunk})" in schedule.draw("svg")


def _all_schedules(ranks):
    for info, collective in itertools.product(collectives.algorithms(), _core.collectives):
        for n in ranks:
            if not why_unsupported(info.name, collective, n):
                yield collectives.schedule(info.name, collective, n)


def test_every_schedule_can_be_drawn_as_text():
    for schedule in _all_schedules((1, 2, 5, 8, 20)):
        text = schedule.draw()
        assert schedule.algorithm in text
        assert max(map(len, text.splitlines())) <= 200
        if 1 < schedule.nranks <= 5:  # each chunk of each transfer is on an arrow or in a list
            arrows = text.count("▶") + text.count("◀") + text.count("→")
            assert arrows >= min(8, sum(len(drawing.messages(r)) for r in schedule.rounds))


def test_every_schedule_can_be_drawn_as_svg():
    for schedule in _all_schedules((2, 5, 40)):
        root = ElementTree.fromstring(schedule.draw("svg"))
        width, height = float(root.get("width")), float(root.get("height"))
        arrows = 0
        for element in root.iter():
            kind = element.tag.rpartition("}")[2]
            assert all("nan" not in value for value in element.attrib.values())
            if kind == "g":
                arrows += 1
            if kind == "text" and element.get("x"):
                assert 0 <= float(element.get("x")) <= width
                assert 0 <= float(element.get("y")) <= height
        if schedule.nranks == 5:
            assert arrows == sum(len(drawing.messages(r)) for r in schedule.rounds)


def test_draw_svg_into_a_file(capsys, tmp_path):
    file = tmp_path / "picture.svg"
    name = "hierarchical(direct_two_shot, ring)"
    status, out, err = run(capsys, "draw", name, "all_reduce", "--node", "0,0,1,1", "-o", file)
    assert (status, out) == (0, ""), err
    text = file.read_text()
    assert "node 1" in text and "stroke-dasharray" in text
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_unknown_format_of_a_drawing():
    with pytest.raises(ValueError, match="did you mean 'svg'"):
        collectives.schedule("ring", "all_reduce", 2).draw("swg")
