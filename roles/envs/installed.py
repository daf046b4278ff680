"""Digests of installed code, taken without importing it.

What a run pins is compared before it can run.

The one file of the roles that looks at this machine's Python installation.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from p2p.errors import ConfigError

MAX_PACKAGE_BYTES: Final = 256 * 1024 * 1024
"""Bytes of a package that are hashed: code and word lists, not data sets."""


def module_digest(module: str) -> bytes | None:
    """sha256 of the source of one module, whose parent packages are imported already; None if
    there is no such module."""
    spec = importlib.util.find_spec(module)
    return (
        None
        if spec is None or spec.origin is None
        else _digest_of({"": Path(spec.origin)}, module)
    )


def package_digest(top: str) -> bytes | None:
    """sha256 over paths and contents of all files of a top-level package; None if it is not
    there.

    Raises `ConfigError` if it is larger than `MAX_PACKAGE_BYTES`.
    """
    files = _package_files(top)
    return _digest_of(files, top) if files else None


def package_places(top: str) -> tuple[str, ...]:
    """Return the folders of a top-level package, or the file of a module; nothing if it is
    missing.

    An editable installation may keep it anywhere.
    """
    spec = importlib.util.find_spec(top)
    if spec is None:
        return ()
    folders = list(spec.submodule_search_locations or ())
    found = folders or ([] if spec.origin is None else [spec.origin])
    return tuple(str(Path(place).absolute()) for place in found)


def _package_files(top: str) -> dict[str, Path]:
    """Return the files of a package by their path in it.

    ``find_spec`` imports nothing for a name without a dot.
    """
    spec = importlib.util.find_spec(top)
    if spec is None:
        return {}
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not folders:
        return {} if spec.origin is None else {Path(spec.origin).name: Path(spec.origin)}
    return {
        path.relative_to(folder).as_posix(): path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _digest_of(files: Mapping[str, Path], what: str) -> bytes:
    digest = hashlib.sha256()
    left = MAX_PACKAGE_BYTES
    for relative in sorted(files):
        data = files[relative].read_bytes()
        left -= len(data)
        if left < 0:
            raise ConfigError(f"the package {what} is larger than {MAX_PACKAGE_BYTES:,} bytes")
        path = relative.encode()
        digest.update(len(path).to_bytes(4, "big") + path + len(data).to_bytes(8, "big") + data)
    return digest.digest()


def require(packages: Mapping[str, str], *, extra: str, what: str) -> None:
    """Check that exactly these versions are installed, without importing them.

    For environments that stand on other packages: the digest of an environment covers its own
    files, these names and versions among them.

    Raises:
        ConfigError: A package is missing, or has another version.
    """
    for name, wanted in packages.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise ConfigError(
                f"{what} needs {name} {wanted}, installed is {found}: pip install"
                f" 'shoal[{extra}]'"
            )
