"""Files that environments read, inside their process: data that a run pins, and a tokenizer.

No run sends data: a collection of questions has a licence of its own, and the machine's owner
says where it lies (``environment_data`` in ``[role.NAME.machine]``). The tokenizer is part of
the run's model, and the node has compared it with what is pinned.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Final

from p2p.errors import ConfigError, MissingDependency
from p2p.wire import MIB
from roles.contract.core.pin import FilePin
from roles.envs.text import ChatTokenizer

MAX_DATA: Final = 256 * MIB
"""Bytes of one file. Its lines are held in memory, in 2 to 3 times that, of the 4 GiB that an
environment may use. The largest collections of questions in use have 1.2 GB; a part of one does
as well."""


def lies_in(folder: str, name: str) -> bool:
    """True if a folder of this machine has a file of that name."""
    return Path(folder, name).exists()


def read_data(pin: FilePin, folder: str) -> bytes:
    """Return the content of the file that ``pin`` names.

    Raises:
        ConfigError: The file cannot be read, or differs. The message says what to do.
    """
    if not folder:
        raise ConfigError(
            f"this run's environment reads the file {pin.name}: say in which folder of this"
            " machine it lies, as environment_data in [role.NAME.machine]"
        )
    path = Path(folder) / pin.name
    if pin.size > MAX_DATA:
        raise ConfigError(f"the run pins {pin.size:,} bytes of {pin.name}, over {MAX_DATA:,}")
    try:
        with path.open("rb") as file:
            data = file.read(pin.size + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != pin.size or hashlib.sha256(data).digest() != pin.digest:
        raise ConfigError(
            f"{path} is not the file that the run pins ({pin.size:,} bytes, sha256"
            f" {pin.digest.hex()[:16]}...): get it from where the owner of the run has it"
        )
    return data


def pin_data(path: str) -> FilePin:
    """Return the pin of a file for the run document.

    Raises:
        ConfigError: The file cannot be read, or is larger than `MAX_DATA`.
    """
    file = Path(path)
    if file.exists() and not file.is_file():  # a pipe that nobody writes to is waited for
        raise ConfigError(f"{path} is no regular file")
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_DATA + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path!r} cannot be read: {error}") from error
    if len(data) > MAX_DATA:
        raise ConfigError(f"{path} has over {MAX_DATA:,} bytes")
    return FilePin(name=file.name, size=len(data), digest=hashlib.sha256(data).digest())


def open_tokenizer(folder: str) -> ChatTokenizer:
    """Return the tokenizer of a model, with its chat template.

    Raises:
        roles.models.errors.BadModel: They are not sound.
        MissingDependency: The packages for them are not installed.
    """
    try:
        module = importlib.import_module("roles.models.tokenizer")
    except ImportError as error:
        raise MissingDependency(
            f"environments of text need tokenizers: pip install 'shoal[hf]' ({error})"
        ) from error
    tokenizer: ChatTokenizer = module.Tokenizer.open(Path(folder))
    return tokenizer
