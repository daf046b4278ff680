"""Strangers who join a swarm on this machine: their names, their rows, and a welcome each.

Pure: a guest is whoever the swarm's nodes know in this run and this command did not start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from roles.demo.status import Guest, SwarmStatus

MOST: Final = 64
"""Guests who are welcomed, and who are thanked: identities cost little, and each is a line. The
others are in the table."""


@dataclass(slots=True)
class Doorbell:
    """What to say of guests, each thing once."""

    _greeted: dict[str, None] = field(default_factory=dict)
    _thanked: dict[str, None] = field(default_factory=dict)

    def news(self, status: SwarmStatus) -> Iterator[str]:
        """A sentence for each guest that is new, and for each first work that was accepted."""
        for guest in status.guests:
            if guest.peer not in self._greeted and len(self._greeted) < MOST:
                self._greeted[guest.peer] = None
                yield f"welcome, {guest.name}: {_joined(guest)}"
            is_new = guest.peer not in self._thanked and len(self._thanked) < MOST
            if guest.accepted and is_new:
                self._thanked[guest.peer] = None
                rollouts = guest.accepted * status.completions
                yield f"thank you, {guest.name}: your first {rollouts:,} rollouts are accepted"


def _joined(guest: Guest) -> str:
    if "inference" in guest.roles:
        return "your work counts as soon as the validator has judged it"
    jobs = ", ".join(guest.roles) or "a relay"
    return f"you are here as {jobs}, and pass the weights on"
