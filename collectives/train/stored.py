"""Reading a checkpoint: of its files each rank reads the entries of which it needs something, block
by block, and keeps what it needs.

An entry is read to its end, since its checksum is of all of it. Cost: with any number of ranks a
rank reads its part of the state, and the rest of the entries in which that begins and ends. (The
package of the format, safetensors, gives all of a file, or arrays of dtypes that are numpy's own.)
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..array import numpy_dtype
from ..errors import CollectiveError
from .sharding import Piece, Shard

_BLOCK = 1 << 20  # bytes that are read at a time


class CheckpointError(CollectiveError, ValueError):
    """A checkpoint is missing, cut short, damaged, or of another model; nothing was loaded."""


class Reader:
    """Parts of parameters out of the files of a generation, each checked."""

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self._folder = folder
        self._entries = index["entries"]
        self._places: dict[str, dict[str, tuple[int, int]]] = {}  # of entries, in each file
        self._parts: dict[str, list[tuple[int, int, str]]] = {}  # kind/name -> (begin, end, key)
        for key, entry in self._entries.items():
            if not key.startswith("buffer/"):
                base, _, offset = key.rpartition("@")
                part = (int(offset), int(offset) + entry["count"], key)
                self._parts.setdefault(base, []).append(part)

    def array(self, key: str, low: int = 0, high: int | None = None) -> Any:
        """Elements `low` to `high` of an entry, flat; raises CheckpointError that names it if it is
        not what was written.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise CheckpointError(f"the checkpoint lacks {key!r}")
        path, dtype = self._folder / entry["file"], numpy_dtype(entry["dtype"])
        begin, end = self._place(path, key)
        first, last = (n * dtype.itemsize for n in (low, entry["count"] if high is None else high))
        found = np.empty(last - first, np.uint8)
        checksum, at = 0, 0
        with path.open("rb") as file:
            file.seek(begin)
            while block := file.read(min(_BLOCK, end - begin - at)):
                checksum = zlib.crc32(block, checksum)
                a, b = max(at, first), min(at + len(block), last)
                if a < b:
                    found[a - first : b - first] = np.frombuffer(block, np.uint8)[a - at : b - at]
                at += len(block)
        if at != entry["count"] * dtype.itemsize or checksum != entry["crc32"]:
            raise CheckpointError(f"{key!r} in {path} is damaged: another checksum")
        return found.view(dtype)

    def _place(self, path: Path, key: str) -> tuple[int, int]:
        """Where an entry begins and ends in its file."""
        if path.name not in self._places:
            try:
                self._places[path.name] = _places(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path}, which holds {key!r}, is missing") from None
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{path}, which holds {key!r}, is cut short or damaged: {error}"
                ) from error
        found = self._places[path.name].get(key)
        if found is None:
            raise CheckpointError(f"{path} lacks {key!r}")
        return found

    def buffer(self, name: str) -> Any:
        """A buffer or frozen parameter, in its shape."""
        key = f"buffer/{name}"
        return self.array(key).reshape(self._entries[key]["shape"])

    def piece(self, piece: Piece, kind: str) -> Any:
        """What a rank holds of a parameter."""
        low, high = piece.offset, piece.offset + piece.high - piece.low
        parts, reached = [], low
        for begin, end, key in sorted(self._parts.get(f"{kind}/{piece.name}", [])):
            a, b = max(begin, low), min(end, high)
            if a >= b:
                continue
            if a != reached:
                break
            parts.append(self.array(key, a - begin, b - begin))
            reached = b
        if reached != high:
            raise CheckpointError(
                f"the checkpoint lacks {kind} of parameter {piece.name!r} from element {reached} on"
            )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def shard(self, shard: Shard, kind: str, kept: str) -> Any:
        """What a rank holds of a bucket, in the dtype in which it is `kept`."""
        whole = np.empty(shard.high - shard.low, numpy_dtype(kept))
        for piece in shard.pieces:
            whole[piece.low : piece.high] = self.piece(piece, kind)
        return whole


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Where the arrays of a file begin and end in it. The number of bytes of a text of JSON comes
    first, then the text, then the arrays.

    Raises ValueError, or what a text of another form leads to, if the file is not like that.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            raise ValueError(f"it has {size} bytes, its header {8 + length}")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {}
    for key, about in header.items():
        begin, end = about["data_offsets"]
        if not 0 <= begin <= end:
            raise ValueError(f"{key!r} lies there from byte {begin} to {end}")
        places[key] = 8 + length + begin, 8 + length + end
    end = max((end for _, end in places.values()), default=8 + length)
    if end != size:
        raise ValueError(f"it has {size} bytes instead of {end}")
    return places
