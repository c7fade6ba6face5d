"""Dumps and their records, in words."""

from __future__ import annotations

from typing import Any

from ..words import size_words

Dump = dict[str, Any]  # of one rank of one communicator; see docs/flight-recorder.md
Record = dict[str, Any]

_NUMBER = (int, float)
_WAIT = {"sequence": int, "since": _NUMBER}
_RECORD = {"sequence": int, "collective": str, "state": str, "begin": _NUMBER}
_TRANSFER = {**_RECORD, "peer": int, "tag": int, "dtype": str, "bytes": int}
_ERROR = {"kind": str, "message": str, "time": _NUMBER}

# Members that the doctor needs, and members that may be missing. A list holds one shape of many.
_START: dict[str, Any] = {"begin": _NUMBER, "?rank": int, "?size": int, "?error": _ERROR}
_COMMUNICATOR: dict[str, Any] = {
    "name": str,
    "rank": int,
    "size": int,
    "state": str,
    "time": _NUMBER,
    "?waiting": {"for": str, "seconds": _NUMBER},
    "?error": {**_ERROR, "?peer": int},
    "calls": [{**_RECORD, "?dtype": str, "?bytes": int, "?end": _NUMBER}],
    "transfers": [_TRANSFER],
    "?gpu_calls": [{**_RECORD, "?dtype": str, "?bytes": int}],
    "?gpu_transfers": [_TRANSFER],
    "?gpu_waiting": _WAIT,
    "?gpu_transfers_waiting": _WAIT,
}
_DUMP: dict[str, Any] = {
    "host": str,
    "pid": int,
    "time": _NUMBER,
    "communicators": [_COMMUNICATOR],
    "?start": _START,
}


def damage(whole: Any, shape: Any = _DUMP, name: str = "it") -> str:
    """Why a dump cannot be read, "" if it can."""
    if isinstance(shape, list):
        if not isinstance(whole, list):
            return f"{name} is no list"
        parts = ((f"{name} {i}", one, shape[0]) for i, one in enumerate(whole))
    elif isinstance(shape, dict):
        if not isinstance(whole, dict):
            return f"{name} is no object"
        bare = {key.removeprefix("?"): key for key in shape}
        for key in shape:
            if key not in whole and not key.startswith("?"):
                return f"{name} has no {key!r}"
        parts = ((k, whole[k], shape[bare[k]]) for k in bare if k in whole)
    else:
        return "" if isinstance(whole, shape) else f"{name} is {whole!r:.40}"
    return next((words for k, one, of in parts if (words := damage(one, of, k))), "")


def call_in_words(record: Record) -> str:
    words = f"{record['collective']} #{record['sequence']}"
    facts = []
    if "dtype" in record:
        facts = [record["dtype"], size_in_words(record)]
    facts += [record[name] for name in ("op",) if record.get(name) not in (None, "sum")]
    if "root" in record:
        facts.append(f"root {record['root']}")
    if "algorithm" in record:
        facts.append(record["algorithm"])
    return f"{words} ({', '.join(facts)})" if facts else words


def size_in_words(record: Record) -> str:
    size = record["bytes"]
    return f"{size} bytes" if size < 1024 or size % 1024 else size_words(size)


def age(dump: Dump, record: Record) -> str:
    """How long before the dump a call began."""
    return f"{max(0.0, dump['time'] - record['begin']):.1f} s"
