"""Checkpoints that any number of ranks, under any stage, can go on from.

    run/step-1000/
      checkpoint.json            which generation is the valid one, what is in it, and a checksum
      generation-1000-0/
        rank-0.safetensors       arrays "master/NAME@OFFSET", "first/NAME@OFFSET", ... and buffers
        rank-1.safetensors       (a part of a parameter, and where it begins in the flat parameter)

A generation is written and flushed to disk before checkpoint.json, which is replaced by a rename,
names it. So a kill at any instant leaves the old state or the new. What is read is checked first,
on all ranks, and set only when all of it is good.

The format of the arrays is that of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..agreement import exchange, plain
from ..array import dtype_name, numpy_dtype
from ..errors import CollectiveError, UnsupportedError, described
from .sharding import host
from .stored import CheckpointError, Reader

if TYPE_CHECKING:
    from .data_parallel import Trainer

INDEX = "checkpoint.json"
_FORMAT = 4


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise UnsupportedError(
            "checkpoints are kept in the safetensors format: pip install safetensors"
        ) from None
    return safetensors


# ---- writing ------------------------------------------------------------------------------------


def save(trainer: Trainer, path: str | Path, sampler: Any = None) -> None:
    """Writes the trainer's state: parameters and optimizer state in the dtypes in which they are
    kept, buffers, counters, scale of the loss, schedule, random states of all ranks, and the
    sampler's place. Collective.

    path     a directory, which all ranks reach; an older checkpoint in it is replaced
    sampler  with state(), check(state) and load(state), such as `Sampler`

    Raises CollectiveError on all ranks if one of them cannot write, or gets no state (of the
    sampler, or of an optimizer of torch); the old checkpoint stays, and nothing else.
    """
    safetensors, comm, root = _safetensors(), trainer.comm, Path(path)
    name = error = ""
    if comm.rank == 0:
        try:
            name = _begin(root, trainer.steps)
        except OSError as problem:
            error = f"rank 0 cannot write to {root}: {problem}"
    name, error = exchange(comm, [name, error])[0]
    if error:
        raise CheckpointError(error, rank=comm.rank)
    folder = root / name
    entries: dict[str, Any] = {}
    file = f"rank-{comm.rank}.safetensors"
    theirs: dict[str, Any] = {}  # what an optimizer of torch keeps besides arrays
    place: Any = None
    cause: Exception | None = None
    try:
        if sampler is not None and comm.rank == 0:
            place = _ask(sampler, "state")
        folder.mkdir(parents=True, exist_ok=True)
        arrays = _own_arrays(trainer)
        if trainer.torch_stepper is not None:
            found, theirs = trainer.torch_stepper.state()
            if _writes(trainer):
                arrays |= found
        if arrays:
            stored = {key: _as_real(x) for key, x in arrays.items()}
            _write(folder / file, safetensors.numpy.save(stored))
        entries = {
            key: {
                "file": file,
                "crc32": zlib.crc32(_raw(x)),
                "count": int(x.size),
                "dtype": dtype_name(x.dtype),
                "shape": list(x.shape),
            }
            for key, x in arrays.items()
        }
    except (OSError, MemoryError) as problem:
        error = f"rank {comm.rank} cannot write to {folder}: {_words(problem)}"
    except CollectiveError as problem:  # of the sampler, or an array that no checkpoint can hold
        error = str(problem)
    except Exception as problem:  # whatever it is, the others are told rather than left to wait
        error, cause = f"rank {comm.rank} cannot save: {described(problem)}", problem
    _raise_any(comm, error, folder, cause)
    parts = exchange(comm, [entries, _random_state(trainer), theirs])
    begun: Path | None = folder
    if comm.rank == 0:
        try:
            index = {
                "generation": name,
                "entries": {key: e for part, _, _ in parts for key, e in part.items()},
                "random": [state for _, state, _ in parts],
                "torch": _joined([about for _, _, about in parts]),
                "shapes": {n: list(trainer.store.owners[n][3]) for n in trainer.names},
                "world": comm.size,
                "settings": trainer.settings,
                "layout": trainer.bucketer.layout,
                "updates": trainer.updates,
                "steps": trainer.steps,
                "missed": trainer.missed,
                "loss_scale": trainer.loss_scale and vars(trainer.loss_scale),
                "sampler": place,
            }
            temporary = root / f".{INDEX}.new"
            _write(temporary, _sealed(index))
            _flush(folder)
            os.replace(temporary, root / INDEX)
            begun = None  # it is the valid one now
            _flush(root)
        except (OSError, TypeError, ValueError) as problem:  # or the sampler's state is no JSON
            error = f"rank 0 cannot write to {root}: {problem}"
    _raise_any(comm, error, begun)
    if comm.rank == 0:
        _remove_but(root, name)


def _begin(root: Path, steps: int) -> str:
    """A name for a new generation. Those that saves cut short have left make room for it."""
    if len(_generations(root)) > 1:
        with contextlib.suppress(CheckpointError):  # what cannot be read is left as it is
            _remove_but(root, _index(root)["generation"])
    number = 0
    while (root / f"generation-{steps}-{number}").exists():
        number += 1
    return f"generation-{steps}-{number}"


def _remove_but(root: Path, name: str) -> None:
    """Removes all generations but one."""
    for old in _generations(root):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def _generations(root: Path) -> list[Path]:
    """The folders that saves have made there; all else is the user's."""
    return [p for p in root.glob("generation-*") if re.fullmatch(r"generation-\d+-\d+", p.name)]


def _writes(trainer: Trainer) -> bool:
    """True on one of the ranks that hold a shard."""
    if trainer.store.comm is None:
        return trainer.comm.rank == 0
    return trainer.first_replica


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the ranks know of the parameters that an optimizer of torch steps, as one."""
    if not parts[0]:
        return None
    known = {name: kept for part in parts for name, kept in part["parameters"].items()}
    return parts[0] | {"parameters": known}


def _own_arrays(trainer: Trainer) -> dict[str, Any]:
    """What this rank writes: of every shard, one of the ranks that hold it."""
    comm, store = trainer.comm, trainer.store
    arrays: dict[str, Any] = {}
    if _writes(trainer):
        for shard in store.shards:
            there = {key: host(x) for key, x in store.arrays(shard).items() if shard.pieces}
            for piece in shard.pieces:
                for key, x in there.items():
                    arrays[f"{key}/{piece.name}@{piece.offset}"] = x[piece.low : piece.high]
        # A parameter without elements is in no shard.
        for name in trainer.names:
            if comm.rank == 0 and 0 in store.owners[name][3]:
                arrays[f"master/{name}@0"] = np.empty(0, numpy_dtype(trainer.kept[name]))
    if comm.rank == 0:
        arrays |= {f"buffer/{n}": x for n, x in trainer.untrained.arrays().items()}
    return arrays


def _sealed(index: Mapping[str, Any]) -> bytes:
    """The text of checkpoint.json."""
    content = json.dumps(index, default=plain)
    whole = {"format": _FORMAT, "crc32": zlib.crc32(content.encode()), "content": index}
    return json.dumps(whole, default=plain).encode()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _raw(x: Any) -> Any:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _as_real(x: Any) -> Any:
    """The array, or if it is complex its numbers: the format of the files has no complex128."""
    return x.reshape(-1).view(x.real.dtype) if x.dtype.kind == "c" else x


def _raise_any(
    comm: Any, error: str, begun: Path | None = None, cause: Exception | None = None
) -> None:
    """Raises on all ranks what any of them says.

    begun  a generation that is of no use then
    cause  what this rank's `error` tells of
    """
    found = [e for e in exchange(comm, error) if e]
    if not found:
        return
    if begun is not None and comm.rank == 0:
        shutil.rmtree(begun, ignore_errors=True)
    raise CheckpointError("; ".join(dict.fromkeys(found)), rank=comm.rank) from cause


# ---- reading ------------------------------------------------------------------------------------


# The last two: not what `save` writes.
_WRONG = (OSError, MemoryError, ValueError, KeyError, TypeError)


def _words(problem: Exception) -> str:
    if isinstance(problem, (KeyError, TypeError)) and not isinstance(problem, CollectiveError):
        return f"{INDEX} is not as this version writes it: {described(problem)}"
    return str(problem) or described(problem)


def load(trainer: Trainer, path: str | Path, sampler: Any = None) -> None:
    """Sets the trainer, and the sampler if one is given, to a checkpoint of any number of ranks
    and any stage. Collective.

    With the number of ranks that wrote it, random states come back too, and training goes on bit
    for bit as if it had never stopped. A checkpoint of a trainer without master weights can be
    loaded by one that has them, since that changes no value.

    Raises CheckpointError on all ranks, which names what is wrong with which parameter, and changes
    nothing, if the checkpoint is cut short, damaged, not of this model, optimizer, schedule and
    sampler, or kept in a dtype that would be rounded here, as master weights are by a trainer
    without them.
    """
    comm, error = trainer.comm, ""
    index: dict[str, Any] = {}
    try:
        index = _index(Path(path))
        _check_model(trainer, index)
        if sampler is not None:
            if index["sampler"] is None:
                raise CheckpointError("the checkpoint holds no sampler")
            _ask(sampler, "check", index["sampler"])
    except _WRONG as problem:
        error = f"rank {comm.rank}: {_words(problem)}"
    _raise_any(comm, error)
    layout = index["layout"]
    shards: list[dict[str, Any]] = []
    states: dict[tuple[str, int, str], Any] = {}
    buffers: dict[str, Any] = {}
    try:
        reader = Reader(Path(path) / index["generation"], index)
        template = trainer.shards_for(layout)
        keys = ("master", *trainer.slots)
        for shard in template:
            kept = trainer.kept[shard.bucket.slots[0].name]
            shards.append({key: reader.shard(shard, key, kept) for key in keys})
        states = {
            (piece.name, piece.offset, key): reader.piece(piece, f"torch.{key}")
            for shard in template
            for piece in shard.pieces
            for key in _torch_keys(index, piece.name)
        }
        buffers = {n: reader.buffer(n) for n in trainer.untrained.kinds()}
    except _WRONG as problem:
        error = f"rank {comm.rank}: {_words(problem)}"
    _raise_any(comm, error)
    trainer.missed.clear()
    trainer.missed.update(index["missed"])
    trainer.restore(layout, shards, buffers)
    if trainer.torch_stepper is not None:
        trainer.torch_stepper.restore(index["torch"], states)
    trainer.updates, trainer.steps = index["updates"], index["steps"]
    if trainer.loss_scale is not None and index["loss_scale"]:
        for key, value in index["loss_scale"].items():
            setattr(trainer.loss_scale, key, value)
    if sampler is not None:
        sampler.load(index["sampler"])
    if index["world"] == comm.size:
        _set_random_state(trainer, index["random"][comm.rank])


def _ask(sampler: Any, what: str, *given: Any) -> Any:
    """What a sampler's method returns; whatever it raises, all ranks are to hear."""
    try:
        return getattr(sampler, what)(*given)
    except Exception as problem:
        raise CheckpointError(f"{what}() of the sampler: {described(problem)}") from problem


def _torch_keys(index: Mapping[str, Any], name: str) -> list[str]:
    """Which arrays an optimizer of torch keeps for a parameter."""
    kept = (index["torch"] or {"parameters": {}})["parameters"].get(name)
    return [] if kept is None else list(kept["arrays"])


def _index(root: Path) -> dict[str, Any]:
    try:
        text = (root / INDEX).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{root} holds no checkpoint: there is no {INDEX}") from None
    try:
        whole = json.loads(text)
        kind = whole["format"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{root / INDEX} is cut short or damaged") from None
    if kind != _FORMAT:
        raise CheckpointError(
            f"{root / INDEX} has format {kind}, known is {_FORMAT}: another version of this "
            "package wrote it, and can load it"
        )
    index = whole.get("content")
    if whole.get("crc32") != zlib.crc32(json.dumps(index).encode()) or not isinstance(index, dict):
        raise CheckpointError(f"{root / INDEX} is damaged: another checksum")
    return index


def _check_model(trainer: Trainer, index: Mapping[str, Any]) -> None:
    """The checkpoint has this model's parameters, and no others, and this optimizer's state."""
    for key in ("missed", "updates", "steps", "loss_scale", "world", "random"):
        index[key]  # a KeyError now rather than when parameters are set
    mine = {n: list(trainer.store.owners[n][3]) for n in trainer.names}
    theirs = index["shapes"]
    for name in mine:
        if name not in theirs:
            raise CheckpointError(f"the checkpoint lacks parameter {name!r}")
        if mine[name] != theirs[name]:
            raise CheckpointError(
                f"parameter {name!r} has shape {theirs[name]} in the checkpoint, {mine[name]} here"
            )
    foreign = [name for name in theirs if name not in mine]
    if foreign:
        raise CheckpointError(f"the checkpoint has a foreign parameter {foreign[0]!r}")
    for setting in ("optimizer", "schedule"):
        if index["settings"][setting] != trainer.settings[setting]:
            raise CheckpointError(
                f"the checkpoint's {setting} is {index['settings'][setting]}, here it is "
                f"{trainer.settings[setting]}"
            )
    if sorted(index["layout"]) != sorted(mine):
        raise CheckpointError("the checkpoint's layout does not name the parameters once each")
    if (index["torch"] is None) != (trainer.torch_stepper is None):
        raise CheckpointError("one of the checkpoint and the trainer has an optimizer of torch")
    known = {"master", *trainer.slots}
    known |= {f"torch.{key}" for name in mine for key in _torch_keys(index, name)}
    others = trainer.untrained.kinds()
    for key in index["entries"]:
        entry = index["entries"][key]
        kind, _, rest = key.partition("/")
        if kind == "buffer" and rest in others:
            _check_other(rest, entry, *others[rest])
            continue
        name = rest.rpartition("@")[0]
        if kind not in known or name not in mine:
            raise CheckpointError(f"the checkpoint has a foreign entry {key!r}")
        if kind in ("master", *trainer.slots) and _rounds(entry["dtype"], trainer.kept[name]):
            raise CheckpointError(
                f"{kind} of parameter {name!r} is {entry['dtype']} in the checkpoint and would be "
                f"rounded to {trainer.kept[name]} here; a trainer with master_weights=True and "
                "parameters that come in as there can load it"
            )


def _check_other(name: str, entry: Mapping[str, Any], shape: list[int], dtype: str) -> None:
    """An entry is a buffer or frozen parameter as it is here."""
    if entry["shape"] != shape:
        raise CheckpointError(
            f"buffer or frozen parameter {name!r} has shape {entry['shape']} in the checkpoint, "
            f"{shape} here"
        )
    if _rounds(entry["dtype"], dtype):
        raise CheckpointError(
            f"buffer or frozen parameter {name!r} is {entry['dtype']} in the checkpoint and would "
            f"be rounded to {dtype} here; a model that has it as there can load it"
        )


def _rounds(there: str, here: str) -> bool:
    """True if one dtype does not hold all values of another."""
    return not np.can_cast(numpy_dtype(there), numpy_dtype(here))


# ---- random states ------------------------------------------------------------------------------


def _random_state(trainer: Trainer) -> dict[str, Any]:
    """Of Python, numpy (the global one), torch if it is there, and the trainer's own generator."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has, cached = np.random.get_state()  # noqa: NPY002
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has, cached],
        "trainer": trainer.random.bit_generator.state,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state().tolist()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def _set_random_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has, cached))  # noqa: NPY002
    trainer.random.bit_generator.state = state["trainer"]
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
