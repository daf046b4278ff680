"""What a role is to a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, runtime_checkable

from p2p.node.services import Node


class Role(Protocol):
    """A job of a node, found under the entry point group ``shoal.roles`` or as
    ``module:Class``.

    Several may run in one node; each gets its own table of the configuration,
    ``[role.<name>]``.
    """

    name: ClassVar[str]
    """How heartbeats, tables and logs call it."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from its table. Raises `ConfigError` (`p2p.node.tables.read_table` does it
        all).
        """
        ...

    async def run(self, node: Node) -> None:
        """Do the job until cancelled. Whatever it raises ends the node."""
        ...

    def health(self) -> dict[str, object]:
        """Plain values for people and dashboards: counts, ages, the newest policy."""
        ...


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a node's screen."""

    label: str
    """A word, such as ``work``; it has eight columns."""
    text: str
    """Such as ``1,024 rollouts made, 896 accepted``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a role has come, in words for the screen that a node shows to people."""

    facts: tuple[Fact, ...]
    """What it does now, what was done and what came of it; the most wanted first, since a low
    terminal has no room for the last."""

    over: bool = False
    """Whether the role has nothing left to do in this run."""


@runtime_checkable
class Reporter(Protocol):
    """A role that says how far it has come. Roles need not: then the line says only what the
    node does.
    """

    def progress(self) -> Progress:
        """Called about once a second. Must not block."""
        ...
