"""Check for installed engines before a node joins, without importing torch."""

from __future__ import annotations

from importlib.util import find_spec

from p2p.errors import ConfigError, MissingDependency
from roles.engines.vllm import requirements


def check_engine_installed(engine: str, role: str) -> None:
    """Raise `ConfigError`, with the remedy, if ``role`` could not work with ``engine`` here."""
    if engine == "vllm":
        try:
            requirements.check_installed()
        except MissingDependency as error:
            raise ConfigError(str(error)) from None
    elif find_spec("torch") is None:
        raise ConfigError(
            f"the role {role} computes with torch, which this Python does not have: pip install"
            " 'shoal[torch]', or --role none for a node that only relays"
        )
