"""Messages between the members of a DiLoCo run, and the statements that they sign.

Messages are msgpack lists that begin with their kind. How a field travels and is checked is
said with its type; what ties fields to each other is checked by `check`. A *statement* is a
message with an author and a signature over all of it, the run included. Of `Ready`, `Propose`,
`Vote` and `Sum` a member makes one for a step (and view): two that differ are proof against it,
from any peer (`Fault`). A `Promise` may be made again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar, get_type_hints

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
"""Signature domain of statements."""
MAX_MEMBERS: Final = 64
"""Members at a time. All send pieces to all, so beyond some 16 sites connections, not bytes,
are the limit; a record has a signature of each."""
MAX_STEP: Final = 2**40
"""Outer steps and views stay exact in every reader."""
MAX_JOINERS: Final = 16
"""Joiners that one beat names; the rest is named in another round."""
MAX_CHAIN: Final = 32
"""Records in one message, of at most 14 KB each."""
_MASK_BYTES: Final = MAX_MEMBERS // 8
_ITEMS: Final = 640 * MAX_MEMBERS
"""Values in a message: a proposal carries a promise of each member, each with a plan."""
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""The digest that stands for nothing: the first step has no step before it."""

Signed_ = TypeVar("Signed_", bound="Statement")


@dataclass(frozen=True, slots=True)
class Field:
    """A field on the wire: its msgpack type, how it is written, and how it is read and
    checked. `read` raises `BadMessage`."""

    kind: type
    write: Callable[[Any], object]
    read: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _number(least: int = 0) -> Field:
    def read(value: int) -> int:
        if not least <= value <= MAX_STEP:
            raise BadMessage(f"a number of a round is from {least} to 2^40, not {value!r:.40}")
        return value

    return Field(int, _same, read)


def _exactly(size: int, what: str) -> Field:
    def read(value: bytes) -> bytes:
        if len(value) != size:
            raise BadMessage(f"a {what} has {size} bytes, not {len(value)}")
        return value

    return Field(bytes, _same, read)


def _many(each: Field, most: int = MAX_MEMBERS) -> Field:
    def read(values: list[Any]) -> tuple[Any, ...]:
        if len(values) > most:
            raise BadMessage(f"a list of a round has {most} items at most, not {len(values)}")
        kinds = (each.kind,) * len(values)
        return tuple(map(each.read, fields_untrusted(values, *kinds, what="list of a round")))

    return Field(list, lambda values: [each.write(one) for one in values], read)


def _pair(first: Field, second: Field) -> Field:
    def read(value: list[Any]) -> tuple[Any, Any]:
        one, other = fields_untrusted(value, first.kind, second.kind, what="pair of a round")
        return first.read(one), second.read(other)

    return Field(list, lambda pair: [first.write(pair[0]), second.write(pair[1])], read)


def _optional(inner: Field) -> Field:
    """Return a field that may be None, written as an empty list or as empty bytes."""
    return Field(
        inner.kind,
        lambda value: inner.kind() if value is None else inner.write(value),
        lambda value: inner.read(value) if value else None,
    )


def _nested(cls: type[_Fielded]) -> Field:
    return Field(list, cls.to_wire, cls.from_wire_untrusted)


def split_digests(digests: bytes) -> tuple[bytes, ...]:
    """Return the digests that lie end to end in ``digests``. Raises `BadMessage`."""
    if len(digests) % DIGEST_BYTES or not 0 < len(digests) <= MAX_PIECES * DIGEST_BYTES:
        raise BadMessage(f"there are digests of 1 to {MAX_PIECES} pieces")
    return tuple(digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))


def _norms(data: bytes) -> tuple[float, ...]:
    norms = tuple(array("f", data[: len(data) // 4 * 4]))
    if len(data) % 4 or not all(0 <= one <= MAX_NORM for one in norms):
        raise BadMessage(f"each norm of a contribution is at most {MAX_NORM:g}, in four bytes")
    return norms


def _rate(value: float) -> float:
    if not 0 <= value <= MAX_RATE:
        raise BadMessage(f"a contribution's rate is at most {MAX_RATE:g}")
    return value


_DIGEST, _SIGNATURE = _exactly(DIGEST_BYTES, "digest"), _exactly(SIGNATURE_BYTES, "signature")
_PEER = Field(bytes, lambda peer: peer.digest, decode_peer_id_untrusted)
_BYTES = Field(bytes, _same, _same)
_MASK = Field(
    bytes,
    lambda mask: mask.to_bytes(_MASK_BYTES, "big"),
    lambda data: int.from_bytes(_exactly(_MASK_BYTES, "mask").read(data), "big"),
)
_STATEMENT = Field(
    list, lambda said: said.to_wire(), lambda value: decode_statement_untrusted(value)
)
_NORMS = Field(bytes, lambda norms: array("f", norms).tobytes(), _norms)
Step = Annotated[int, _number(1)]
Number = Annotated[int, _number()]
Flag = Annotated[bool, Field(bool, _same, _same)]
Mask = Annotated[int, _MASK]
Digest = Annotated[bytes, _DIGEST]
Digests = Annotated[tuple[bytes, ...], Field(bytes, b"".join, split_digests)]
Peers = Annotated[tuple[PeerId, ...], _many(_PEER)]
Piece = Annotated[bytes, _BYTES]


class _Fielded:
    """A dataclass that travels as a list of its fields, keywords last."""

    __slots__ = ()
    KIND: ClassVar[int] = 0
    """The first item of the list; 0: what is only part of messages has none."""

    def to_wire(self) -> list[object]:
        """Return the list for msgpack."""
        fields = [one.write(getattr(self, name)) for name, one in _table(type(self)).items()]
        return [self.KIND, *fields] if self.KIND else fields

    @classmethod
    def from_wire_untrusted(cls, value: Any) -> Self:
        """Return the message that a msgpack list from a peer holds.

        Raises:
            BadMessage: The list is not this message.
        """
        name, table = cls.__name__, _table(cls)
        if cls.KIND:
            if _kind_untrusted(value) != cls.KIND:
                raise BadMessage(f"that is no {name}")
            value = value[1:]
        found = fields_untrusted(value, *(one.kind for one in table.values()), what=name)
        try:
            made = cls(
                **{key: table[key].read(one) for key, one in zip(table, found, strict=True)}
            )
        except ValueError as error:
            raise BadMessage(str(error)) from None
        made.check()
        return made

    def check(self) -> None:
        """Check that the fields agree with each other.

        Raises:
            BadMessage: The fields contradict each other.
        """


_TABLES: Final[dict[type[Any], dict[str, Field]]] = {}


def _table(cls: type[Any]) -> dict[str, Field]:
    """Return how each field of a message travels, in order."""
    if cls not in _TABLES:
        hints = get_type_hints(cls, include_extras=True)
        names = sorted(fields(cls), key=lambda one: bool(one.kw_only))
        _TABLES[cls] = {one.name: hints[one.name].__metadata__[0] for one in names}
    return _TABLES[cls]


@dataclass(frozen=True, slots=True)
class Plan(_Fielded):
    """A proposed step: the contributions that are summed, and the members after the step."""

    step: Step
    """Outer step that the plan leads to."""
    previous: Digest
    """Digest of the record of the step before."""
    contributors: Annotated[tuple[tuple[PeerId, bytes], ...], _many(_pair(_PEER, _DIGEST))]
    """Peers whose contributions are summed, in order of their ids, each with the digest of its
    `Ready`."""
    members: Peers
    """Members after the step, in order of their ids."""

    def __post_init__(self) -> None:
        names = [peer for peer, _ in self.contributors]
        for peers in (names, list(self.members)):
            if peers != sorted(set(peers)) or len(peers) > MAX_MEMBERS:
                raise ValueError(
                    f"a plan names each peer once, in order, {MAX_MEMBERS} at most"
                )
        if not self.members:
            raise ValueError("a plan leaves no member")

    def check(self) -> None:
        if not self.contributors:
            raise BadMessage("a plan sums somebody's contribution")

    @property
    def summed(self) -> tuple[PeerId, ...]:
        """Peers whose contributions are summed."""
        return tuple(peer for peer, _ in self.contributors)

    @property
    def id(self) -> bytes:
        """Digest that names the plan."""
        return hashlib.sha256(pack(self.to_wire())).digest()


@dataclass(frozen=True, slots=True)
class Outcome(_Fielded):
    """A plan and its result. Votes and records are about an outcome."""

    plan: Annotated[Plan, _nested(Plan)]
    sum_root: Digest
    """Digest of the digests of the mean's pieces."""
    state_root: Digest
    """Digest of weights and momentum after the step."""

    @property
    def digest(self) -> bytes:
        """Digest that names the record: views and signers are not part of it."""
        return hashlib.sha256(pack(self.to_wire())).digest()


@dataclass(frozen=True, slots=True)
class Statement(_Fielded):
    """A signed message of a member. Two statements with the same author, kind, step and view
    must not differ."""

    step: Step
    view: Number
    author: Annotated[PeerId, _PEER] = field(kw_only=True)
    signature: Annotated[bytes, _SIGNATURE] = field(default=b"", kw_only=True, repr=False)

    @property
    def slot(self) -> tuple[int, int, int, PeerId]:
        """Kind, step, view and author: there may be one statement for each."""
        return self.KIND, self.step, self.view, self.author

    @property
    def digest(self) -> bytes:
        """Digest of the statement without its signature."""
        return hashlib.sha256(pack(self.to_wire()[:-1])).digest()

    def signed(self: Signed_, run: bytes, signer: Signer) -> Signed_:
        """Return the statement with its author's signature."""
        signature = signer.sign(DOMAIN, pack([run, *self.to_wire()[:-1]]))
        return replace(self, signature=signature)

    def is_genuine(self, run: bytes, verify: Verify) -> bool:
        """Return True if the author signed the statement."""
        return verify(self.author, DOMAIN, pack([run, *self.to_wire()[:-1]]), self.signature)


@dataclass(frozen=True, slots=True)
class Ready(Statement):
    """Announces that a contribution can be fetched. Its view is always 0: it stands for the
    whole step."""

    KIND = 1
    previous: Digest
    """Digest of the record that the inner steps began from."""
    tokens: Step
    """Number of tokens that the inner steps learnt from."""
    rate: Annotated[float, Field(float, _same, _rate)]
    """Bytes a second that this member sent lately, as it measured; 0 if it does not know."""
    norms: Annotated[tuple[float, ...], _NORMS]
    """Norms of the pieces, as they decode."""
    digests: Digests
    """Digests of the pieces."""

    def check(self) -> None:
        if len(self.norms) != len(self.digests) or self.view:
            raise BadMessage("a contribution has a norm of each piece, and view 0")


@dataclass(frozen=True, slots=True)
class Vote(Statement):
    """Says that this member has computed the outcome, and signs it for one view."""

    KIND = 2

    outcome: Annotated[Outcome, _nested(Outcome)]

    def check(self) -> None:
        if self.outcome.plan.step != self.step:
            raise BadMessage("a vote is for another step than its plan's")


@dataclass(frozen=True, slots=True)
class Promise(Statement):
    """Promises not to vote in an earlier view any more, with this member's newest vote."""

    KIND = 3

    previous: Digest
    vote: Annotated[Vote | None, _optional(_nested(Vote))]
    suspects: Peers = ()
    """Peers from which the author got nothing."""

    def check(self) -> None:
        vote = self.vote
        if vote is not None and (vote.author, vote.step) != (self.author, self.step):
            raise BadMessage("a promise carries a vote of its author for its step")


@dataclass(frozen=True, slots=True)
class Propose(Statement):
    """The plan of the member whose turn it is."""

    KIND = 4
    plan: Annotated[Plan, _nested(Plan)]
    carried: Annotated[Outcome | None, _optional(_nested(Outcome))]
    """The outcome that an earlier view may have decided, proposed again unchanged."""
    promises: Annotated[tuple[Promise, ...], _many(_nested(Promise))]
    """Promises of a majority for this view; none for view 0."""

    def check(self) -> None:
        if self.plan.step != self.step:
            raise BadMessage("a proposal is for another step than its plan's")
        if self.carried is not None and self.carried.plan != self.plan:
            raise BadMessage("a proposal carries the outcome of another plan")
        if any((one.step, one.view) != (self.step, self.view) for one in self.promises):
            raise BadMessage("a proposal has promises for its step and view only")


@dataclass(frozen=True, slots=True)
class Sum(Statement):
    """Digests of the pieces of the mean that one member owns and has summed."""

    KIND = 5

    plan: Digest
    """Id of the plan."""
    first: Number
    """Number of the first piece."""
    digests: Digests

    @property
    def span(self) -> range:
        """Numbers of the pieces that were summed."""
        return range(self.first, self.first + len(self.digests))

    def check(self) -> None:
        if self.first + len(self.digests) > MAX_PIECES:
            raise BadMessage(f"a vector has at most {MAX_PIECES} pieces")


@dataclass(frozen=True, slots=True)
class Record(_Fielded):
    """A step that a majority of the members before it has signed."""

    KIND = 6
    view: Number
    outcome: Annotated[Outcome, _nested(Outcome)]
    signatures: Annotated[tuple[tuple[PeerId, bytes], ...], _many(_pair(_PEER, _SIGNATURE))]

    def check(self) -> None:
        if len({peer for peer, _ in self.signatures}) < len(self.signatures):
            raise BadMessage("a record has two signatures of one member")

    @property
    def step(self) -> int:
        return self.outcome.plan.step

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Members after the step."""
        return self.outcome.plan.members

    @property
    def digest(self) -> bytes:
        """Digest of the outcome, which the next plan names."""
        return self.outcome.digest

    def votes(self) -> tuple[Vote, ...]:
        """Return the votes that the record is made of."""
        return tuple(
            Vote(self.step, self.view, self.outcome, author=peer, signature=signature)
            for peer, signature in self.signatures
        )


@dataclass(frozen=True, slots=True)
class Beat(_Fielded):
    """Tells where a member is and what it has of the round, so that peers send what it
    lacks."""

    KIND = 7
    step: Number
    """Step of the newest record that the member has."""
    digest: Digest
    """Digest of that record, so that beats of other runs count for nothing."""
    held: Annotated[int, _number(-1)]
    """Step of the newest state that the member has whole."""
    view: Number
    readys: Mask = 0
    """Bit i: it has the contribution's head of member i of its record."""
    promises: Mask = 0
    """Bit i: it has member i's promise for its view."""
    votes: Mask = 0
    """Bit i: it has member i's vote in its view."""
    is_planned: Flag = False
    """True if the member has the proposal of its view."""
    is_leaving: Flag = False
    """True if the member wants to leave."""
    faults: Number = 0
    """Number of members that the author knows to have been convicted."""
    heard: Annotated[int | None, _optional(_MASK)] = None
    """Bit i: it hears member i of its record; None if it does not say."""
    leaving: Mask = 0
    """Bit i: member i said that it wants to leave."""
    joiners: Annotated[tuple[PeerId, ...], _many(_PEER, MAX_JOINERS)] = ()
    """Peers that it hears, and that hold the newest state and want to be members."""

    def check(self) -> None:
        if self.held > self.step:
            raise BadMessage("a beat holds a later state than its record")
        if len({*self.joiners}) < len(self.joiners):
            raise BadMessage("a beat names each joiner once")


@dataclass(frozen=True, slots=True)
class Chain(_Fielded):
    """Records, one after the other, for a peer that lacks them."""

    KIND = 8

    records: Annotated[tuple[Record, ...], _many(_nested(Record), MAX_CHAIN)]


@dataclass(frozen=True, slots=True)
class Doubled(_Fielded):
    """Equivocation: two different statements of one author for the same slot."""

    KIND = 9

    one: Annotated[Statement, _STATEMENT]
    other: Annotated[Statement, _STATEMENT]

    def check(self) -> None:
        if self.one.slot != self.other.slot or self.one.digest == self.other.digest:
            raise BadMessage("two statements that may both be made are no fault")
        if isinstance(self.one, Promise):
            raise BadMessage("a promise may be made again")

    @property
    def culprit(self) -> PeerId:
        """The author of both statements."""
        return self.one.author


@dataclass(frozen=True, slots=True)
class BadPart(_Fielded):
    """Proof that a piece which a contributor signed does not decode, or has another norm than
    its `Ready` says."""

    KIND = 10

    ready: Annotated[Ready, _nested(Ready)]
    index: Number
    piece: Piece

    def check(self) -> None:
        if self.index >= len(self.ready.digests):
            raise BadMessage("a bad part is of a contribution")

    @property
    def culprit(self) -> PeerId:
        """The contributor of the piece."""
        return self.ready.author


@dataclass(frozen=True, slots=True)
class BadSum(_Fielded):
    """Proof that a sum is not what the contributors' pieces give."""

    KIND = 11

    told: Annotated[Sum, _nested(Sum)]
    plan: Annotated[Plan, _nested(Plan)]
    readys: Annotated[tuple[Ready, ...], _many(_nested(Ready))]
    index: Number
    parts: Annotated[tuple[bytes, ...], _many(_BYTES)]
    """Pieces of the plan's contributors, in order."""

    def check(self) -> None:
        if len(self.parts) != len(self.readys) or self.index not in self.told.span:
            raise BadMessage("a bad sum is of a piece that it has, with all contributions")

    @property
    def culprit(self) -> PeerId:
        """The member that summed."""
        return self.told.author


@dataclass(frozen=True, slots=True)
class Unreadable(_Fielded):
    """Proof that a piece of the mean which its owner signed cannot be decoded."""

    KIND = 12

    told: Annotated[Sum, _nested(Sum)]
    index: Number
    piece: Piece

    def check(self) -> None:
        if self.index not in self.told.span:
            raise BadMessage("what cannot be read is a piece of a sum")

    @property
    def culprit(self) -> PeerId:
        """The owner of the piece."""
        return self.told.author


Fault = Doubled | BadPart | BadSum | Unreadable
"""Evidence against a member that every other can judge by itself."""
RoundMessage = Statement | Record | Beat | Chain | Fault

_STATEMENTS: Final[Mapping[int, type[Statement]]] = {
    cls.KIND: cls for cls in (Ready, Vote, Promise, Propose, Sum)
}
_OTHERS: Final[Mapping[int, Any]] = {
    cls.KIND: cls for cls in (Record, Beat, Chain, Doubled, BadPart, BadSum, Unreadable)
}


def encode_message(message: RoundMessage) -> bytes:
    """Encode a message for the wire."""
    return pack(message.to_wire())


def fits(message: RoundMessage) -> bool:
    """Return True if the message is small enough to be sent."""
    return len(encode_message(message)) <= MIB


def decode_message_untrusted(data: bytes) -> RoundMessage:
    """Decode a peer's message. Signatures are checked by the callers that need them.

    Raises:
        BadMessage: The bytes are not a message. Nothing else is raised, whatever the bytes.
    """
    value = unpack_untrusted(data, max_items=_ITEMS, max_list=2 * MAX_MEMBERS, max_depth=9)
    kind = _kind_untrusted(value)
    if kind not in _OTHERS:
        return decode_statement_untrusted(value)
    made: RoundMessage = _OTHERS[kind].from_wire_untrusted(value)
    return made


def decode_statement_untrusted(value: object) -> Statement:
    """Return the statement that a msgpack value from a peer holds.

    Raises:
        BadMessage: The value is not a statement.
    """
    found = _STATEMENTS.get(_kind_untrusted(value))
    if found is None:
        raise BadMessage("that is no message of a round")
    return found.from_wire_untrusted(value)


def _kind_untrusted(value: Any) -> int:
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        raise BadMessage("a message of a round is a list that begins with its kind")
    kind: int = value[0]
    return kind
