"""What a trainer proposes for the run's next edition: whom to name no more, and why.

A file for the owner, who alone signs editions: it is JSON, to be read by a person first, and
``shoal run amend --proposal`` takes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId

MAX_PROPOSAL: Final = 512 * 1024
"""Bytes: 1,024 validators with a reason of a line each."""
MAX_DROPPED: Final = 1_024
"""Validators of a run (`roles.run.core.file.MAX_PEERS`)."""
MAX_WHY: Final = 300
"""Characters of a reason."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change to one edition."""

    run: bytes
    epoch: int
    """The edition that it is about."""
    drop: tuple[tuple[PeerId, str], ...]
    """Validators, each with what was found."""

    def to_bytes(self) -> bytes:
        """The file."""
        table = {
            "run": self.run.hex(),
            "epoch": self.epoch,
            "drop": [{"validator": str(peer), "why": why} for peer, why in self.drop],
        }
        return json.dumps(table, indent=1).encode() + b"\n"


def decode_proposal_untrusted(data: bytes) -> Proposal:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    if len(data) > MAX_PROPOSAL:
        raise BadMessage(f"a proposal has at most {MAX_PROPOSAL} bytes")
    try:
        table = json.loads(data)
        drop = tuple(
            (PeerId.from_base58(one["validator"]), str(one["why"])[:MAX_WHY])
            for one in table["drop"]
        )
        run, epoch = bytes.fromhex(table["run"]), table["epoch"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadMessage(f"it is not as a trainer writes it: {error!r:.80}") from None
    if type(epoch) is not int or len(drop) > MAX_DROPPED:
        raise BadMessage("its epoch or its list is out of bounds")
    return Proposal(run, epoch, drop)
