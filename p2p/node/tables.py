"""TOML files, and plain tables to and from frozen dataclasses, strictly.

Every configuration lives beside its owner as a frozen dataclass; this is the one way in. A key
that no field has, a missing one, a value of the wrong type: each is a `ConfigError` that names
the place, the key and, for a misspelling, the key that was meant.

TOML files are read once at the start, and written for people, with comments.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from p2p.errors import ConfigError
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.wire import MIB

T = TypeVar("T")

Table = Mapping[str, object]
"""Maps keys to plain values: str, int, float, bool, bytes, and lists and tables of them."""

# Values with a text form. Each raises ValueError with a sentence.
_FROM_TEXT: Final[Mapping[type, Callable[[str], object]]] = {
    PeerId: PeerId.from_base58,
    Multiaddr: Multiaddr.parse,
}


def read_table(kind: type[T], table: object, where: str) -> T:
    """Read ``table`` as a ``kind``, a frozen dataclass. ``where`` begins every error message: a
    file, or a table's name.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type, or ``kind``
            refuses a value.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, not {_describe(table)}")
    known = _fields(typing.cast(Any, kind))
    for key in table:
        if key not in known:
            # The key may be a stranger's, and comparison takes quadratic time.
            key = f"{key!s:.80}"
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            all_keys = f"known are {', '.join(sorted(known))}"
            hint = f"did you mean {near[0]!r}?" if near else all_keys
            raise ConfigError(f"{where}: there is no key {key!r}; {hint}")
    values = {}
    for name, (field, hint) in known.items():
        if name in table:
            values[name] = _read(hint, table[name], f"{where}: {name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{where}: the key {name!r} is missing")
    try:
        return kind(**values)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        # What is refused at birth is a ValueError. The others come from checks that did
        # not foresee the value, a zero to divide by: void too, as the values may be a
        # stranger's.
        raise ConfigError(f"{where}: {error or type(error).__name__}") from error


LATER: Final[Mapping[str, bool]] = {"later": True}
"""Metadata of a field that was added after its table was first signed. The field is written
only if it is not its default, so that older documents keep their digests."""


def write_table(value: object) -> dict[str, object]:
    """Return the plain table of a dataclass, which `read_table` reads."""
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{value!r} is no dataclass")
    return {
        field.name: _plain(getattr(value, field.name))
        for field in fields(value)
        if not (field.metadata.get("later") and getattr(value, field.name) == field.default)
    }


def _plain(value: object) -> object:
    if type(value) in _FROM_TEXT:
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return write_table(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


@cache
def _fields(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    hints = typing.get_type_hints(kind)
    return {field.name: (field, hints[field.name]) for field in fields(kind) if field.init}


def _read(hint: Any, value: object, where: str) -> object:
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _read_tuple(typing.get_args(hint), value, where)
    if origin in (types.UnionType, typing.Union):
        choices = [choice for choice in typing.get_args(hint) if choice is not types.NoneType]
        return None if value is None else _read(choices[0], value, where)
    if origin is not None:  # Mapping[...]: its owner reads it
        return _read_mapping(typing.get_args(hint), value, where)
    if isinstance(hint, typing.NewType):
        return _read(hint.__supertype__, value, where)
    if hint in _FROM_TEXT or (isinstance(hint, type) and issubclass(hint, Enum)):
        return _read_text(hint, value, where)
    if is_dataclass(hint):
        return read_table(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where} is too large for a number") from None
    if value != value:  # every comparison with it is false: no check at birth would catch it
        raise ConfigError(f"{where} is not a number")
    if hint is object:
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be {_name_of(hint)}, not {_describe(value)}")
    return value


def _read_text(hint: Any, value: object, where: str) -> object:
    try:
        if issubclass(hint, Enum):
            return hint(value)
        if not isinstance(value, str):
            raise ConfigError(f"{where} must be a text, not {_describe(value)}")
        return _FROM_TEXT[hint](value)
    except ValueError as error:
        if issubclass(hint, Enum):
            raise ConfigError(
                f"{where} must be one of {', '.join(str(m.value) for m in hint)}"
            ) from None
        raise ConfigError(f"{where}: {error}") from None


def _read_tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list, not {_describe(value)}")
    if kinds[1:] == (Ellipsis,):
        return tuple(
            _read(kinds[0], item, f"{where}[{index}]") for index, item in enumerate(value)
        )
    if len(value) != len(kinds):
        raise ConfigError(f"{where} must have {len(kinds)} items, not {len(value)}")
    return tuple(_read(kind, item, where) for kind, item in zip(kinds, value, strict=True))


def _read_mapping(kinds: tuple[Any, ...], value: object, where: str) -> dict[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} must be a table, not {_describe(value)}")
    if kinds[1] in (object, Any):
        return dict(value)
    return {key: _read(kinds[1], item, f"{where}.{key}") for key, item in value.items()}


def _describe(value: object) -> str:
    return _name_of(type(value))


def _name_of(kind: type) -> str:
    names = {
        str: "a text", int: "a whole number", float: "a number", bool: "true or false",
        list: "a list", dict: "a table", type(None): "nothing", bytes: "bytes",
    }  # fmt: skip
    return names.get(kind, kind.__name__)


MAX_TOML: Final = MIB
"""Maximum bytes of a TOML file: a hundred times what a person writes. It stops at a wrong path,
such as a disk image."""


def load_toml(path: Path) -> Table:
    """Read the tables of a TOML file.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    if path.exists() and not path.is_file():  # a pipe that nobody writes to is waited for
        raise ConfigError(f"{path} is no regular file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return parse_toml(data, str(path))


def parse_toml(data: bytes, where: str) -> Table:
    """Parse the bytes of a TOML file.

    Raises:
        ConfigError: The bytes are not TOML, or too many. The message names ``where``.
    """
    if len(data) > MAX_TOML:
        raise ConfigError(f"{where} is too long for a configuration (at most {MAX_TOML} bytes)")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits
        raise ConfigError(f"{where} is not TOML: {error}") from None


def write_toml(table: Table, reasons: Mapping[str, str] = {}) -> str:
    """Return a table as TOML text, without keys that are None.

    Args:
        table: Plain values. Tables within it become ``[tables]``, lists of tables
            ``[[tables]]``; deeper ones are written in one line.
        reasons: A comment for each key or table that has one; ``table.key`` names a key of a
            table.
    """
    return "\n".join(_lines(table, reasons, "")) + "\n"


def _lines(table: Table, reasons: Mapping[str, str], path: str) -> Iterator[str]:
    late: list[tuple[str, Any]] = []
    for key, value in table.items():
        is_tables = isinstance(value, list | tuple) and any(
            isinstance(one, Mapping) for one in value
        )
        if not path and (isinstance(value, Mapping) or is_tables):
            late.append((key, value))
        elif value is not None:
            reason = reasons.get(f"{path}{key}", "")
            line = f"{key} = {_value(value)}"
            yield f"{line:<31} # {reason}" if reason else line
    for key, value in late:
        tables: list[Table] = [value] if isinstance(value, Mapping) else list(value)
        for one in tables:
            reason = reasons.get(key, "")
            line = f"[{key}]" if isinstance(value, Mapping) else f"[[{key}]]"
            yield ""
            yield f"{line:<31} # {reason}" if reason else line
            yield from _lines(one, reasons, f"{key}.")


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | bytes):
        text = value.hex() if isinstance(value, bytes) else value
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    short = f"{value:g}" if isinstance(value, float) and 0 < value < 0.01 else ""
    return short if short and float(short) == value else str(value)


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)
