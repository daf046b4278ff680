"""Roles, commands and readers of run documents that other packages bring.

They are named by entry points, or as ``module:Class``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from p2p.errors import BadMessage, ConfigError
from p2p.identity import Verify
from p2p.node.admission import OtherRun, RunReader, SignedRun
from p2p.node.role import Role
from p2p.node.usage import did_you_mean

ROLES: Final = "shoal.roles"
COMMANDS: Final = "shoal.commands"
RUNS: Final = "shoal.runs"
NODE_COMMAND: Final = "node"
"""The command that comes with this package."""
NO_ROLE: Final = "none"
"""A node that only relays. Relaying is what every node does, so this is no role but the absence
of one.
"""

Command = Callable[[Sequence[str]], int]
"""Takes the arguments behind its name, returns the exit code. The first line of its docstring
is its help.
"""


def load_role(name: str, tables: Mapping[str, Mapping[str, object]]) -> Role:
    """The role called ``name``, made from its table. Raises `ConfigError` with one sentence."""
    kind = _load_role_kind(name)
    if not hasattr(kind, "from_config") or not hasattr(kind, "run"):
        raise ConfigError(
            f"{name!r} is no role: it lacks from_config or run (see docs/extending.md)"
        )
    role_type = cast(type[Role], kind)
    return role_type.from_config(tables.get(role_type.name, {}))


def load_roles(names: Sequence[str], tables: Mapping[str, Mapping[str, object]]) -> list[Role]:
    """Several roles; ``none`` stands for no role at all. Raises `ConfigError`.

    A table in the configuration for an installed role that this node does not run is fine:
    files are shared. A table for a role that is neither installed nor run here is misspelt.
    """
    roles = [load_role(name, tables) for name in dict.fromkeys(names) if name != NO_ROLE]
    if len({role.name for role in roles}) < len(roles):
        raise ConfigError(f"one role is given twice: {', '.join(names)}")
    known = {*_points(ROLES), *(role.name for role in roles)}
    for name in tables:
        if name not in known:
            raise ConfigError(
                f"[role.{name}]: no role is called so; {did_you_mean(name, known)}"
            )
    return roles


def load_command(name: str) -> Command:
    """The command called ``name``. Raises `ConfigError`."""
    found = _points(COMMANDS)
    if name not in found:
        raise ConfigError(
            f"there is no command {name!r}; {did_you_mean(name, command_names())}"
        )
    return cast(Command, _resolve(found[name].value, name, "command"))


def command_names() -> list[str]:
    """Every command of ``shoal``: ``node``, and what is installed."""
    return sorted({NODE_COMMAND, *_points(COMMANDS)})


def command_summaries() -> list[tuple[str, str]]:
    """Every command with the first line of its docstring; one that cannot be loaded says so
    instead.
    """
    found = []
    for name in command_names():
        if name == NODE_COMMAND:
            summary = "Run a node: relay policies, and work in the roles that it is given."
        else:
            try:
                summary = (inspect.getdoc(load_command(name)) or "").partition("\n")[0]
            except ConfigError as error:
                summary = f"({error})"
        found.append((name, summary))
    return found


def open_run_untrusted(
    document: bytes, verify: Verify, pin: SignedRun | None = None, /
) -> SignedRun:
    """Open a run document with the installed readers. Raises `BadMessage`; `ConfigError`
    without a reader.
    """
    points = sorted(entry_points(group=RUNS), key=lambda point: point.name)
    if not points:
        raise ConfigError(
            "no reader of run files is installed; install Shoal with: pip install shoal"
        )
    failure: BadMessage | None = None
    for point in points:
        try:
            return cast(RunReader, _resolve(point.value, point.name, "run reader"))(
                document, verify, pin
            )
        except OtherRun:
            raise
        except BadMessage as error:
            failure = failure or error
    raise failure or BadMessage("no reader knows this run file")


def _load_role_kind(name: str) -> object:
    if ":" in name:
        return _resolve(name, name, "role")
    found = _points(ROLES)
    if name not in found:
        near = did_you_mean(name, [*found, NO_ROLE], "installed are")
        raise ConfigError(f"there is no role {name!r}; {near} (or give module:Class)")
    return _resolve(found[name].value, name, "role")


def _points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _resolve(target: str, name: str, what: str) -> object:
    module, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the {what} {name!r} cannot be loaded from {target}: {error}"
        ) from error
    return found
