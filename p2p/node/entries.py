"""Entry points of other packages, by name."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from p2p.errors import ConfigError


def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of one group in all installed packages, by name."""
    return {point.name: point for point in entry_points(group=group)}


def load(target: str, name: str, what: str) -> object:
    """Import ``target``, given as ``module:attribute``.

    Raises:
        ConfigError: The import fails. The message names the ``what`` called ``name``.
    """
    module, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a package's program runs at its import
        raise ConfigError(
            f"the {what} {name!r} cannot be loaded from {target}: {error}"
        ) from error
    return found
