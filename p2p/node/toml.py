"""TOML files, read once at the start."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

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
        if len(data) > MAX_TOML:
            raise ConfigError(
                f"{path} is too long for a configuration (at most {MAX_TOML} bytes)"
            )
        return tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
