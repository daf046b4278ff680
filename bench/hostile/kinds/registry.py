"""The table of attacks; each module of this package adds its own to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from bench.hostile.raw import Attack

Run = Callable[[Attack], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An attack."""

    name: str
    about: str
    """What the attacker does, in a sentence."""
    run: Run
    descriptors: int | None = None
    """The limit of open files that the node is started under, if the attack needs a low one."""
    honest: bool = False
    """True if nothing of it is an attack: then the node is to blame nobody."""


KINDS: Final[dict[str, Kind]] = {}


def kind(
    about: str, *, descriptors: int | None = None, honest: bool = False
) -> Callable[[Run], Run]:
    """Register an attack under its function's name."""

    def register(run: Run) -> Run:
        name = run.__name__.replace("_", "-")
        KINDS[name] = Kind(
            name=name, about=about, run=run, descriptors=descriptors, honest=honest
        )
        return run

    return register
