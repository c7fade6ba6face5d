"""Where a measured table lies: places that cannot be looked at, and links."""

from __future__ import annotations

import json
import pwd

import launch
import pytest

import collectives as cc
from collectives import cli, run_threads
from collectives.tuning import tables

HARDWARE = {"cpu": "a", "cores": "2", "network": "Ethernet 10", "mpi": ""}
EMPTY = {"choices": {}, "figures": {}, "rows": [], "date": "2026-01-02", "version": "1"}
LONG = "/tmp/" + 300 * "x"
TUNE = ("tune", "--threads", "2", "--collective", "all_gather", "-b", "64", "-e", "64")
TUNE = (*TUNE, "--seconds", "0.001")


@pytest.fixture(params=["no home", "a home that cannot be looked at"])
def usual_place(request, monkeypatch):
    """There is none that serves."""

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("COLLECTIVES_TABLE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    if request.param == "no home":
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
    else:
        monkeypatch.setenv("HOME", LONG)


def test_ranks_need_no_usual_place(usual_place, capsys):
    assert run_threads(2, lambda comm: comm.size) == [2, 2]
    assert tables.find(HARDWARE)[1] == {}
    for command in (["explain", "all_reduce"], ["info"], [*TUNE, "--dry-run"]):
        assert cli.main(command) == 0, capsys.readouterr().err


def test_tune_asks_for_a_place(usual_place, capsys, monkeypatch, tmp_path):
    from collectives.cli import tune

    path = tmp_path / "table.json"
    assert cli.main([*TUNE, "-o", str(path)]) == 0, capsys.readouterr().err
    assert path.exists()
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("it measured"))
    capsys.readouterr()
    assert cli.main(list(TUNE)) == 2
    assert capsys.readouterr().err.endswith("; name a file with --output\n")


def test_a_named_file_that_cannot_be_looked_at(capsys, monkeypatch):
    for refused in (
        lambda: tables.load(tables.path_for(HARDWARE, LONG), HARDWARE),
        lambda: tables.find(HARDWARE, LONG),
        lambda: tables.why_none(LONG),
    ):
        with pytest.raises(cc.ConfigError, match=r"the table .* cannot be read: File name too"):
            refused()
    monkeypatch.setenv("COLLECTIVES_TABLE", LONG)
    for command in (["explain", "all_reduce"], ["info"], ["doctor"]):
        assert cli.main(command) != 0
        told = "".join(capsys.readouterr())
        assert "cannot be read: File name too long; name another file" in told
        assert "Errno" not in told


def test_all_ranks_say_that_the_file_cannot_be_looked_at():
    result = launch.run(2, "tuned.py", launcher="run", env={"COLLECTIVES_TABLE": LONG}, timeout=60)
    assert result.status != 0
    assert "cannot be read: File name too long" in result.output, result
    assert "ClosedError" not in result.output and "OSError" not in result.output, result


def test_a_link_to_a_table_stays_one(tmp_path):
    folder, link = tmp_path / "there", tmp_path / "link.json"
    link.symlink_to(folder / "table.json")
    tables.try_writing(link)
    for key in ("threads 0,0", "threads 0,0,0"):
        tables.save(link, HARDWARE, key, EMPTY)
    assert link.is_symlink()
    assert [p.name for p in folder.iterdir()] == ["table.json"]
    found = json.loads((folder / "table.json").read_text())
    assert set(found["layouts"]) == {"threads 0,0", "threads 0,0,0"}
