"""Six trees with lines of different speeds, on which the link model is held against real links.

Rates are low on purpose: what limits a run must be the lines, not the machine that plays all of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sim.net.link import LinkSpec

CHUNKS: Final = 32
"""8 MiB in chunks of 256 KiB: some seconds at these rates, so that TCP's first second does not
decide."""
CHUNK_BYTES: Final = 256 * 1024
"""Bytes relayed in one piece: small beside the file, so that a chain fills like a pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMember:
    """A machine of a tree."""

    name: str
    parent: str | None
    """The machine that sends it every chunk; None for the root, which has them all."""
    link: LinkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A tree of machines and what flows down it."""

    name: str
    caption: str
    members: tuple[TreeMember, ...]
    """The machines, parents before their children."""
    chunks: int = CHUNKS
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        known: dict[str, None] = {}
        for member in self.members:
            if member.name in known or (
                member.parent is not None and member.parent not in known
            ):
                raise ValueError(
                    f"{self.name}: {member.name} is twice there, or before its parent"
                )
            known[member.name] = None
        if not self.members or [member.parent for member in self.members].count(None) != 1:
            raise ValueError(f"{self.name} must have one root")

    @property
    def parents(self) -> dict[str, str | None]:
        """Return each machine's parent."""
        return {member.name: member.parent for member in self.members}

    @property
    def links(self) -> dict[str, LinkSpec]:
        """Return each machine's line."""
        return {member.name: member.link for member in self.members}

    def children(self, name: str) -> list[str]:
        """Return the machines to which ``name`` passes chunks on."""
        return [member.name for member in self.members if member.parent == name]


def _tree(name: str, caption: str, *lines: tuple[str, str | None, float, float]) -> Topology:
    members = tuple(
        TreeMember(name=machine, parent=parent, link=LinkSpec(up=up, down=down))
        for machine, parent, up, down in lines
    )
    return Topology(name=name, caption=caption, members=members)


def _binary(size: int, rate: float) -> list[tuple[str, str | None, float, float]]:
    return [(f"n{i}", f"n{(i - 1) // 2}" if i else None, rate, rate) for i in range(size)]


ONE_FLOW: Final = _tree(
    "one flow",
    "One sender, one receiver, 20 Mbit/s.",
    ("root", None, 20, 20),
    ("leaf", "root", 20, 20),
)
STAR: Final = _tree(
    "star of 4",
    "One sender of 40 Mbit/s, four receivers that could take more than their share.",
    ("root", None, 40, 40),
    *((f"leaf{i}", "root", 40, 40) for i in range(4)),
)
STAR_ONE_SLOW: Final = _tree(
    "star, one slow",
    "As before, but one receiver takes 6 Mbit/s only; the others share what it leaves.",
    ("root", None, 40, 40),
    ("slow", "root", 6, 6),
    *((f"leaf{i}", "root", 40, 40) for i in range(3)),
)
CHAIN: Final = _tree(
    "chain of 5",
    "Five machines of 20 Mbit/s in a row: data and acks share every line.",
    ("n0", None, 20, 20),
    *((f"n{i}", f"n{i - 1}", 20, 20) for i in range(1, 5)),
)
BINARY: Final = _tree(
    "binary tree 15",
    "Fifteen machines of 20 Mbit/s, two children each: every relay's uplink is full.",
    *_binary(15, 20),
)
MIXED: Final = _tree(
    "mixed tree 13",
    "Three relays with three children each, of all speeds; the uplinks of two relays are the"
    " bottleneck.",
    ("root", None, 40, 40),
    ("fast", "root", 40, 40),
    ("middling", "root", 24, 40),
    ("narrow", "root", 18, 20),
    *((f"fast{i}", "fast", 20, rate) for i, rate in enumerate((40, 20, 10))),
    *((f"middling{i}", "middling", 10, rate) for i, rate in enumerate((40, 20, 10))),
    *((f"narrow{i}", "narrow", 10, rate) for i, rate in enumerate((40, 20, 10))),
)

TOPOLOGIES: Final = (ONE_FLOW, STAR, STAR_ONE_SLOW, CHAIN, BINARY, MIXED)
