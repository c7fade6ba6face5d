"""Dumps and their records, in words."""

from __future__ import annotations

from typing import Any

from ..config import format_size

Dump = dict[str, Any]  # of one rank of one communicator; see docs/flight-recorder.md
Record = dict[str, Any]


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
    if size < 1024 or size % 1024:
        return f"{size} bytes"
    text = format_size(size)
    return f"{text[:-1]} {text[-1]}iB"


def age(dump: Dump, record: Record) -> str:
    """How long before the dump a call began."""
    return f"{max(0.0, dump['time'] - record['begin']):.1f} s"
