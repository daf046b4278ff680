"""Kinds of entries that the roles write to their nodes' ledgers, and how each is read.

A role's entry means something to others only if they can read it without the role. So the kinds
stand here, and a reader that meets one that it does not know passes over it.

| kind | who | body |
|---|---|---|
| `verdict` | a validator | `SignedVerdict` |
| `earned` | a worker | the same, on its own accepted work: what receipts are made of |
| `receipt` | a trainer | the digest of the commitment of a place that it took |
| `learnt` | a trainer | `Learnt`: how much of whose work a step has learnt from |
| `ban` | a trainer | a worker that it banned, and the digest of the proof on its disk |
| `lie` | a trainer | a validator that signed a lie, and the digest of the proof |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, decode_peer_id_untrusted
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from roles.protocol.core.work import Work, decode_work_untrusted

VERDICT_KIND: Final = "verdict"
EARNED_KIND: Final = "earned"
RECEIPT_KIND: Final = "receipt"
LEARNT_KIND: Final = "learnt"
LIE_KIND: Final = "lie"
BAN_KIND: Final = "ban"
MOST_NODES: Final = 256
"""Most nodes of one entry: 75 bytes each, a third of what an entry holds. A step with more
nodes has several entries."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """A step of the optimiser, and the authors of the work in it. The later of two entries for
    one step counts, since a trainer whose engine died repeats the steps since its checkpoint.
    """

    step: int
    part: int = 0
    """Index of this entry among the step's; each has other nodes."""
    work: Mapping[PeerId, Work] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the ledger form."""
        rows = [[node.digest, list(astuple(work))] for node, work in self.work.items()]
        return pack([self.step, self.part, rows])


def learnt_parts(step: int, work: Mapping[PeerId, Work]) -> list[bytes]:
    """Return the bodies of the entries of ``step``: one, unless very many nodes have a
    share."""
    rows = list(work.items())
    starts = range(0, max(1, len(rows)), MOST_NODES)
    return [
        Learnt(step, part, dict(rows[start : start + MOST_NODES])).to_bytes()
        for part, start in enumerate(starts)
    ]


def encode_accusation(accused: PeerId, proof: bytes) -> bytes:
    """Return the ledger's form of an accusation: the accused peer and the digest of the
    proof."""
    return pack([accused.digest, proof])


def decode_accusation_untrusted(data: bytes) -> tuple[PeerId, bytes]:
    """Decode an accusation. Return the accused peer and the digest of the proof.

    Raises:
        BadMessage: The bytes are not an accusation.
    """
    accused, proof = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="accusation")
    return decode_peer_id_untrusted(accused), proof


def decode_learnt_untrusted(data: bytes) -> Learnt:
    """Decode a `Learnt`. Raises `BadMessage`, and nothing else, whatever the bytes."""
    unpacked = unpack_untrusted(data, max_items=7 * MOST_NODES + 4, max_list=MOST_NODES)
    step, part, rows = fields_untrusted(unpacked, int, int, list, what="learnt step")
    work: dict[PeerId, Work] = {}
    for row in rows:
        node, counts = fields_untrusted(row, bytes, list, what="share of a learnt step")
        work[decode_peer_id_untrusted(node)] = decode_work_untrusted(counts)
    if min(step, part) < 0 or len(work) != len(rows):
        raise BadMessage("a learnt step names a node twice, or is below 0")
    return Learnt(step, part, work)
