"""TOML files: read once at the start, and written for people, with comments."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.node.tables import Table
from p2p.wire import MIB

MAX_TOML: Final = MIB
"""Bytes: a hundred times what a person writes. A wrong path (a disk image) stops here."""


def load_toml(path: Path) -> Table:
    """The tables of a TOML file. Raises `ConfigError`."""
    if path.exists() and not path.is_file():  # a pipe that nobody writes to is waited for
        raise ConfigError(f"{path} is no regular file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return parse_toml(data, str(path))


def parse_toml(data: bytes, where: str) -> Table:
    """Return the tables that a file holds. Raises `ConfigError` that names ``where``."""
    if len(data) > MAX_TOML:
        raise ConfigError(f"{where} is too long for a configuration (at most {MAX_TOML} bytes)")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits
        raise ConfigError(f"{where} is not TOML: {error}") from None


COLUMN: Final = 32
"""Where comments begin."""


def write_toml(table: Table, reasons: Mapping[str, str] = {}) -> str:
    """Return the text of a table, without keys that are None.

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
        if not path and (isinstance(value, Mapping) or _is_tables(value)):
            late.append((key, value))
        elif value is not None:
            reason = reasons.get(f"{path}{key}", "")
            line = f"{key} = {_value(value)}"
            yield f"{line:<{COLUMN - 1}} # {reason}" if reason else line
    for key, value in late:
        tables: list[Table] = [value] if isinstance(value, Mapping) else list(value)
        for one in tables:
            reason = reasons.get(key, "")
            line = f"[{key}]" if isinstance(value, Mapping) else f"[[{key}]]"
            yield ""
            yield f"{line:<{COLUMN - 1}} # {reason}" if reason else line
            yield from _lines(one, reasons, f"{key}.")


def _is_tables(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value)


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
