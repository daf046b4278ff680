"""The messages of ``/shoal/ledger/1.0.0``: what a node has of others' logs, and what it lacks.

A question says, for each author that its node follows, which entries of that log it has
(`Extent`), and whose forks it knows. The answer is what the other has beyond that: statements,
proofs of forks, and whether the one who asked has more. Both are one frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.identity import PeerId, ProtocolId, decode_peer_id_untrusted
from p2p.ledger.core.chain import (
    DIGEST_BYTES,
    DOMAIN,
    Statement,
    decode_fork_untrusted,
    decode_statement_untrusted,
)
from p2p.ledger.core.shelf import Extent, Span
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted

LEDGER_PROTOCOL: Final = ProtocolId(DOMAIN)
MAX_AUTHORS: Final = 256
"""Authors that a node follows: the first so many that its run names, trainers before
validators. Each costs 90 bytes of every question."""
MAX_SPANS: Final = 1024
"""Spans of consecutive numbers by which a question says what it has: one for an author whose
log has no holes, and one for each of its bans that is older."""
MAX_QUESTION: Final = 64 * KI
"""Bytes: `MAX_AUTHORS` rows of 125 at most, as many known forks of 36, and `MAX_SPANS` of 18 at
most."""
MAX_STATEMENTS: Final = 512
"""Statements of one answer; a verdict has some 600 bytes."""
ANSWER_BYTES: Final = 256 * KI
"""Bytes of statements and forks in an answer, of which the last may exceed it: at 10 s between
questions a node that was away catches up with 25 KB/s."""
MAX_ANSWER: Final = ANSWER_BYTES + 256 * KI
"""Bytes of an answer that is read: two of the longest forks beyond that."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the one who asks has."""

    extents: Mapping[PeerId, Extent]
    forked: Sequence[PeerId] = ()
    """Whose forks it knows: nothing more of them is wanted."""

    def to_bytes(self) -> bytes:
        """The wire form."""
        rows = [_row(author, extent) for author, extent in self.extents.items()]
        return pack([rows, [peer.digest for peer in self.forked]])


def _row(author: PeerId, extent: Extent) -> list[object]:
    ends = [end for span in extent.spans for end in span]
    numbers = (extent.floor, extent.low, extent.high)
    return [author.digest, extent.top, extent.digest, *numbers, ends]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the one who answers has beyond that."""

    statements: Sequence[Statement] = ()
    forks: Sequence[Equivocation[Statement]] = ()
    is_behind: bool = False
    """Whether the one who asked has something that the one who answers lacks."""
    size: int = field(default=0, compare=False)

    def to_bytes(self) -> bytes:
        """The wire form."""
        said = [statement.encode() for statement in self.statements]
        return pack([said, [fork.encode() for fork in self.forks], self.is_behind])


def decode_question_untrusted(data: bytes) -> Question:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    most = 10 * MAX_AUTHORS + 2 * MAX_SPANS + 4
    value = unpack_untrusted(data, max_items=most, max_list=2 * MAX_SPANS)
    rows, forked = fields_untrusted(value, list, list, what="question about ledgers")
    if len(rows) > MAX_AUTHORS or len(forked) > MAX_AUTHORS:
        raise BadMessage(f"a question is about {MAX_AUTHORS} ledgers at most")
    extents = dict(map(_row_untrusted, rows))
    return Question(extents, [decode_peer_id_untrusted(peer) for peer in forked])


def _row_untrusted(row: object) -> tuple[PeerId, Extent]:
    author, top, digest, floor, low, high, ends = fields_untrusted(
        row, *(bytes, int, bytes), *(int, int, int), list, what="extent of a ledger"
    )
    if len(digest) not in (0, DIGEST_BYTES):
        raise BadMessage("the extent of a ledger has a digest of the wrong size")
    if not all(-1 <= number < 2**63 for number in (top, floor, low, high)):
        raise BadMessage("the extent of a ledger has a number that is out of range")
    spans = _spans_untrusted(ends)
    extent = Extent(top, digest, floor, low, high, spans)
    return decode_peer_id_untrusted(author), extent


def _spans_untrusted(ends: list[object]) -> tuple[Span, ...]:
    """Ascending, so that they can be searched."""
    numbers = fields_untrusted(ends, *[int] * len(ends), what="row of entries")
    spans = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    before = -1
    for first, last in spans:
        if not before < first <= last < 2**63:
            raise BadMessage("the extent of a ledger names entries twice, or out of order")
        before = last
    if len(numbers) % 2:
        raise BadMessage("the extent of a ledger names entries by a first and a last")
    return spans


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
