"""Reading a YAML file so that every error names the file and the line. Needs PyYAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, did_you_mean, nearest

T = TypeVar("T")


class Section:
    """A mapping of the file. `take` its keys, then `done` refuses what is left.

    name  what the section is called in messages
    """

    def __init__(self, file: str, node: Any, name: str) -> None:
        self._file = file
        self._node = node
        self.name = name
        self._entries: dict[str, tuple[Any, Any]] = {}
        self._known: list[str] = []
        if node.id != "mapping":
            raise self.error(
                f"{name} is no mapping of names to values", "write `name: value` lines"
            )
        for key, value in node.value:
            if key.id != "scalar":
                raise self._at(key, "a key is no plain word")
            if key.value in self._entries:
                first = self._entries[key.value][0].start_mark.line + 1
                raise self._at(key, f"{key.value!r} is there twice, first in line {first}")
            self._entries[key.value] = (key, value)

    @property
    def line(self) -> int:
        """The line on which the section begins."""
        return int(self._node.start_mark.line) + 1

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        """The keys, in the order of the file."""
        return iter(self._entries)

    def line_of(self, key: str) -> int:
        """The line of a key that is there."""
        return int(self._entries[key][0].start_mark.line) + 1

    def take(self, key: str, parse: Callable[[object], T], default: T | None = None) -> T:
        """The value of `key`. `parse` raises ValueError for a bad one; without `default` the key
        must be there.
        """
        self._known.append(key)
        if key not in self._entries:
            if default is None:
                typo = nearest(key, [k for k in self._entries if k not in self._known])
                if typo is not None:
                    raise self._at(
                        self._entries[typo][0],
                        f"{self.name} has no key {typo!r}; did you mean {key!r}?",
                    )
                raise self.error(f"{self.name} has no {key!r}", f"add a line `{key}: ...`")
            return default
        name, node = self._entries[key]
        try:
            return parse(_plain(node))
        except ValueError as error:
            raise self._at(node if node.id == "scalar" else name, f"{key}: {error}") from None

    def section(self, key: str) -> Section | None:
        """The mapping under `key`, None if there is none."""
        self._known.append(key)
        if key not in self._entries:
            return None
        return Section(self._file, self._entries[key][1], key)

    def sections(self, key: str) -> list[Section]:
        """The list of mappings under `key`; empty if there is none."""
        self._known.append(key)
        if key not in self._entries:
            return []
        node = self._entries[key][1]
        if node.id != "sequence":
            raise self._at(node, f"{key} is no list; begin each entry with `- `")
        return [Section(self._file, item, f"{key}[{i}]") for i, item in enumerate(node.value)]

    def done(self) -> None:
        """Raises ConfigError for a key that nobody took."""
        for key, (node, _) in self._entries.items():
            if key not in self._known:
                raise self._at(
                    node, f"{self.name} has no key {key!r}; {did_you_mean(key, self._known)}"
                )

    def error(self, what: str, todo: str = "", *, key: str | None = None) -> ConfigError:
        """An error at the section's line, or at that of `key`."""
        node = self._entries[key][0] if key in self._entries else self._node
        return self._at(node, f"{what}; {todo}" if todo else what)

    def _at(self, node: Any, what: str) -> ConfigError:
        return ConfigError(f"{self._file}, line {node.start_mark.line + 1}: {what}")


def _plain(node: Any) -> object:
    import yaml

    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    finally:
        loader.dispose()


def read(path: str | Path, name: str) -> Section:
    """The top of a YAML file. Raises ConfigError if it cannot be read, or without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise ConfigError("topology files need PyYAML: pip install pyyaml") from None
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: this is no text in UTF-8: {error.reason}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{file}, line {mark.line + 1}" if mark else file
        raise ConfigError(f"{where}: this is no YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: this is no YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: lists and mappings lie too deep in each other") from None
    if node is None:
        raise ConfigError(f"{file}, line 1: the file is empty; describe a topology in it")
    return Section(file, node, name)


def text(value: object) -> str:
    """A value that is a word."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is no name")
    return value


def whole(least: int, most: int = 1 << 31) -> Callable[[object], int]:
    """A parser of whole numbers >= `least` and <= `most`."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{value!r} is no whole number >= {least}")
        if value > most:
            raise ValueError(f"{value!r} is more than {most}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[object], float]:
    """A parser of plain numbers, low <= x <= high."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{value!r} is no number")
        if not low <= value <= high:
            raise ValueError(f"{value!r} is not between {low:g} and {high:g}")
        return float(value)

    return parse


def flag(value: object) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def one_of(known: Iterable[str]) -> Callable[[object], str]:
    """A parser of names among `known`."""
    names = list(known)

    def parse(value: object) -> str:
        if value not in names:
            raise ValueError(f"unknown name {value!r}; {did_you_mean(str(value), names)}")
        return str(value)

    return parse
