"""The table of attacks; each module of this package adds its own to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from bench.hostile.raw import Attack

Run = Callable[[Attack], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of attack."""

    name: str
    about: str
    """Description of the attack in a sentence."""
    run: Run
    descriptors: int | None = None
    """Limit of open files that the node is started under, if the attack needs a low one."""
    honest: bool = False
    """True if the traffic is no attack: then the node must blame nobody."""


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
