"""Saving a checkpoint: what is on the disk when, and what stays where it fails."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections import Counter
from pathlib import Path

import models
import numpy as np
import pytest

import collectives as cc
from collectives.bucketing import Bucketer
from collectives.train import AdamW, Trainer, checkpoint

X, Y = models.data(100)


@pytest.fixture(autouse=True)
def needs_safetensors():
    pytest.importorskip("safetensors")


def make(comm, bucket_bytes=6000):
    settings = {"params": models.parameters(), "first_bucket_bytes": 1000}
    settings["bucket_bytes"] = bucket_bytes
    return Trainer(models.loss_and_grads, AdamW(lr=1e-2), comm, sharding=1, **settings)


def test_a_checkpoint_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a directory")

    def body(comm):
        trainer = make(comm)
        for path in (tmp_path / "file" / "run", tmp_path / ("run" * 100)):  # too long a name
            with pytest.raises(cc.CollectiveError, match="cannot write"):
                trainer.save(path)
        trainer.save(tmp_path / "run")

    cc.run_threads(2, body, timeout=20)


def test_all_is_flushed_before_it_is_named(tmp_path, monkeypatch):
    """A power cut, unlike a kill, would take what is not on the disk."""
    done = []
    fsync, replace = os.fsync, os.replace

    def flushed(handle):
        done.append(Path(f"/proc/self/fd/{handle}").resolve().name)
        fsync(handle)

    def named(old, new):
        done.append("named")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", named)
    cc.run_threads(2, lambda comm: make(comm).save(tmp_path / "run"), timeout=20)
    files = {"rank-0.safetensors", "rank-1.safetensors"}
    assert files <= set(done[:2])
    assert done[2:] == [".checkpoint.json.new", "generation-0-0", "named", "run"]


def test_saves_on_a_full_disk_leave_nothing(tmp_path, monkeypatch):
    """And the last good one stays."""
    write = checkpoint._write

    def full(path, data):
        write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def body(comm):
        trainer = make(comm)
        batch = models.part_of((X, Y), comm.rank, comm.size)
        trainer.step(batch)
        trainer.save(tmp_path)
        for _ in range(3):
            trainer.step(batch)
            comm.barrier()
            monkeypatch.setattr(checkpoint, "_write", full)
            with pytest.raises(cc.CollectiveError, match="No space left"):
                trainer.save(tmp_path)
            comm.barrier()
            assert len(list(tmp_path.glob("generation-*"))) == 1
            comm.barrier()
            monkeypatch.setattr(checkpoint, "_write", write)
        trainer.load(tmp_path)
        assert trainer.updates == 1

    cc.run_threads(2, body, timeout=20)


def test_what_is_wrong_on_one_rank_ends_a_save_on_all(tmp_path, monkeypatch):
    """Whatever it is: nobody waits for that rank, and a first save leaves nothing behind."""
    own = checkpoint._own_arrays

    def wrong(trainer):
        if trainer.comm.rank == 1:
            raise RuntimeError("out of something")
        return own(trainer)

    def body(comm):
        trainer = make(comm)
        monkeypatch.setattr(checkpoint, "_own_arrays", wrong)
        with pytest.raises(cc.CollectiveError, match="out of something") as caught:
            trainer.save(tmp_path / "run")
        assert "rank 1 cannot save: RuntimeError" in str(caught.value)
        assert isinstance(caught.value.__cause__, RuntimeError) == (comm.rank == 1)
        comm.barrier()
        assert not list((tmp_path / "run").iterdir())

    cc.run_threads(2, body, timeout=20)


def test_a_save_that_fails_behind_its_last_step_stays(tmp_path, monkeypatch):
    """It is named already, so its files are those of the valid checkpoint."""
    flush = checkpoint._flush

    def failing(path):
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(path)

    def body(comm):
        trainer = make(comm)
        trainer.step(models.part_of((X, Y), comm.rank, comm.size))
        monkeypatch.setattr(checkpoint, "_flush", failing)
        with pytest.raises(cc.CollectiveError, match="rank 0 cannot write"):
            trainer.save(tmp_path)
        comm.barrier()
        monkeypatch.setattr(checkpoint, "_flush", flush)
        other = make(comm)
        other.load(tmp_path)
        assert other.updates == 1

    cc.run_threads(2, body, timeout=20)


def test_only_the_last_generation_stays(tmp_path):
    def body(comm):
        trainer = make(comm)
        for _ in range(3):
            trainer.step(models.part_of((X, Y), comm.rank, comm.size))
            trainer.save(tmp_path)
            trainer.save(tmp_path)

    cc.run_threads(2, body, timeout=60)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint.json", "generation-3-1"]


def test_what_else_lies_there_stays(tmp_path):
    """Also where its name begins as those of the trainer's folders do."""
    kept = [tmp_path / name / "kept" for name in ("generation-samples", "generation-1-0-old", "b")]
    for file in kept:
        file.parent.mkdir()
        file.write_text("precious")

    def body(comm):
        trainer = make(comm)
        for _ in range(3):
            trainer.step(models.part_of((X, Y), comm.rank, comm.size))
            trainer.save(tmp_path)

    cc.run_threads(2, body, timeout=60)
    assert all(file.read_text() == "precious" for file in kept)
    assert len(list(tmp_path.glob("generation-[0-9]*"))) == 2  # the last, and one of those


@pytest.mark.parametrize(
    ("name", "error"), [(0, TypeError), (("a", 1), TypeError), ("\udcff", ValueError)]
)
def test_names_that_no_checkpoint_holds(name, error):
    parameters = {"w": np.ones(3, np.float32), name: np.ones(2, np.float32)}

    def body(comm):
        with pytest.raises(error, match=r"name.*parameter"):
            Trainer(models.loss_and_grads, AdamW(lr=1.0), comm, params=parameters)
        with pytest.raises(error, match=r"name.*parameter"):
            Trainer(models.loss_and_grads, AdamW(lr=1.0), comm, params=parameters, frozen=[name])
        with pytest.raises(error, match=r"name.*parameter"):
            Bucketer(comm, parameters)

    cc.run_threads(2, body, timeout=20)


class Elsewhere:
    """Memory of a GPU, of which what is fetched is counted."""

    def __init__(self, held, fetched):
        self._held, self._fetched = held, fetched

    def __getitem__(self, part):
        return Elsewhere(self._held[part], self._fetched)

    def get(self):
        self._fetched.append(self._held.nbytes)
        return self._held.copy()


def test_a_save_from_gpus_fetches_everything_once():
    def body(comm):
        trainer = make(comm, bucket_bytes=1 << 20)
        trainer.step(models.part_of((X, Y), comm.rank, comm.size))
        store, fetched = trainer.store, []
        wanted = checkpoint._own_arrays(trainer)
        there = {
            id(shard): {key: Elsewhere(x, fetched) for key, x in store.arrays(shard).items()}
            for shard in store.shards
        }
        mine = sum(x.nbytes for shard in store.shards for x in store.arrays(shard).values())
        store.arrays = lambda shard: there[id(shard)]
        got = checkpoint._own_arrays(trainer)
        assert {k: x.tobytes() for k, x in got.items()} == {
            k: x.tobytes() for k, x in wanted.items()
        }
        assert sum(fetched) == mine
        assert sum(len(shard.pieces) for shard in store.shards) > len(store.shards)

    cc.run_threads(2, body, timeout=20)


def test_a_load_reads_and_keeps_what_a_rank_needs(tmp_path, monkeypatch):
    """Its part of the state, and the rest of what that begins and ends in."""
    rows, layers = 64, 8
    params = {f"w{i}": np.full((rows, 1024), i, np.float32) for i in range(layers)}

    def trainer_of(comm, stage):
        return Trainer(lambda *_: 0.0, AdamW(lr=1e-2), comm, params=params, sharding=stage)

    cc.run_threads(2, lambda comm: trainer_of(comm, 0).save(tmp_path), timeout=20)
    whole = 3 * sum(x.nbytes for x in params.values())
    read, most, ordinary = Counter(), [0], Path.open

    class Counted(io.FileIO):
        def read(self, count):
            found = super().read(count)
            read[threading.current_thread().name] += len(found)
            most[0] = max(most[0], len(found))
            return found

    def opened(path, *args, **more):
        return Counted(path) if path.suffix == ".safetensors" else ordinary(path, *args, **more)

    monkeypatch.setattr(Path, "open", opened)
    cc.run_threads(4, lambda comm: trainer_of(comm, 3).load(tmp_path), timeout=20)
    assert len(read) == 4 and sum(read.values()) >= whole
    assert max(read.values()) < whole / 2
    assert most[0] <= 1 << 20
