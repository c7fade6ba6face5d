"""collectives.config: sizes, rules and strict reading of the environment."""

import os
import subprocess
import sys

import pytest

from collectives.config import (
    VARIABLES,
    Rule,
    Settings,
    format_size,
    parse_rules,
    parse_seconds,
    parse_size,
)
from collectives.errors import CollectiveError, ConfigError, nearest


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4", 4),
        ("4B", 4),
        ("4K", 4096),
        ("4k", 4096),
        ("64Ki", 65536),
        ("1M", 1 << 20),
        ("1GiB", 1 << 30),
        ("2 TiB", 2 << 40),
        ("1.5M", 3 << 19),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no.* a number of bytes"),
        ("K", "not a number"),
        ("-4", "not a number"),
        ("4Q", "not a number"),
        ("4iB", "not a number"),
        ("1e3", "not a number"),
        ("64KB", "KB may mean 1000 or 1024; write K or KiB"),
        ("0.3K", "no whole number of bytes"),
        ("16777216T", "'16777216T' is more than any call can have"),
        ("1" * 5000, r"11\.\.\.' is more than any call can have"),
        ("1" * 400 + ".5", r"11\.\.\.' is more than any call can have"),
    ],
)
def test_bad_sizes(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_size(text)


def test_seconds():
    assert parse_seconds("30") == 30
    assert parse_seconds("0.5s") == 0.5
    assert parse_seconds("1e30") * 1e9 < 1 << 63
    for text in ("0", "-1", "inf", "nan", "soon", ""):
        with pytest.raises(ConfigError, match="no positive number of seconds"):
            parse_seconds(text)


def test_rules():
    text = (
        "all_reduce:64K-=ring,0-64K=direct_one_shot; broadcast:hierarchical(ring, direct_two_shot)"
    )
    assert parse_rules(text) == (
        Rule("all_reduce", 0, 65536, "direct_one_shot"),
        Rule("all_reduce", 65536, None, "ring"),
        Rule("broadcast", 0, None, "hierarchical(ring, direct_two_shot)"),
    )
    assert parse_rules("all_gather:auto", ["ring"])[0].algorithm == "auto"
    again = ";".join(str(rule) for rule in parse_rules(text)[2:])
    assert parse_rules(again) == parse_rules(text)[2:]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ring", "'ring' has no collective; write e.g. 'all_reduce:ring'"),
        ("all_reduce=ring", "has no collective; write e.g. 'all_reduce:ring' or"),
        ("allreduce:ring", "unknown collective 'allreduce'; did you mean 'all_reduce'?"),
        ("all_reduce:rign", "unknown algorithm 'rign'; did you mean 'ring'?"),
        ("all_reduce:hierarchical(ring, tre)", "unknown algorithm 'tre'"),
        ("all_reduce:0-64K=", "names no algorithm"),
        ("all_reduce:64K-", "names no algorithm"),
        ("all_reduce:64K=ring", "'64K' is no range"),
        ("all_reduce:-64K=ring", "'-64K' is no range"),
        ("all_reduce:64K-4K=ring", "is empty"),
        ("all_reduce:0-8=ring,4-=tree", "overlaps 'all_reduce:0-8=ring'"),
        ("all_reduce:ring,tree", "overlaps"),
        ("all_reduce:ring;all_reduce:tree", "all_reduce is named twice"),
        ("all_reduce:ring,broadcast:ring", "collectives are separated by ';'"),
        ("all_reduce:ring;", "has nothing between two ';', or at its end"),
        ("all_reduce:hierarchical(ring", "unbalanced parentheses"),
        ("all_reduce:0-64KB=ring", "may mean 1000 or 1024"),
    ],
)
def test_bad_rules(text, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(").replace("?", r"\?")):
        parse_rules(text, ["ring", "tree", "hierarchical"])


def test_settings_defaults_and_values():
    empty = Settings({})
    assert (empty.timeout, empty.transport, empty.algorithm, empty.rank) == (
        300.0,
        "auto",
        (),
        None,
    )
    assert Settings({"COLLECTIVES_TIMEOUT": " "}).timeout == 300.0
    some = Settings({"COLLECTIVES_TIMEOUT": "2.5", "COLLECTIVES_DEBUG": "2", "HOME": "/"})
    assert (some.timeout, some.debug) == (2.5, "trace")
    assert Settings({"COLLECTIVES_CUDA": "OFF"}).timeout == 300.0  # an option of the build


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "COLLECTIVES_TIMEOT",
            "3",
            "unknown .*COLLECTIVES_TIMEOT; did you mean 'COLLECTIVES_TIMEOUT'",
        ),
        ("COLLECTIVES_TIMEOUT", "soon", "variable COLLECTIVES_TIMEOUT: 'soon' is no positive"),
        ("COLLECTIVES_TRANSPORT", "shn", "'shn' is none of .* did you mean 'shm'"),
        ("COLLECTIVES_DEBUG", "9", "is none of off, info, trace"),
        ("COLLECTIVES_SIMD", "avx", "'avx' is none of auto, avx512.* did you mean 'avx2'"),
        ("COLLECTIVES_PORT", "70000", "is no port"),
        ("COLLECTIVES_RANK", "-1", "no whole number"),
        (
            "COLLECTIVES_ALGORITHM",
            "all_reduce:4-=",
            "variable COLLECTIVES_ALGORITHM: .* no algorithm",
        ),
    ],
)
def test_bad_settings(name, text, says):
    with pytest.raises(ConfigError, match=says):
        Settings({name: text})


@pytest.mark.parametrize("text", ["auto", " Portable ", "portable", ""])
def test_the_core_reads_the_instruction_set_as_settings_do(text):
    code = "from collectives import _core; print(_core.simd_level())"
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"COLLECTIVES_SIMD": text},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    simd = Settings({"COLLECTIVES_SIMD": text}).simd
    assert told.stdout.strip() == simd or simd == "auto"


def test_variables_and_fields_agree():
    assert [variable.field for variable in VARIABLES] == list(Settings.__annotations__)
    assert all(variable.help for variable in VARIABLES)


def test_a_secret_is_not_shown():
    assert "hunter2" not in repr(Settings({"COLLECTIVES_SECRET": "hunter2" * 4}))


def test_errors():
    error = ConfigError("words", rank=3)
    assert isinstance(error, CollectiveError) and isinstance(error, ValueError)
    assert (str(error), error.rank, error.peer) == ("words", 3, None)
    assert nearest("Ring", ["ring", "tree"]) == "ring"
    assert nearest("xyz", ["ring", "tree"]) is None


def test_rules_name_all_that_an_algorithm_may_be_called():
    known = ["ring", "my-ring", "a$b", "übrig"]
    (one, two, three) = parse_rules("all_reduce:0-64K=my-ring,64K-=a$b;broadcast:übrig", known)
    assert (one.algorithm, two.algorithm, three.algorithm) == ("my-ring", "a$b", "übrig")
    (both,) = parse_rules("all_reduce:hierarchical(ring, my-ring)", [*known, "hierarchical"])
    assert both.algorithm == "hierarchical(ring, my-ring)"
    with pytest.raises(ConfigError, match="unknown algorithm 'my-rung'"):
        parse_rules("all_reduce:my-rung", known)
