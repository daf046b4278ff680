"""The messages of ``/shoal/ledger/1.0.0``: what a node has of others' logs, and what it lacks.

A question says, for each author that its node follows, how far it has that log (number and
digest of the newest entry) and which lasting entries, in short; and whose forks it knows. The
answer is what the other has beyond that: statements, proofs of forks, and whether the one who
asked has more. Both are one frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, ProtocolId, decode_peer_id_untrusted
from p2p.ledger.core.chain import (
    DIGEST_BYTES,
    DOMAIN,
    LedgerFork,
    Statement,
    decode_fork_untrusted,
    decode_statement_untrusted,
)
from p2p.ledger.core.shelf import PRINT_BYTES
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted

LEDGER_PROTOCOL: Final = ProtocolId(DOMAIN)
MAX_AUTHORS: Final = 256
"""Authors that a node follows: the first so many that its run names, trainers before
validators. Each costs 90 bytes of every question."""
MAX_QUESTION: Final = 32 * KI
"""Bytes: `MAX_AUTHORS` rows of 90, and as many known forks of 40 would not fit, of which there
are few."""
MAX_STATEMENTS: Final = 512
"""Statements of one answer; a verdict has some 600 bytes."""
ANSWER_BYTES: Final = 256 * KI
"""Bytes of statements and forks in an answer, of which the last may exceed it: at 10 s between
questions a node that was away catches up with 25 KB/s."""
MAX_ANSWER: Final = ANSWER_BYTES + 256 * KI
"""Bytes of an answer that is read: two of the longest forks beyond that."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a node has an author's log."""

    top: int = -1
    digest: bytes = b""
    """Of entry ``top``."""
    lasting: bytes = b""
    """`Shelf.fingerprint`."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the one who asks has."""

    extents: Mapping[PeerId, Extent]
    forked: Sequence[PeerId] = ()
    """Whose forks it knows: nothing more of them is wanted."""

    def to_bytes(self) -> bytes:
        """The wire form."""
        rows = [[one.digest, x.top, x.digest, x.lasting] for one, x in self.extents.items()]
        return pack([rows, [peer.digest for peer in self.forked]])


@dataclass(frozen=True, slots=True)
class Answer:
    """What the one who answers has beyond that."""

    statements: Sequence[Statement] = ()
    forks: Sequence[LedgerFork] = ()
    is_behind: bool = False
    """Whether the one who asked has something that the one who answers lacks."""
    size: int = field(default=0, compare=False)

    def to_bytes(self) -> bytes:
        """The wire form."""
        said = [statement.encode() for statement in self.statements]
        return pack([said, [fork.encode() for fork in self.forks], self.is_behind])


def decode_question_untrusted(data: bytes) -> Question:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    value = unpack_untrusted(data, max_items=6 * MAX_AUTHORS + 4, max_list=MAX_AUTHORS)
    rows, forked = fields_untrusted(value, list, list, what="question about ledgers")
    extents = {}
    for row in rows:
        author, top, digest, lasting = fields_untrusted(
            row, bytes, int, bytes, bytes, what="extent of a ledger"
        )
        if not -1 <= top < 2**63 or len(digest) not in (0, DIGEST_BYTES):
            raise BadMessage("the extent of a ledger has a number or digest of the wrong size")
        if len(lasting) != PRINT_BYTES:
            raise BadMessage(
                f"the lasting entries of a ledger are named by {PRINT_BYTES} bytes"
            )
        extents[decode_peer_id_untrusted(author)] = Extent(top, digest, lasting)
    return Question(extents, [decode_peer_id_untrusted(peer) for peer in forked])


def decode_answer_untrusted(data: bytes) -> Answer:
    """Raise `BadMessage`, and nothing else, whatever the bytes. No signature is judged here."""
    most = MAX_STATEMENTS + MAX_AUTHORS
    value = unpack_untrusted(data, max_items=most + 8, max_list=MAX_STATEMENTS)
    said, forks, is_behind = fields_untrusted(
        value, list, list, bool, what="answer about ledgers"
    )
    if not all(isinstance(item, bytes) for item in (*said, *forks)):
        raise BadMessage("an answer about ledgers carries statements as bytes")
    return Answer(
        [decode_statement_untrusted(item) for item in said],
        [decode_fork_untrusted(item) for item in forks],
        is_behind,
        len(data),
    )
