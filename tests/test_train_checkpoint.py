"""Checkpoints: what lets a run go on as if it had never stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import models
import numpy as np
import pytest
from worlds import outcomes

import collectives as cc
from collectives.train import (
    LAMB,
    SGD,
    AdamW,
    Cosine,
    LossScale,
    Sampler,
    Trainer,
    WarmUp,
)

NODES = {1: [0], 2: [0, 1], 3: [0, 0, 1], 4: [0, 0, 1, 1], 5: [0, 0, 1, 1, 1]}
X, Y = models.data(100)


@pytest.fixture(autouse=True)
def needs_safetensors():
    pytest.importorskip("safetensors")


def make(comm, mode=(0, None), **more):
    settings = {"params": models.parameters(), "bucket_bytes": 6000, "first_bucket_bytes": 1000}
    settings |= {"clip_norm": 0.5, "accumulate": 2} | more
    function = settings.pop("function", noisy)
    optimizer = settings.pop("optimizer", AdamW(lr=1e-2))
    stage, group = mode
    return Trainer(function, optimizer, comm, sharding=stage, shard_group=group, **settings)


noise = {}  # rank -> the generator of its trainer


def noisy(params, batch, emit):
    """With noise on the data, so that random states count."""
    x, y, rank = batch
    x = x + noise[rank[0]].normal(0, 0.1, x.shape).astype(x.dtype)
    return models.loss_and_grads(params, (x, y), emit)


def run(trainer, sampler, steps):
    noise[trainer.comm.rank] = trainer.random
    losses = []
    while len(losses) < steps:
        for i in sampler:
            rank = None if i is None else np.full(len(i), trainer.comm.rank)
            batch = None if i is None else (X[i], Y[i], rank)
            losses.append(trainer.step(batch).loss)
            if len(losses) == steps:
                break
    return losses


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ((0, None), {}),
        ((1, None), {"optimizer": LAMB(lr=0.01), "schedule": WarmUp(4, Cosine(20))}),
        ((2, None), {"precision": "bf16"}),
        ((3, None), {"precision": "fp16", "loss_scale": LossScale(2.0**22, interval=4)}),
        ((3, "node"), {"optimizer": SGD(lr=0.1, momentum=0.9)}),
    ],
    ids=str,
)
def test_a_resumed_run_equals_an_unbroken_one(mode, more, tmp_path):
    """Bit for bit, from the middle of an epoch (7 steps of 9 samples), in the same or a new
    trainer."""

    def unbroken(comm):
        trainer = make(comm, mode, **more)
        sampler = Sampler(60, comm, micro=1 + (comm.size < 4), accumulate=2, seed=1)
        run(trainer, sampler, 7)
        trainer.save(tmp_path / "run", sampler=sampler)
        return run(trainer, sampler, 6), models.bits(trainer.parameters()), trainer.last.scale

    def resumed(comm):
        trainer = make(comm, mode, params=models.parameters(seed=9), **more)
        sampler = Sampler(60, comm, micro=1 + (comm.size < 4), accumulate=2, seed=1)
        trainer.load(tmp_path / "run", sampler=sampler)
        return run(trainer, sampler, 6), models.bits(trainer.parameters()), trainer.last.scale

    n = 3
    wanted = cc.run_threads(n, unbroken, nodes=NODES[n], timeout=60)
    assert cc.run_threads(n, resumed, nodes=NODES[n], timeout=60) == wanted


def test_from_any_world_and_stage_to_any_other(tmp_path):
    """State moves without a change: parameters and moments are what they were, everywhere."""

    def save(comm, mode, path):
        trainer = make(comm, mode, function=models.loss_and_grads, accumulate=1)
        for step in range(3):
            low = 20 * step
            trainer.step(
                models.part_of((X[low : low + 20], Y[low : low + 20]), comm.rank, comm.size)
            )
        trainer.save(path)
        return [models.bits(trainer.whole(key)) for key in ("master", "first", "second")]

    def load(comm, mode, path):
        trainer = make(comm, mode, function=models.loss_and_grads, accumulate=1)
        trainer.load(path)
        got = [models.bits(trainer.whole(key)) for key in ("master", "first", "second")]
        with trainer.gathered() as whole:
            used = models.bits(whole)
        trainer.step(models.part_of((X, Y), comm.rank, comm.size))  # and it can go on
        return got, used, trainer.updates

    worlds = [(1, (0, None)), (2, (3, None)), (3, (1, None)), (4, (2, "node")), (5, (3, "node"))]
    for i, (n, mode) in enumerate(worlds):
        path = tmp_path / str(i)
        wanted = cc.run_threads(n, save, mode, path, nodes=NODES[n], timeout=60)[0]
        m, other = worlds[(i + 2) % len(worlds)]
        for got, used, updates in cc.run_threads(m, load, other, path, nodes=NODES[m], timeout=60):
            assert got == wanted, (n, mode, m, other)
            assert used == wanted[0]
            assert updates == 4


@pytest.mark.torch
def test_torch_buffers_and_random_state(tmp_path):
    torch = pytest.importorskip("torch")

    def make_net(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )  # fmt: skip

    def loss(net, batch):
        return net(batch).square().mean()

    def trainer_of(seed):
        return Trainer(make_net(seed), AdamW(lr=0.1), solo, loss=loss)

    batch = torch.from_numpy(np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))
    with cc.init("solo") as solo:
        trainer = trainer_of(0)
        for _ in range(3):
            trainer.step(batch)
        trainer.save(tmp_path)
        wanted = [trainer.step(batch).loss for _ in range(3)]
        state = {k: v.clone() for k, v in trainer._model.whole().state_dict().items()}
        other = trainer_of(1)
        other.load(tmp_path)
        assert [other.step(batch).loss for _ in range(3)] == wanted
        for key, value in other._model.whole().state_dict().items():
            assert torch.equal(value, state[key]), key


# ---- damage -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    pytest.importorskip("safetensors")
    path = tmp_path_factory.mktemp("checkpoint") / "run"

    def body(comm):
        trainer = make(comm, (2, None), function=models.loss_and_grads, accumulate=1)
        trainer.step(models.part_of((X, Y), comm.rank, comm.size))
        trainer.save(path)

    cc.run_threads(2, body, timeout=60)
    return path


def edit_index(path, change, *, seal=True):
    """Changes checkpoint.json, with a checksum that is right for it or the old one."""
    whole = json.loads((path / "checkpoint.json").read_text())
    change(whole["content"])
    if seal:
        whole["crc32"] = zlib.crc32(json.dumps(whole["content"]).encode())
    (path / "checkpoint.json").write_text(json.dumps(whole))


def old_format(path):
    (path / "checkpoint.json").write_text(json.dumps({"format": 2, "generation": "generation-1-0"}))


def shard_file(path, rank=1):
    return next(path.glob(f"generation-*/rank-{rank}.safetensors"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def change_header(path, old, new):
    data = path.read_bytes()
    assert data.count(old) >= 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


def rename(old, new):
    def change(index):
        index["entries"] = {k.replace(old, new): v for k, v in index["entries"].items()}

    return change


def drop(name):
    def change(index):
        index["entries"] = {k: v for k, v in index["entries"].items() if f"{name}@" not in k}

    return change


DAMAGE = {
    "flipped": (lambda p: flip(shard_file(p)), r"'.*/\w+@\d+' in .*rank-1.*another checksum"),
    "cut short": (lambda p: cut_short(shard_file(p)), r"which holds '\w+/\w+@\d+', is cut short"),
    "nothing left": (
        lambda p: shard_file(p).write_bytes(b""),
        r"which holds '\w+/\w+@\d+', is cut short or damaged",
    ),
    "header too long": (
        lambda p: shard_file(p).write_bytes(b"\xff" * 100),
        r"which holds '\w+/\w+@\d+', is cut short or damaged: it has 100 bytes, its header",
    ),
    "header of no text": (
        lambda p: change_header(shard_file(p), b'{"', b"{{"),
        r"which holds '\w+/\w+@\d+', is cut short or damaged",
    ),
    "header of another order": (
        lambda p: change_header(shard_file(p), b'"data_offsets":[0,', b'"data_offsets":[9,'),
        r"another checksum|lies there from byte",
    ),
    "header of another kind": (
        lambda p: change_header(shard_file(p), b"data_offsets", b"data_offset_"),
        r"which holds '\w+/\w+@\d+', is cut short or damaged: 'data_offsets'",
    ),
    "file gone": (lambda p: shard_file(p, 0).unlink(), r"which holds '\w+/\w+@\d+', is missing"),
    "no index": (lambda p: (p / "checkpoint.json").unlink(), "holds no checkpoint"),
    "index cut": (lambda p: cut_short(p / "checkpoint.json"), "is cut short or damaged"),
    "index of no text": (
        lambda p: (p / "checkpoint.json").write_bytes(b'{"format": 4, "content": "\xff"}'),
        r"checkpoint\.json is cut short or damaged",
    ),
    "format": (old_format, "has format 2, known is 4: another version of this package wrote it"),
    "index changed": (
        lambda p: edit_index(p, lambda i: i.update(updates=7), seal=False),
        r"checkpoint\.json is damaged: another checksum",
    ),
    "index without": (
        lambda p: edit_index(p, lambda i: i.pop("settings")),
        r"checkpoint\.json is not as this version writes it: KeyError: 'settings'",
    ),
    "index of another kind": (
        lambda p: edit_index(p, lambda i: i.update(entries=3)),
        r"checkpoint\.json is not as this version writes it: TypeError",
    ),
    "lacks": (
        lambda p: edit_index(p, drop("second/w2")),
        "lacks second of parameter 'w2' from element 0",
    ),
    "lacks all": (
        lambda p: edit_index(p, lambda i: i["shapes"].pop("b1")),
        "the checkpoint lacks parameter 'b1'",
    ),
    "foreign": (
        lambda p: edit_index(p, rename("/b1@", "/b9@")),
        r"foreign entry '\w+/b9@0'",
    ),
    "foreign parameter": (
        lambda p: edit_index(p, lambda i: i["shapes"].update(extra=[3])),
        "foreign parameter 'extra'",
    ),
    "shape": (
        lambda p: edit_index(p, lambda i: i["shapes"].update(b1=[61])),
        r"parameter 'b1' has shape \[61\] in the checkpoint, \[60\] here",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_changes_nothing(written, tmp_path, damage):
    """Every rank raises, also those whose own parts are whole."""
    path = tmp_path / "run"
    shutil.copytree(written, path)
    how, words = DAMAGE[damage]
    how(path)

    def body(comm):
        trainer = make(comm, (3, None), function=models.loss_and_grads, accumulate=1)
        trainer.step(models.part_of((X, Y), comm.rank, comm.size))
        before = models.bits(trainer.parameters())
        with pytest.raises(cc.CollectiveError, match=words) as told:
            trainer.load(path)
        assert models.bits(trainer.parameters()) == before
        assert trainer.updates == 1
        trainer.step(models.part_of((X, Y), comm.rank, comm.size))
        return str(told.value)

    told = cc.run_threads(3, body, timeout=60)
    assert len(set(told)) == 1


def test_another_optimizer_or_schedule(written):
    for more in ({"optimizer": SGD(lr=0.1)}, {"schedule": Cosine(5)}):

        def body(comm, more=more):
            make(comm, function=models.loss_and_grads, **more).load(written)

        ended = outcomes(2, body)
        assert all("the checkpoint's" in str(e) for e in ended), ended


def test_steps_that_were_left_out_are_counted(tmp_path):
    def body(comm):
        def function(params, batch, emit):
            emit("w", np.full(3, batch[0], np.float16))
            return 0.0

        def fresh():
            params = {"w": np.zeros(3, np.float32)}
            return Trainer(function, SGD(lr=0.1), comm, params=params, precision="fp16")

        trainer = fresh()
        for value in (1.0, np.inf, 1.0):
            trainer.step(np.array([value]))
        trainer.save(tmp_path)
        other = fresh()
        other.load(tmp_path)
        return [(t.updates, t.steps, t.loss_scale) for t in (trainer, other)]

    for saved, loaded in cc.run_threads(2, body, timeout=20):
        assert saved == loaded
        assert saved[:2] == (2, 3)


KILLED = """
import io, os, shutil, signal, sys
import numpy as np
import collectives as cc
from collectives.train import SGD, Trainer, checkpoint

def function(params, batch, emit):
    emit("w", -np.ones(1000))
    return 0.0

def in_child(body):
    child = os.fork()
    if not child:
        body()
        os._exit(0)
    return os.waitpid(child, 0)[1]

def save(path, steps, kill_before=None):
    comm = cc.init("solo")
    trainer = Trainer(function, SGD(lr=1.0), comm, params={"w": np.zeros(1000)})
    for _ in range(steps):
        trainer.step(np.zeros((1, 1)))
    calls = 0
    def count(frame, event, called):
        nonlocal calls
        if event == "c_call" and called.__name__ in (
            "open", "write", "flush", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir"
        ):
            calls += 1
            if calls == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(count)
    trainer.save(path)
    sys.setprofile(None)

def in_place(new, old):
    with io.open(new, "rb") as file:
        data = file.read()
    with io.open(old, "wb") as file:
        file.write(data)
    os.unlink(new)

def anew(new, old):
    if os.path.exists(old):
        os.unlink(old)
    os.rename(new, old)

root, how = sys.argv[1:]
if how != "replace":
    checkpoint.os.replace = {"in_place": in_place, "anew": anew}[how]
os.mkdir(root)
assert in_child(lambda: save(root + "/0", 1)) == 0
kill, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    kill += 1
    shutil.copytree(root + "/0", f"{root}/{kill}")
    status = in_child(lambda: save(f"{root}/{kill}", 2, kill))
assert status == 0
"""


def updates_after_kills(root, how):
    """What a checkpoint of one update, into which one of two is saved, holds after a kill before
    each call that changes files; a string if it cannot be loaded.
    """
    script = root.parent / "script.py"
    script.write_text(KILLED)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVES_")}
    environment["PYTHONPATH"] = str(Path(cc.__file__).resolve().parents[1])
    environment["OPENBLAS_NUM_THREADS"] = "1"  # it forks
    subprocess.run([sys.executable, str(script), str(root), how], env=environment, check=True)

    def body(comm):
        found = []
        for path in sorted(root.iterdir(), key=lambda p: int(p.name)):
            trainer = Trainer(
                lambda params, batch, emit: 0.0, SGD(lr=1.0), comm, params={"w": np.zeros(1000)}
            )
            try:
                trainer.load(path)
            except cc.CollectiveError as error:
                found.append(str(error))
                continue
            assert (trainer.parameters()["w"] == trainer.updates).all()
            found.append(trainer.updates)
            trainer.save(path)  # and what the kill left is cleared away
            assert len(list(path.iterdir())) == 2
        return found

    return cc.run_threads(1, body)[0]


@pytest.mark.faults
def test_a_kill_leaves_the_old_or_the_new(tmp_path):
    """Before whatever call it comes: the old one until a rename, the new one from then on."""
    found = updates_after_kills(tmp_path / "run", "replace")
    assert len(found) > 12
    assert set(found) == {1, 2}
    assert found == sorted(found)


@pytest.mark.faults
@pytest.mark.parametrize("how", ["in_place", "anew"])
def test_those_kills_would_find_another_way_of_writing(tmp_path, how):
    found = updates_after_kills(tmp_path / "run", how)
    assert any(isinstance(f, str) for f in found), found


def test_a_sampler_that_does_not_fit_changes_nothing(tmp_path):
    """One of other data, and one whose steps do not divide what was taken."""

    def body(comm):
        trainer = make(comm, function=models.loss_and_grads, accumulate=1)
        batch = models.part_of((X, Y), comm.rank, comm.size)
        sampler = Sampler(60, comm, micro=5, seed=1)
        next(iter(sampler))
        trainer.step(batch)
        trainer.save(tmp_path / "run", sampler=sampler)
        other = make(comm, function=models.loss_and_grads, accumulate=1)
        for wrong in (
            Sampler(61, comm, micro=5, seed=1),
            Sampler(60, comm, micro=4, seed=1),
        ):
            before = wrong.state(), models.bits(other.parameters())
            with pytest.raises(cc.CollectiveError, match="samples"):
                other.load(tmp_path / "run", sampler=wrong)
            assert (wrong.state(), models.bits(other.parameters())) == before
            assert other.updates == 0

    cc.run_threads(2, body, timeout=20)


def test_numbers_of_numpy(tmp_path):
    """As settings, and beside those of Python that are equal."""

    def body(comm):
        for kind in (np.float32, float):
            sampler = Sampler(np.int64(60), comm, micro=np.int64(5), seed=np.int32(1))
            trainer = Trainer(
                models.loss_and_grads, AdamW(lr=kind(0.25)), comm, params=models.parameters(),
                sharding=np.int64(1), accumulate=np.int64(2), clip_norm=np.float32(0.5),
                schedule=Cosine(np.int64(9)), metrics=tmp_path / "metrics.jsonl",
            )  # fmt: skip
            if kind is float:
                trainer.load(tmp_path, sampler=sampler)
            trainer.step(models.part_of((X, Y), comm.rank, comm.size))
            trainer.save(tmp_path, sampler=sampler)
        json.dumps(sampler.state())

    cc.run_threads(2, body, timeout=20)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


class Broken:
    """A sampler that fails on some ranks."""

    def __init__(self, fails):
        self._fails = fails

    def state(self):
        if self._fails:
            raise LookupError("no state")
        return {"at": 3}

    def check(self, state):
        if self._fails:
            raise LookupError("no check")

    def load(self, state):
        assert state == {"at": 3}


def test_a_sampler_that_raises_raises_on_all_ranks(tmp_path):
    """Also one that has no such method; what was saved stays."""

    def body(comm):
        trainer = make(comm, function=models.loss_and_grads)
        trainer.save(tmp_path, sampler=Broken(False))
        for sampler, words in (
            (Broken(comm.rank == 0), r"state\(\) of the sampler: LookupError: no state"),
            (object(), "object has no attribute 'state'"),
        ):
            with pytest.raises(cc.CollectiveError, match=words):
                trainer.save(tmp_path, sampler=sampler)
        with pytest.raises(cc.CollectiveError, match=r"check\(\) of the sampler: LookupError"):
            trainer.load(tmp_path, sampler=Broken(comm.rank == 1))
        trainer.load(tmp_path, sampler=Broken(False))

    cc.run_threads(2, body, timeout=20)
