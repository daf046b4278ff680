"""Roles and readers of run documents that other packages bring.

They are named by entry points; a role may be given as ``module:Class`` too. `p2p.node.commands`
finds the commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

from p2p.errors import BadMessage, ConfigError
from p2p.identity import Verify
from p2p.node.admission import OtherRun, RunReader, SignedRun
from p2p.node.entries import installed, load
from p2p.node.role import Role
from p2p.node.usage import did_you_mean

ROLES: Final = "shoal.roles"
NO_ROLE: Final = "none"
"""Name on the command line for a node without a role, which only relays, as every node does."""


def load_role(
    name: str,
    tables: Mapping[str, Mapping[str, object]],
    more: Mapping[str, object] = MappingProxyType({}),
) -> Role:
    """Load the role called ``name`` and make it from its table and the keys ``more``.

    Raises:
        ConfigError: The role is unknown or refuses its table.
    """
    found = installed(ROLES)
    if ":" not in name and name not in found:
        near = did_you_mean(name, [*found, NO_ROLE], "installed are")
        raise ConfigError(f"there is no role {name!r}; {near} (or give module:Class)")
    kind = load(name if ":" in name else found[name].value, name, "role")
    if not hasattr(kind, "from_config") or not hasattr(kind, "run"):
        raise ConfigError(
            f"{name!r} is no role: it lacks from_config or run (see docs/extending.md)"
        )
    role_type = cast(type[Role], kind)
    return role_type.from_config({**tables.get(role_type.name, {}), **more})


def load_roles(
    names: Sequence[str],
    tables: Mapping[str, Mapping[str, object]],
    *,
    device: str | None = None,
) -> list[Role]:
    """Load several roles, where ``none`` stands for no role. ``device`` replaces the key of
    that name in each role's table.

    The configuration may have tables for installed roles that this node does not run, since
    files are shared. A table for a role that is neither installed nor run here is an error.

    Raises:
        ConfigError: A role or a table is wrong.
    """
    more = {} if device is None else {"device": device}
    roles = [load_role(name, tables, more) for name in dict.fromkeys(names) if name != NO_ROLE]
    if len({role.name for role in roles}) < len(roles):
        raise ConfigError(f"one role is given twice: {', '.join(names)}")
    known = {*installed(ROLES), *(role.name for role in roles)}
    for name in tables:
        if name not in known:
            raise ConfigError(
                f"[role.{name}]: no role is called so; {did_you_mean(name, known)}"
            )
    return roles


def open_run_untrusted(
    document: bytes, verify: Verify, pin: SignedRun | None = None, /
) -> SignedRun:
    """Open a run document with the installed readers.

    Raises:
        BadMessage: No reader accepts the document.
        ConfigError: No reader is installed, or one cannot be loaded.
    """
    points = sorted(installed("shoal.runs").items())
    if not points:
        raise ConfigError(
            "no reader of run files is installed; install Shoal with: pip install shoal"
        )
    failure: BadMessage | None = None
    for name, point in points:
        try:
            reader = cast(RunReader, load(point.value, name, "run reader"))
            return reader(document, verify, pin)
        except OtherRun:
            raise
        except BadMessage as error:
            failure = failure or error
    raise failure or BadMessage("no reader knows this run file")
