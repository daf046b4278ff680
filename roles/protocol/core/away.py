"""Which validators the trainer passes over for now: their lots fall to others.

The trainer sees which validators bring work and hears of those that leave workers waiting
(`roles.trainer.core.punctual`). What it says holds for everybody at once: worker, validator and
trainer derive the judge of a place from the same list (`assignment.validator_of`). Only lots of
those on the list change hands. Where a node has not heard it yet, its work is refused with "ask
another", and it asks again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, decode_peer_id_untrusted
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from roles.protocol.core.demand import MAX_NUMBER

MAX_AWAY: Final = 128
"""Validators that one statement names: 5 kB. Of a run that lacks more, the rest keep their
lots."""
REMEMBERED: Final = 8
"""Statements by which a judge may have been one: what it has judged is on its way."""


def away_topic(run: bytes) -> str:
    """The gossip topic on which a run's trainer says whom it passes over."""
    return f"/shoal/run/{run.hex()}/away"


@dataclass(frozen=True, slots=True)
class Away:
    """What the trainer says; the message is signed by gossip."""

    number: int
    """Of two statements the higher holds."""
    validators: tuple[PeerId, ...]

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack([self.number, [one.digest for one in self.validators]])


def decode_away_untrusted(data: bytes) -> Away:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    number, listed = fields_untrusted(unpack_untrusted(data), int, list, what="absence")
    if not 0 <= number <= MAX_NUMBER or len(listed) > MAX_AWAY:
        raise BadMessage("the number or the list of an absence is out of range")
    return Away(number, tuple(decode_peer_id_untrusted(one) for one in listed))
