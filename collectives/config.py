"""The COLLECTIVES_* environment variables: their names, their meaning and how they are read, all in
one place.

Reading is strict. An unknown name that begins with COLLECTIVES_, or a malformed value, raises
ConfigError with the nearest right one, because a misspelt variable that is ignored looks like one
that has no effect. An empty value counts as not set.

A new variable is one line in `VARIABLES` and one field of `Settings`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from operator import index
from typing import Any, NamedTuple

from .errors import ConfigError, did_you_mean

PREFIX = "COLLECTIVES_"

# Seconds that a wait lasts at most, unless COLLECTIVES_TIMEOUT or an argument says otherwise. Ranks
# of one job start minutes apart when they load large programs from a shared file system.
DEFAULT_TIMEOUT = 300.0

# Seconds within which a host is found to be gone, unless COLLECTIVES_HEARTBEAT says otherwise.
DEFAULT_HEARTBEAT = 30.0

# Bytes of a slice of a call on device arrays between nodes, unless COLLECTIVES_STAGING says
# otherwise.
DEFAULT_STAGING = 8 << 20

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
SIMD_LEVELS = ("avx512", "avx2", "portable")
DEBUG_LEVELS = ("off", "info", "trace")


class Rule(NamedTuple):
    """One forced choice: `algorithm` for a `collective` on `low` <= bytes < `high` (None: no
    upper end).
    """

    collective: str
    low: int
    high: int | None
    algorithm: str

    def __str__(self) -> str:
        high = "" if self.high is None else format_size(self.high)
        return f"{self.collective}:{format_size(self.low)}-{high}={self.algorithm}"


_SIZE = r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)"
_LARGEST = (1 << 64) - 1  # bytes
_NAME = r"[^\W\d][^\s(),:;=#]*"  # of an algorithm: what schedule.py lets one be called
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes from text: "4", "4K", "64Ki", "1M", "1GiB", "1.5M". All units are powers of 1024.

    Raises ConfigError, also for "KB", "MB" and so on, which mean 1000 to some and 1024 to others.
    """
    match = re.fullmatch(_SIZE, text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"size {text!r} is not a number of bytes such as 4, 4K, 64Ki, 1M or 1GiB")
    number, unit, suffix = match.group(1), match.group(2).upper(), match.group(3).lower()
    if unit and suffix == "b":
        raise ConfigError(
            f"size {text!r}: {unit}B may mean 1000 or 1024; write {unit} or {unit}iB for powers of "
            "1024"
        )
    if not unit and suffix.startswith("i"):
        raise ConfigError(f"size {text!r} is not a number of bytes such as 4, 4K, 64Ki, 1M or 1GiB")
    size = Decimal(number) * _UNITS[unit]
    if size > _LARGEST:
        raise ConfigError(f"size {_shortened(text)!r} is more than any call can have (2^64 - 1)")
    if size != int(size):
        raise ConfigError(f"size {text!r} is no whole number of bytes")
    return int(size)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:36]}..."


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back as `size`: 65536 gives "64K"."""
    for unit in "TGMK":
        if size >= _UNITS[unit] and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


# As good as without limit: 31 years. Nanoseconds of more than 292 do not fit into 63 bits.
LONGEST = 1e9


def parse_seconds(text: str) -> float:
    """A positive, finite number of seconds, at most LONGEST; "30s" is read as well as "30"."""
    try:
        seconds = float(text.strip().removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{text!r} is no positive number of seconds, such as 30 or 0.5")
    return min(seconds, LONGEST)


def checked_seconds(value: Any, name: str) -> float | None:
    """`value`, an argument, as a positive, finite number of seconds, at most LONGEST; None stays.
    Raises TypeError or ValueError that names the argument if it is none.
    """
    if value is None:
        return None
    try:
        seconds = float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError):
        seconds = None
    if seconds is None:
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{name} must be a positive number of seconds, such as 30, not {value!r}")
    return min(seconds, LONGEST)


def checked_bytes(value: Any, name: str) -> int:
    """`value`, an argument, as a number of bytes; raises TypeError or ValueError that names the
    argument if it is none.
    """
    try:
        size = index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number of bytes, not {value!r}") from None
    if size < 0:
        raise ValueError(f"{name} must be 0 or more bytes, not {value!r}")
    return size


def parse_rules(text: str, algorithms: Iterable[str] | None = None) -> tuple[Rule, ...]:
    """Forced choices, as in COLLECTIVES_ALGORITHM.

        all_reduce:0-64K=direct_one_shot,64K-=ring;broadcast:ring

    `;` stands between collectives, `,` between size ranges. `low-high` is low <= bytes < high;
    `low-` has no upper end; without a range the choice is for all sizes. Sizes that no range names
    are chosen as if nothing were forced, and so they are where the algorithm is "auto".
    Compositions keep their commas: `hierarchical(direct_two_shot, ring)`.

    `algorithms`, if given, are the known names. Raises ConfigError for unknown names, empty or
    overlapping ranges.
    """
    known = None if algorithms is None else [*algorithms, "auto"]
    rules: list[Rule] = []
    for part in _split(text, ";"):
        collective, colon, choices = part.partition(":")
        collective = collective.strip()
        if not colon:
            raise ConfigError(
                f"{part!r} has no collective; write e.g. "
                f"'all_reduce:{part.rpartition('=')[2].strip()}' or "
                "'all_reduce:0-64K=ring,64K-=ring'"
            )
        if collective not in COLLECTIVES:
            raise ConfigError(
                f"unknown collective {collective!r}; {did_you_mean(collective, COLLECTIVES)}"
            )
        if any(rule.collective == collective for rule in rules):
            raise ConfigError(
                f"{collective} is named twice; put all its ranges after one '{collective}:'"
            )
        rules += _parse_choices(collective, choices, known)
    return tuple(rules)


def _parse_choices(collective: str, text: str, known: list[str] | None) -> list[Rule]:
    rules: list[Rule] = []
    for choice in _split(text, ","):
        span, equals, algorithm = choice.rpartition("=")
        algorithm = algorithm.strip()
        if ":" in algorithm or ":" in span:
            raise ConfigError(
                f"{choice!r}: collectives are separated by ';', ranges of one collective by ','"
            )
        if not re.fullmatch(rf"{_NAME}(\s*\(.*\))?", algorithm):
            raise ConfigError(f"{choice!r} names no algorithm; write e.g. '64K-=ring' or 'ring'")
        if known is not None:
            for name in re.findall(_NAME, algorithm):
                if name not in known:
                    raise ConfigError(f"unknown algorithm {name!r}; {did_you_mean(name, known)}")
        low, high = 0, None
        if equals:
            begin, dash, end = span.strip().partition("-")
            if not dash or not begin:
                raise ConfigError(f"{span!r} is no range of sizes; write e.g. '0-64K' or '64K-'")
            low = parse_size(begin)
            high = parse_size(end) if end.strip() else None
            if high is not None and high <= low:
                raise ConfigError(f"range {span!r} is empty: it ends where it begins, or before")
        for rule in rules:
            if (rule.high is None or low < rule.high) and (high is None or rule.low < high):
                raise ConfigError(
                    f"{choice!r} overlaps {str(rule)!r}; a size must have one algorithm"
                )
        rules.append(Rule(collective, low, high, algorithm))
    return sorted(rules, key=lambda rule: rule.low)


def _split(text: str, separator: str) -> list[str]:
    """Parts of `text` between separators that stand outside of parentheses; empty text has no
    parts.
    """
    parts, depth, begin = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == separator and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    if depth != 0:
        raise ConfigError(f"{text!r} has unbalanced parentheses")
    parts.append(text[begin:].strip())
    if parts == [""]:
        return []
    if "" in parts:
        raise ConfigError(f"{text!r} has nothing between two {separator!r}, or at its end")
    return parts


def _text(text: str) -> str:
    return text.strip()


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(f"{text!r} is no whole number >= 0")
    return int(text)


def _port(text: str) -> int:
    port = _count(text)
    if not 0 < port < 65536:
        raise ConfigError(f"{text!r} is no port; ports are 1 to 65535")
    return port


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        name = text.strip().lower()
        if name not in names:
            raise ConfigError(
                f"{text!r} is none of {', '.join(names)}; {did_you_mean(name, names)}"
            )
        return name

    return parse


def _debug(text: str) -> str:
    numbers = {"0": "off", "1": "info", "2": "trace"}
    return _one_of(*DEBUG_LEVELS)(numbers.get(text.strip(), text))


class Variable(NamedTuple):
    """One environment variable: its name, how its text is read, its value when not set, and what
    it means.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str

    @property
    def field(self) -> str:
        """The field of `Settings` that holds it."""
        return self.name.removeprefix(PREFIX).lower()


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "COLLECTIVES_ALGORITHM",
        parse_rules,
        (),
        "forced algorithms: all_reduce:0-64K=direct_one_shot,64K-=ring",
    ),
    Variable(
        "COLLECTIVES_TRANSPORT",
        _one_of("auto", "threads", "shm", "mpi"),
        "auto",
        "forced transport on the host",
    ),
    Variable(
        "COLLECTIVES_TIMEOUT",
        parse_seconds,
        DEFAULT_TIMEOUT,
        "seconds until a wait raises DeadlineError",
    ),
    Variable(
        "COLLECTIVES_DEBUG", _debug, "off", "what is told on standard error: off, info or trace"
    ),
    Variable(
        "COLLECTIVES_TABLE",
        _text,
        "",
        "file of the measured table, for tune and for choosing; off: none",
    ),
    Variable(
        "COLLECTIVES_DUMP",
        _text,
        "",
        "directory for dumps of the flight recorder, on errors and SIGUSR1",
    ),
    Variable(
        "COLLECTIVES_HEARTBEAT",
        parse_seconds,
        DEFAULT_HEARTBEAT,
        "seconds until a host that vanished is noticed where ranks met",
    ),
    Variable(
        "COLLECTIVES_GPU_PATH",
        _one_of("auto", "peer", "host"),
        "auto",
        "forced way between GPUs: peer (their own memory) or host (pinned memory)",
    ),
    Variable(
        "COLLECTIVES_STAGING",
        parse_size,
        DEFAULT_STAGING,
        "bytes of a slice of arrays on GPUs between nodes; 4 times that is pinned",
    ),
    Variable(
        "COLLECTIVES_GPU_MPI",
        _one_of("auto", "on", "off"),
        "auto",
        "pointers to memory of GPUs straight to MPI: auto (large calls, if it takes them), on, off",
    ),
    Variable("COLLECTIVES_NODE", _text, "", "node of this rank, to try several nodes on one host"),
    Variable(
        "COLLECTIVES_SIMD",
        _one_of("auto", *SIMD_LEVELS),
        "auto",
        "instruction set of the reductions: auto, avx512, avx2 or portable",
    ),
    Variable(
        "COLLECTIVES_RANK", _count, None, "rank of this process, 0 to COLLECTIVES_WORLD_SIZE - 1"
    ),
    Variable("COLLECTIVES_WORLD_SIZE", _count, None, "number of ranks"),
    Variable(
        "COLLECTIVES_LOCAL_RANK", _count, None, "rank of this process among those of its host"
    ),
    Variable(
        "COLLECTIVES_ADDR",
        _text,
        "",
        "address where ranks meet; rank 0 listens on it, unless a launcher does",
    ),
    Variable("COLLECTIVES_PORT", _port, None, "port where ranks meet"),
    Variable("COLLECTIVES_JOB", _text, "", "name of the job; ranks of another job are refused"),
    Variable("COLLECTIVES_SECRET", str, "", "secret that all ranks share, at least 16 letters"),
    Variable(
        "COLLECTIVES_SECRET_FILE",
        _text,
        "",
        "file that holds the secret, readable by its owner only",
    ),
    Variable(
        "COLLECTIVES_RENDEZVOUS",
        _one_of("rank0", "launcher"),
        "rank0",
        "who listens where ranks meet",
    ),
)


# Options of the build, which `pip install` reads from the environment; they may be left set, and
# mean nothing here.
BUILD_VARIABLES = ("COLLECTIVES_CUDA", "COLLECTIVES_WERROR", "COLLECTIVES_SANITIZE")

# Variables that begin with this belong to the test suite, and mean nothing here either.
TEST_PREFIX = "COLLECTIVES_TEST_"


def _is_foreign(name: str) -> bool:
    """True for a variable that no setting is read from, and no misspelt one."""
    return not name.startswith(PREFIX) or name in BUILD_VARIABLES or name.startswith(TEST_PREFIX)


class Settings:
    """The values of all variables, read at one time. Fields are documented in `VARIABLES`, in the
    same order.
    """

    algorithm: tuple[Rule, ...]
    transport: str
    timeout: float
    debug: str
    table: str
    dump: str
    heartbeat: float
    gpu_path: str
    staging: int
    gpu_mpi: str
    node: str
    simd: str
    rank: int | None
    world_size: int | None
    local_rank: int | None
    addr: str
    port: int | None
    job: str
    secret: str
    secret_file: str
    rendezvous: str

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Reads `environ`, by default the environment of this process.

        Raises ConfigError for an unknown COLLECTIVES_ name or a malformed value.
        """
        environ = os.environ if environ is None else environ
        known = [variable.name for variable in VARIABLES]
        for name in environ:
            if name not in known and not _is_foreign(name):
                raise ConfigError(
                    f"unknown environment variable {name}; {did_you_mean(name, known)}"
                )
        for variable in VARIABLES:
            text = environ.get(variable.name, "")
            try:
                value = variable.parse(text) if text.strip() else variable.default
            except ConfigError as error:
                raise ConfigError(f"environment variable {variable.name}: {error}") from None
            setattr(self, variable.field, value)

    def __repr__(self) -> str:
        hidden = {"secret": "(set)"} if self.secret else {}
        fields = {v.field: hidden.get(v.field, getattr(self, v.field)) for v in VARIABLES}
        return "Settings(" + ", ".join(f"{name}={value!r}" for name, value in fields.items()) + ")"
