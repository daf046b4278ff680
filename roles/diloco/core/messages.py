"""What members of a DiLoCo run say to each other, and what they sign.

Messages are msgpack lists that begin with their kind. A *statement* is a message with an author
and a signature over all of it, the run included. Of `Ready`, `Propose`, `Vote` and `Sum` a
member makes one for a step (and view): two that differ are proof against it, from any peer
(`Fault`). A `Promise` may be made again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self, TypeVar

from p2p.errors import BadMessage
from p2p.identity import (
    SIGNATURE_BYTES,
    PeerId,
    ProtocolId,
    Signer,
    Verify,
    decode_peer_id_untrusted,
)
from p2p.wire import MIB, fields_untrusted, pack, unpack_untrusted
from roles.diloco.core.pieces import DIGEST_BYTES, MAX_NORM, MAX_PIECES, MAX_RATE

PIECES_PROTOCOL: Final = ProtocolId("/shoal/diloco/1.0.0")
"""Streams: pieces of contributions, sums and states."""
ROUNDS_PROTOCOL: Final = ProtocolId("/shoal/diloco/rounds/3.0.0")
"""Messages: what members say and sign."""
DOMAIN: Final = "/shoal/diloco/1.0.0"
"""Of signatures."""
MAX_MEMBERS: Final = 64
"""At a time. All send pieces to all, so beyond some 16 sites connections, not bytes, are the
limit; a record has a signature of each."""
MAX_STEP: Final = 2**40
"""Outer steps and views stay exact in every reader."""
MAX_JOINERS: Final = 16
"""Of which a beat speaks: others are spoken of in another round."""
MAX_CHAIN: Final = 32
"""Records in one message, of at most 14 KB each."""
_MASK: Final = MAX_MEMBERS // 8
_ITEMS: Final = 640 * MAX_MEMBERS
"""Values in a message: a proposal carries a promise of each member, each with a plan."""
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""Where there is nothing to have a digest: what came before the first step."""

Signed_ = TypeVar("Signed_", bound="Statement")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step is to be: whose contributions are summed, and who is a member after it."""

    step: int
    """The step that it leads to."""
    previous: bytes
    """Digest of the record before."""
    contributors: tuple[tuple[PeerId, bytes], ...]
    """By id, each with the digest of its `Ready`."""
    members: tuple[PeerId, ...]
    """By id."""

    def __post_init__(self) -> None:
        names = [peer for peer, _ in self.contributors]
        for peers in (names, list(self.members)):
            if peers != sorted(set(peers)) or len(peers) > MAX_MEMBERS:
                raise ValueError(
                    f"a plan names each peer once, in order, {MAX_MEMBERS} at most"
                )
        if not self.members:
            raise ValueError("a plan leaves no member")

    @property
    def summed(self) -> tuple[PeerId, ...]:
        """Whose contributions."""
        return tuple(peer for peer, _ in self.contributors)

    @property
    def id(self) -> bytes:
        """What it is known by."""
        return hashlib.sha256(pack(self.to_wire())).digest()

    def to_wire(self) -> list[object]:
        """For msgpack."""
        return [
            self.step,
            self.previous,
            [[peer.digest, ready] for peer, ready in self.contributors],
            [peer.digest for peer in self.members],
        ]

    @classmethod
    def from_wire_untrusted(cls, value: object) -> Self:
        """Raise `BadMessage`."""
        step, previous, contributors, members = fields_untrusted(
            value, int, bytes, list, list, what="plan"
        )
        _check_numbers(step, least=1)
        _check_digests(previous)
        if not contributors:
            raise BadMessage("a plan sums somebody's contribution")
        pairs = [
            fields_untrusted(one, bytes, bytes, what="contributor") for one in contributors
        ]
        _check_digests(*(ready for _, ready in pairs))
        try:
            return cls(
                step,
                previous,
                tuple((decode_peer_id_untrusted(peer), ready) for peer, ready in pairs),
                tuple(decode_peer_id_untrusted(peer) for peer in members),
            )
        except ValueError as error:
            raise BadMessage(str(error)) from None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a vote is for, and a record of: a plan and what came of it."""

    plan: Plan
    sum_root: bytes
    """Digest of the digests of the mean's pieces."""
    state_root: bytes
    """Digest of weights and momentum after the step."""

    @property
    def digest(self) -> bytes:
        """What the record is known by: neither views nor who signed are part of it."""
        return hashlib.sha256(pack(self.to_wire())).digest()

    def to_wire(self) -> list[object]:
        """For msgpack."""
        return [self.plan.to_wire(), self.sum_root, self.state_root]

    @classmethod
    def from_wire_untrusted(cls, value: object) -> Self:
        """Raise `BadMessage`."""
        plan, sum_root, state_root = fields_untrusted(value, list, bytes, bytes, what="outcome")
        _check_digests(sum_root, state_root)
        return cls(Plan.from_wire_untrusted(plan), sum_root, state_root)


@dataclass(frozen=True, slots=True)
class Statement:
    """What a member signs. Two of one author and kind for one step and view must not differ."""

    KIND: ClassVar[int]
    FIELDS: ClassVar[tuple[type, ...]]

    step: int
    view: int
    author: PeerId = field(kw_only=True)
    signature: bytes = field(default=b"", kw_only=True, repr=False)

    def body(self) -> list[object]:
        """The fields behind kind, step and view."""
        raise NotImplementedError

    @property
    def slot(self) -> tuple[int, int, int, PeerId]:
        """Where there may be one."""
        return self.KIND, self.step, self.view, self.author

    @property
    def digest(self) -> bytes:
        """Of what is said; the signature is not part of it."""
        return hashlib.sha256(pack(self._said())).digest()

    def _said(self) -> list[object]:
        return [self.KIND, self.step, self.view, *self.body(), self.author.digest]

    def signed(self: Signed_, run: bytes, signer: Signer) -> Signed_:
        """With the author's signature."""
        signature = signer.sign(DOMAIN, pack([run, *self._said()]))
        return replace(self, signature=signature)

    def is_genuine(self, run: bytes, verify: Verify) -> bool:
        """Whether the author signed it."""
        return verify(self.author, DOMAIN, pack([run, *self._said()]), self.signature)

    def to_wire(self) -> list[object]:
        """For msgpack."""
        return [*self._said(), self.signature]


@dataclass(frozen=True, slots=True)
class Ready(Statement):
    """A contribution is there to be fetched. Its view is always 0: it stands for the step."""

    KIND: ClassVar[int] = 1
    FIELDS: ClassVar[tuple[type, ...]] = (bytes, int, float, bytes, bytes)

    previous: bytes
    """Digest of the record that the inner steps began from."""
    tokens: int
    """Learnt from."""
    rate: float
    """Bytes a second that this member sent lately, as it measured; 0 if it does not know."""
    norms: tuple[float, ...]
    """Of its pieces, as they decode."""
    digests: tuple[bytes, ...]
    """Of its pieces."""

    def body(self) -> list[object]:
        """See `Statement.body`."""
        norms = array("f", self.norms).tobytes()
        return [self.previous, self.tokens, self.rate, norms, b"".join(self.digests)]

    @classmethod
    def of_untrusted(cls, step: int, view: int, body: Sequence[Any], author: PeerId) -> Self:
        """Raise `BadMessage`."""
        previous, tokens, rate, norms, digests = body
        _check_digests(previous)
        _check_numbers(tokens, least=1)
        pieces = _split(digests)
        if len(norms) != 4 * len(pieces) or view:
            raise BadMessage("a contribution has a norm of each piece, and view 0")
        lengths = tuple(array("f", norms))
        if not 0 <= rate <= MAX_RATE or not all(0 <= one <= MAX_NORM for one in lengths):
            raise BadMessage(
                f"a contribution's rate is at most {MAX_RATE:g}, and each norm {MAX_NORM:g}"
            )
        return cls(step, view, previous, tokens, rate, lengths, pieces, author=author)


@dataclass(frozen=True, slots=True)
class Vote(Statement):
    """This member has computed the outcome, and signs it for one view."""

    KIND: ClassVar[int] = 2
    FIELDS: ClassVar[tuple[type, ...]] = (list,)

    outcome: Outcome

    def body(self) -> list[object]:
        """See `Statement.body`."""
        return [self.outcome.to_wire()]

    @classmethod
    def of_untrusted(cls, step: int, view: int, body: Sequence[Any], author: PeerId) -> Self:
        """Raise `BadMessage`."""
        outcome = Outcome.from_wire_untrusted(body[0])
        if outcome.plan.step != step:
            raise BadMessage("a vote is for another step than its plan's")
        return cls(step, view, outcome, author=author)


@dataclass(frozen=True, slots=True)
class Promise(Statement):
    """This member votes in no view below this one any more; its newest vote goes along."""

    KIND: ClassVar[int] = 3
    FIELDS: ClassVar[tuple[type, ...]] = (bytes, list, list)

    previous: bytes
    vote: Vote | None
    suspects: tuple[PeerId, ...] = ()
    """From whom it got nothing."""

    def body(self) -> list[object]:
        """See `Statement.body`."""
        vote = [] if self.vote is None else self.vote.to_wire()
        return [self.previous, vote, [peer.digest for peer in self.suspects]]

    @classmethod
    def of_untrusted(cls, step: int, view: int, body: Sequence[Any], author: PeerId) -> Self:
        """Raise `BadMessage`."""
        previous, vote, suspects = body
        _check_digests(previous)
        found: Vote | None = None
        if vote:
            carried = decode_statement_untrusted(vote)
            if not isinstance(carried, Vote) or (carried.author, carried.step) != (
                author,
                step,
            ):
                raise BadMessage("a promise carries a vote of its author for its step")
            found = carried
        peers = tuple(decode_peer_id_untrusted(one) for one in suspects[: MAX_MEMBERS + 1])
        if len(peers) > MAX_MEMBERS:
            raise BadMessage("a promise names too many suspects")
        return cls(step, view, previous, found, peers, author=author)


@dataclass(frozen=True, slots=True)
class Propose(Statement):
    """The plan of the member whose turn it is."""

    KIND: ClassVar[int] = 4
    FIELDS: ClassVar[tuple[type, ...]] = (list, list, list)

    plan: Plan
    carried: Outcome | None
    """What may have been decided in an earlier view, and is proposed again as it was."""
    promises: tuple[Promise, ...]
    """Of a majority, for this view; none for view 0."""

    def body(self) -> list[object]:
        """See `Statement.body`."""
        carried = [] if self.carried is None else self.carried.to_wire()
        return [self.plan.to_wire(), carried, [one.to_wire() for one in self.promises]]

    @classmethod
    def of_untrusted(cls, step: int, view: int, body: Sequence[Any], author: PeerId) -> Self:
        """Raise `BadMessage`."""
        plan = Plan.from_wire_untrusted(body[0])
        carried = Outcome.from_wire_untrusted(body[1]) if body[1] else None
        promises = tuple(decode_statement_untrusted(one) for one in body[2][: MAX_MEMBERS + 1])
        if len(promises) > MAX_MEMBERS or plan.step != step:
            raise BadMessage("a proposal is for another step, or has too many promises")
        if carried is not None and carried.plan != plan:
            raise BadMessage("a proposal carries the outcome of another plan")
        found = tuple(one for one in promises if isinstance(one, Promise))
        if len(found) < len(promises) or {(one.step, one.view) for one in found} - {
            (step, view)
        }:
            raise BadMessage("a proposal has promises for its step and view only")
        return cls(step, view, plan, carried, found, author=author)


@dataclass(frozen=True, slots=True)
class Sum(Statement):
    """What an owner's pieces of the mean have as digests."""

    KIND: ClassVar[int] = 5
    FIELDS: ClassVar[tuple[type, ...]] = (bytes, int, bytes)

    plan: bytes
    """The plan's id."""
    first: int
    """The first piece."""
    digests: tuple[bytes, ...]

    def has(self, index: int) -> bool:
        """Whether a piece is among these."""
        return self.first <= index < self.first + len(self.digests)

    def body(self) -> list[object]:
        """See `Statement.body`."""
        return [self.plan, self.first, b"".join(self.digests)]

    @classmethod
    def of_untrusted(cls, step: int, view: int, body: Sequence[Any], author: PeerId) -> Self:
        """Raise `BadMessage`."""
        plan, first, digests = body
        _check_digests(plan)
        pieces = _split(digests)
        if not 0 <= first <= MAX_PIECES - len(pieces):
            raise BadMessage(f"a vector has at most {MAX_PIECES} pieces")
        return cls(step, view, plan, first, pieces, author=author)


@dataclass(frozen=True, slots=True)
class Record:
    """A step that a majority of the members before it has signed."""

    KIND: ClassVar[int] = 6

    view: int
    outcome: Outcome
    signatures: tuple[tuple[PeerId, bytes], ...]

    @property
    def step(self) -> int:
        """The outer step."""
        return self.outcome.plan.step

    @property
    def members(self) -> tuple[PeerId, ...]:
        """After the step."""
        return self.outcome.plan.members

    @property
    def digest(self) -> bytes:
        """What the next plan names."""
        return self.outcome.digest

    def votes(self) -> tuple[Vote, ...]:
        """The statements that it is made of."""
        return tuple(
            Vote(self.step, self.view, self.outcome, author=peer, signature=signature)
            for peer, signature in self.signatures
        )

    def to_wire(self) -> list[object]:
        """For msgpack."""
        signatures = [[peer.digest, signature] for peer, signature in self.signatures]
        return [self.KIND, self.view, self.outcome.to_wire(), signatures]

    @classmethod
    def from_wire_untrusted(cls, value: object) -> Self:
        """Raise `BadMessage`."""
        kind, view, outcome, signatures = fields_untrusted(
            value, int, int, list, list, what="record"
        )
        _check_numbers(view)
        if kind != cls.KIND or len(signatures) > MAX_MEMBERS:
            raise BadMessage("a record is another message, or has too many signatures")
        pairs = [fields_untrusted(one, bytes, bytes, what="signature") for one in signatures]
        _check_signatures(*(one for _, one in pairs))
        found = tuple((decode_peer_id_untrusted(peer), one) for peer, one in pairs)
        if len({peer for peer, _ in found}) < len(found):
            raise BadMessage("a record has two signatures of one member")
        return cls(view, Outcome.from_wire_untrusted(outcome), found)


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a member is, and what it has of the round: peers send what it lacks."""

    KIND: ClassVar[int] = 7

    step: int
    """Of its newest record."""
    digest: bytes
    """Of that record: another run's members count for nothing."""
    held: int
    """Of the state that it has whole."""
    view: int
    readys: int = 0
    """Bit i: it has the contribution's head of member i of its record."""
    promises: int = 0
    """Bit i: it has member i's promise for its view."""
    votes: int = 0
    """Bit i: it has member i's vote in its view."""
    is_planned: bool = False
    """Whether it has the proposal of its view."""
    is_leaving: bool = False
    """Whether it wants to be a member no longer."""
    faults: int = 0
    """How many members it knows to have been convicted."""
    heard: int | None = None
    """Bit i: it hears member i of its record; None if it does not say."""
    leaving: int = 0
    """Bit i: member i said that it wants to leave."""
    joiners: tuple[PeerId, ...] = ()
    """Peers that it hears, and that hold the newest state and want to be members."""

    def to_wire(self) -> list[object]:
        """For msgpack."""
        masks = [one.to_bytes(_MASK, "big") for one in (self.readys, self.promises, self.votes)]
        heard = b"" if self.heard is None else self.heard.to_bytes(_MASK, "big")
        return [
            self.KIND, self.step, self.digest, self.held, self.view, *masks, self.is_planned,
            self.is_leaving, self.faults, heard, self.leaving.to_bytes(_MASK, "big"),
            [peer.digest for peer in self.joiners],
        ]  # fmt: skip

    @classmethod
    def of_untrusted(cls, fields: Sequence[Any]) -> Self:
        """Raise `BadMessage`."""
        step, digest, held, view, *three, planned, leaves, faults, heard, leaving, named = (
            fields
        )
        _check_numbers(step, view, faults)
        _check_digests(digest)
        lengths = {len(one) for one in (*three, leaving, heard or leaving)}
        if not -1 <= held <= step or lengths != {_MASK}:
            raise BadMessage("a beat holds a later state than its record, or odd masks")
        readys, promises, votes = (int.from_bytes(one, "big") for one in three)
        joiners = tuple(map(decode_peer_id_untrusted, named[: MAX_JOINERS + 1]))
        if len({*joiners}) < len(joiners) or len(joiners) > MAX_JOINERS:
            raise BadMessage(f"a beat names {MAX_JOINERS} joiners at most, each once")
        return cls(
            step, digest, held, view, readys, promises, votes, planned, leaves, faults,
            int.from_bytes(heard, "big") if heard else None, int.from_bytes(leaving, "big"),
            joiners,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chain:
    """Records, one after the other, for a peer that lacks them."""

    KIND: ClassVar[int] = 8

    records: tuple[Record, ...]

    def to_wire(self) -> list[object]:
        """For msgpack."""
        return [self.KIND, [one.to_wire() for one in self.records]]


@dataclass(frozen=True, slots=True)
class Doubled:
    """Two statements of one author where there may be one."""

    KIND: ClassVar[int] = 9

    one: Statement
    other: Statement

    @property
    def culprit(self) -> PeerId:
        """Who signed both."""
        return self.one.author

    def to_wire(self) -> list[object]:
        """For msgpack."""
        return [self.KIND, self.one.to_wire(), self.other.to_wire()]


@dataclass(frozen=True, slots=True)
class BadPart:
    """A piece that a contributor signed, and that is none."""

    KIND: ClassVar[int] = 10

    ready: Ready
    index: int
    piece: bytes

    @property
    def culprit(self) -> PeerId:
        """Who contributed it."""
        return self.ready.author

    def to_wire(self) -> list[object]:
        """For msgpack."""
        return [self.KIND, self.ready.to_wire(), self.index, self.piece]


@dataclass(frozen=True, slots=True)
class BadSum:
    """A sum that is not what the contributors' pieces give."""

    KIND: ClassVar[int] = 11

    told: Sum
    plan: Plan
    readys: tuple[Ready, ...]
    index: int
    parts: tuple[bytes, ...]
    """Of the plan's contributors, in order."""

    @property
    def culprit(self) -> PeerId:
        """Who summed it."""
        return self.told.author

    def to_wire(self) -> list[object]:
        """For msgpack."""
        readys = [one.to_wire() for one in self.readys]
        told, plan = self.told.to_wire(), self.plan.to_wire()
        return [self.KIND, told, plan, readys, self.index, list(self.parts)]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A piece of the mean that its owner signed, and that cannot be decoded."""

    KIND: ClassVar[int] = 12

    told: Sum
    index: int
    piece: bytes

    @property
    def culprit(self) -> PeerId:
        """Who signed it."""
        return self.told.author

    def to_wire(self) -> list[object]:
        """For msgpack."""
        return [self.KIND, self.told.to_wire(), self.index, self.piece]


Fault = Doubled | BadPart | BadSum | Unreadable
"""Evidence against a member that every other can judge by itself."""
RoundMessage = Statement | Record | Beat | Chain | Fault

_STATEMENTS: Final[dict[int, Any]] = {
    kind.KIND: kind for kind in (Ready, Vote, Promise, Propose, Sum)
}


def encode_message(message: RoundMessage) -> bytes:
    """For the wire."""
    return pack(message.to_wire())


def fits(message: RoundMessage) -> bool:
    """Whether it can be sent as a message."""
    return len(encode_message(message)) <= MIB


def decode_message_untrusted(data: bytes) -> RoundMessage:
    """Raise `BadMessage`, and nothing else, whatever the bytes. Signatures are judged by who
    needs them."""
    value = unpack_untrusted(data, max_items=_ITEMS, max_list=2 * MAX_MEMBERS, max_depth=9)
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        raise BadMessage("a message of a round is a list that begins with its kind")
    kind = value[0]
    if kind in _STATEMENTS:
        return decode_statement_untrusted(value)
    match kind:
        case Record.KIND:
            return Record.from_wire_untrusted(value)
        case Beat.KIND:
            kinds = (int, bytes, int, int, bytes, bytes, bytes, bool, bool, int)
            found = fields_untrusted(value[1:], *kinds, bytes, bytes, list, what="beat")
            return Beat.of_untrusted(found)
        case Chain.KIND:
            (records,) = fields_untrusted(value[1:], list, what="chain")
            if len(records) > MAX_CHAIN:
                raise BadMessage(f"a chain has at most {MAX_CHAIN} records")
            return Chain(tuple(map(Record.from_wire_untrusted, records)))
        case _:
            return _fault_untrusted(kind, value[1:])


def decode_statement_untrusted(value: object) -> Statement:
    """Raise `BadMessage`."""
    kind = value[0] if isinstance(value, list) and value else None
    found = _STATEMENTS.get(kind) if type(kind) is int else None
    if found is None:
        raise BadMessage("that is no statement of a round")
    _, step, view, *body, author, signature = fields_untrusted(
        value, int, int, int, *found.FIELDS, bytes, bytes, what="statement"
    )
    _check_numbers(step, least=1)
    _check_numbers(view)
    _check_signatures(signature)
    made: Statement = found.of_untrusted(step, view, body, decode_peer_id_untrusted(author))
    return replace(made, signature=signature)


def _fault_untrusted(kind: int, fields: list[Any]) -> Fault:
    match kind:
        case Doubled.KIND:
            one, other = fields_untrusted(fields, list, list, what="fault")
            found = Doubled(decode_statement_untrusted(one), decode_statement_untrusted(other))
            if found.one.slot != found.other.slot or found.one.digest == found.other.digest:
                raise BadMessage("two statements that may both be made are no fault")
            if isinstance(found.one, Promise):
                raise BadMessage("a promise may be made again")
            return found
        case BadPart.KIND:
            ready, index, piece = fields_untrusted(fields, list, int, bytes, what="fault")
            head = decode_statement_untrusted(ready)
            if not isinstance(head, Ready) or not 0 <= index < len(head.digests):
                raise BadMessage("a bad part is of a contribution")
            return BadPart(head, index, piece)
        case BadSum.KIND:
            return _bad_sum_untrusted(fields)
        case Unreadable.KIND:
            told, index, piece = fields_untrusted(fields, list, int, bytes, what="fault")
            total = decode_statement_untrusted(told)
            if not isinstance(total, Sum) or not total.has(index):
                raise BadMessage("what cannot be read is a piece of a sum")
            return Unreadable(total, index, piece)
    raise BadMessage(f"a message of a round has no kind {kind}")


def _bad_sum_untrusted(fields: list[Any]) -> BadSum:
    told, plan, readys, index, parts = fields_untrusted(
        fields, list, list, list, int, list, what="fault"
    )
    total = decode_statement_untrusted(told)
    heads = tuple(decode_statement_untrusted(one) for one in readys)
    found = tuple(one for one in heads if isinstance(one, Ready))
    if not isinstance(total, Sum) or len(found) < len(heads) or len(parts) != len(heads):
        raise BadMessage("a bad sum comes with its contributions")
    if not all(isinstance(one, bytes) for one in parts):
        raise BadMessage("a part is bytes")
    if not total.has(index):
        raise BadMessage("a bad sum is of a piece that it has")
    return BadSum(total, Plan.from_wire_untrusted(plan), found, index, tuple(parts))


def _split(digests: bytes) -> tuple[bytes, ...]:
    """Digests that lie end to end, at least one. Raise `BadMessage`."""
    if len(digests) % DIGEST_BYTES or not 0 < len(digests) <= MAX_PIECES * DIGEST_BYTES:
        raise BadMessage(f"there are digests of 1 to {MAX_PIECES} pieces")
    return tuple(digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))


def _check_numbers(*numbers: int, least: int = 0) -> None:
    for number in numbers:
        if not least <= number <= MAX_STEP:
            raise BadMessage(f"a number of a round is from {least} to 2^40, not {number!r:.40}")


def _check_signatures(*signatures: bytes) -> None:
    """Raise `BadMessage` unless all have the length of one: what is longer would stay in the
    records for ever."""
    for signature in signatures:
        if len(signature) != SIGNATURE_BYTES:
            raise BadMessage(f"a signature has {SIGNATURE_BYTES} bytes, not {len(signature)}")


def _check_digests(*digests: bytes) -> None:
    for digest in digests:
        if len(digest) != DIGEST_BYTES:
            raise BadMessage(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
