"""A role in a package of its own: says hello to every member that it hears of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import trio

from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.node.tables import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class GreeterConfig:
    """Its table, ``[role.greeter]``."""

    word: str = "hello"
    """What it says."""


class Greeter:
    """Counts the members it has greeted."""

    name: ClassVar[str] = "greeter"

    def __init__(self, config: GreeterConfig) -> None:
        self._config = config
        self._greeted: dict[PeerId, str] = {}

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        """Made from its table."""
        return cls(read_table(GreeterConfig, table, "[role.greeter]"))

    async def run(self, node: Node) -> None:
        """Greet everybody who is there, then everybody who comes."""
        for member in node.membership.members():
            self._greet(member.peer)
        node.membership.on_change(lambda event: self._greet(event.member.peer))
        await trio.sleep_forever()

    def _greet(self, peer: PeerId) -> None:
        self._greeted.setdefault(peer, f"{self._config.word}, {peer.short}")

    def health(self) -> dict[str, object]:
        """How many were greeted."""
        return {"word": self._config.word, "greeted": len(self._greeted)}
