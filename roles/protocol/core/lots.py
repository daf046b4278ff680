"""Which of a worker's places are checked, and by whom: by a lot that falls after it committed.

Theory of operation
-------------------
A *window* is up to `MAX_WINDOW` consecutive places of one worker under one policy. The worker
signs the digests of their contents, all at once, with the number i of the newest link of the
trainer's beacon that it knows (`roles.protocol.core.beacon`). A *witness*, the validator that
`validator_of` names, signs it as well, while link i + 2 is not out by its own clock, and says
which share of the worker's places is to be checked.

When link i + 2 is out, the lot follows, for everybody the same::

    lot         = sha256(domain | window | link i + 2)
    place p     is drawn if  sha256(lot | p) as a fraction of one  is below the share
    its judges  are the first k validators in the order of  sha256(lot | p | validator)

Neither worker nor witness knows that link when it signs, and the trainer pledged it before. No
signature is hashed: a signer may choose among many. Drawn places are nested: what is drawn at a
share is drawn at every larger one. Where a validator leaves the run file, judges of other
places stay the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import (
    SIGNATURE_BYTES,
    PeerId,
    ProtocolId,
    Signer,
    Verify,
    decode_peer_id_untrusted,
)
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted
from roles.protocol.core.beacon import LINKS, MAX_CHAIN, HeardLinks
from roles.protocol.core.messages import (
    DIGEST_BYTES,
    MAX_INDEX,
    MAX_REASON,
    Commitment,
    Refusal,
)

COMMIT_PROTOCOL: Final = ProtocolId("/shoal/commit/1.0.0")
"""A worker asks its witness to sign a window. Also the domain of the worker's signature."""
WITNESS_DOMAIN: Final = "/shoal/witness/1.0.0"
NOTE_DOMAIN: Final = "/shoal/note/1.0.0"
LOT_PROTOCOL: Final = ProtocolId("/shoal/lot/1.0.0")
"""A worker offers a place: a drawn one to its judges, another to the trainer."""
SETTLE_PROTOCOL: Final = ProtocolId("/shoal/settle/1.0.0")
"""A witness tells the trainer of a window, a worker of the verdicts on its drawn places."""
MAX_WINDOW: Final = 16
"""Places: a commitment to as many has 800 bytes."""
DELAY: Final = 2
"""Links from the newest that a worker knows to the one that decides: one may be out that has
not reached it."""
UNIT: Final = 1 << 16
"""Parts of one that a share is counted in."""
MAX_COMMITMENT: Final = KI
"""Bytes of a window with its worker's signature."""
MAX_ASKED: Final = MAX_COMMITMENT + 256
"""The same with the trainer's note."""
MAX_WITNESSED: Final = KI + 256
"""The same with the witness's."""
_DOMAIN: Final = b"/shoal/lot/1.0.0"


@dataclass(frozen=True, slots=True)
class Window:
    """What a worker commits to."""

    run: bytes
    node: PeerId
    version: PolicyVersion
    policy: bytes
    first: int
    """The place of the first content."""
    contents: tuple[bytes, ...]
    """Digests, place after place."""
    teaching: int
    """Bit p: place ``first`` + p has a group whose rewards are not all the same."""
    rewards: bytes
    """Digest of all rewards as the worker computed them, float32 in order."""
    chain: int
    link: int
    """The newest link that the worker knew."""
    due: int
    """The policy under which it will work next; its own number is ``version``."""

    def to_bytes(self) -> bytes:
        """What is signed, and what the lot is drawn of."""
        return pack(
            [
                *(self.run, self.node.digest, self.version, self.policy),
                *(self.first, b"".join(self.contents), self.teaching, self.rewards),
                *(self.chain, self.link, self.due),
            ]
        )

    @property
    def places(self) -> range:
        """Which places these are."""
        return range(self.first, self.first + len(self.contents))

    def holds(self, commitment: Commitment) -> bool:
        """Whether this is one of its places, with the content committed to."""
        return (
            commitment.index in self.places
            and self.contents[commitment.index - self.first] == commitment.content
            and (self.run, self.node, self.version, self.policy)
            == (commitment.run, commitment.node, commitment.version, commitment.policy)
        )

    def teaches(self, index: int) -> bool:
        """Whether, by the worker's word, anything can be learnt from this place."""
        return bool(self.teaching >> (index - self.first) & 1)


def decode_window_untrusted(body: bytes) -> Window:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    run, node, version, policy, first, contents, teaching, rewards, chain, link, due = (
        fields_untrusted(
            unpack_untrusted(body),
            *(bytes, bytes, int, bytes, int, bytes, int, bytes, int, int, int),
            what="window",
        )
    )
    count, rest = divmod(len(contents), DIGEST_BYTES)
    if rest or not 0 < count <= MAX_WINDOW:
        raise BadMessage(f"a window has the digests of 1 to {MAX_WINDOW} places")
    if any(len(one) != DIGEST_BYTES for one in (run, policy, rewards)):
        raise BadMessage(f"a digest in a window is {DIGEST_BYTES} bytes")
    limits = (
        (version, MAX_INDEX),
        (first, MAX_INDEX - count),
        (teaching, (1 << count) - 1),
        (chain, MAX_CHAIN),
        (link, LINKS),
        (due, MAX_INDEX),
    )
    if any(not 0 <= number <= limit for number, limit in limits) or due <= version:
        raise BadMessage("a number of a window is out of range")
    digests = tuple(
        contents[at : at + DIGEST_BYTES] for at in range(0, len(contents), DIGEST_BYTES)
    )
    author = decode_peer_id_untrusted(node)
    return Window(
        *(run, author, PolicyVersion(version), policy, first, digests, teaching, rewards),
        *(chain, link, due),
    )


@dataclass(frozen=True, slots=True)
class SignedWindow:
    """A window, and its worker's signature."""

    window: Window
    signature: bytes

    @classmethod
    def sign(cls, window: Window, signer: Signer) -> SignedWindow:
        """In the worker's name."""
        return cls(window, signer.sign(COMMIT_PROTOCOL, window.to_bytes()))

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack([self.window.to_bytes(), self.signature])


def decode_signed_window_untrusted(data: bytes, verify: Verify) -> SignedWindow:
    """Raise `BadMessage` unless it is whole and its signature the worker's."""
    body, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="window")
    window = decode_window_untrusted(body)
    if window.to_bytes() != body:
        raise BadMessage("a window is not in its one form")
    if len(signature) != SIGNATURE_BYTES or not verify(
        window.node, COMMIT_PROTOCOL, body, signature
    ):
        raise BadMessage("a window's signature is not its node's")
    return SignedWindow(window, signature)


@dataclass(frozen=True, slots=True)
class WitnessedWindow:
    """A window that a witness took in time."""

    signed: SignedWindow
    witness: PeerId
    share: int
    """Of its places that are checked, in parts of `UNIT`."""
    signature: bytes

    @classmethod
    def sign(cls, signed: SignedWindow, share: float, signer: Signer) -> WitnessedWindow:
        """In the witness's name."""
        unsigned = cls(signed, signer.peer_id, parts_of(share), b"")
        signature = signer.sign(WITNESS_DOMAIN, unsigned.body())
        return cls(signed, signer.peer_id, unsigned.share, signature)

    @property
    def window(self) -> Window:
        """What was committed to."""
        return self.signed.window

    @property
    def digest(self) -> bytes:
        """Names it: two windows never share one."""
        return hashlib.sha256(self.window.to_bytes()).digest()

    def body(self) -> bytes:
        """What the witness signs."""
        return pack([self.signed.to_bytes(), self.witness.digest, self.share])

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack([self.body(), self.signature])


def parts_of(share: float) -> int:
    """A share in parts of `UNIT`, rounded up."""
    return min(UNIT, max(0, -int(-share * UNIT // 1)))


def decode_witnessed_untrusted(data: bytes, verify: Verify) -> WitnessedWindow:
    """Raise `BadMessage` unless it is whole and both signatures are right. Who should have
    been the witness is for the caller to know."""
    body, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="witness")
    raw, witness, share = fields_untrusted(
        unpack_untrusted(body), bytes, bytes, int, what="witnessed window"
    )
    if not 0 <= share <= UNIT:
        raise BadMessage(f"a share is from 0 to {UNIT}")
    author = decode_peer_id_untrusted(witness)
    if len(signature) != SIGNATURE_BYTES or not verify(author, WITNESS_DOMAIN, body, signature):
        raise BadMessage("a witness's signature is not its own")
    return WitnessedWindow(
        decode_signed_window_untrusted(raw, verify), author, share, signature
    )


@dataclass(frozen=True, slots=True)
class StandingNote:
    """What the trainer says of a worker's standing, for its witness: short-lived, so that none
    is called back."""

    run: bytes
    node: PeerId
    share: int
    """Of its places that are to be checked, in parts of `UNIT`."""
    chain: int
    link: int
    """It holds up to this link of that chain."""
    signature: bytes = b""

    def body(self) -> bytes:
        """What is signed."""
        return pack([self.run, self.node.digest, self.share, self.chain, self.link])

    def signed(self, signer: Signer) -> StandingNote:
        """In the trainer's name."""
        return replace(self, signature=signer.sign(NOTE_DOMAIN, self.body()))

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack([self.body(), self.signature])

    def share_at(self, window: Window) -> int:
        """The share that holds for ``window``: the whole, if the note is not for it."""
        is_for_it = (self.run, self.node, self.chain) == (
            window.run,
            window.node,
            window.chain,
        ) and window.link <= self.link
        return self.share if is_for_it else UNIT


def decode_note_untrusted(data: bytes, trainer: PeerId, verify: Verify) -> StandingNote:
    """Raise `BadMessage` unless it is whole and signed by ``trainer``."""
    body, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="note")
    run, node, share, chain, link = fields_untrusted(
        unpack_untrusted(body), bytes, bytes, int, int, int, what="note"
    )
    limits = ((share, UNIT), (chain, MAX_CHAIN), (link, LINKS))
    if len(run) != DIGEST_BYTES or any(not 0 <= one <= limit for one, limit in limits):
        raise BadMessage("a note's run or a number of it is out of range")
    if len(signature) != SIGNATURE_BYTES or not verify(trainer, NOTE_DOMAIN, body, signature):
        raise BadMessage("a note's signature is not the trainer's")
    return StandingNote(run, decode_peer_id_untrusted(node), share, chain, link, signature)


def encode_commit(signed: SignedWindow, note: bytes) -> bytes:
    """What a worker asks on `COMMIT_PROTOCOL`: with the trainer's note, or nothing."""
    return pack([signed.to_bytes(), note])


def decode_commit_untrusted(data: bytes, verify: Verify) -> tuple[SignedWindow, bytes]:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    raw, note = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="commitment")
    return decode_signed_window_untrusted(raw, verify), note


def encode_witness_reply(reply: WitnessedWindow | Refusal) -> bytes:
    """The answer on `COMMIT_PROTOCOL`."""
    if isinstance(reply, Refusal):
        return pack(["refused", pack([reply.reason, reply.retry])])
    return pack(["witnessed", reply.to_bytes()])


def decode_witness_reply_untrusted(data: bytes, verify: Verify) -> WitnessedWindow | Refusal:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    kind, body = fields_untrusted(unpack_untrusted(data), str, bytes, what="reply")
    if kind == "witnessed":
        return decode_witnessed_untrusted(body, verify)
    if kind != "refused":
        raise BadMessage(f"{kind[:20]!r} is no reply")
    reason, retry = fields_untrusted(unpack_untrusted(body), str, bool, what="refusal")
    return Refusal(reason[:MAX_REASON], retry)


class Lot:
    """What link i + 2 makes of a window."""

    def __init__(self, window: Window, link: bytes) -> None:
        self._seed = hashlib.sha256(_DOMAIN + window.to_bytes() + link).digest()
        self._places = window.places
        self._node = window.node

    def drawn(self, share: int) -> list[int]:
        """The places that are checked at a share, in parts of `UNIT`."""
        return [place for place in self._places if self._fraction(place) * UNIT < share]

    def judges(
        self,
        place: int,
        validators: Sequence[PeerId],
        count: int,
        *,
        never: Collection[PeerId] = (),
    ) -> list[PeerId]:
        """Who checks a drawn place: ``count`` of the ``validators``, all if they are fewer.

        Not the worker itself, nor who is in ``never``, such as who vouched for it.
        """
        able = [one for one in validators if one != self._node and one not in never]
        return sorted(able, key=lambda one: self._hash(place, one.digest))[:count]

    def _fraction(self, place: int) -> float:
        return int.from_bytes(self._hash(place)[:8], "big") / 2.0**64

    def _hash(self, place: int, of: bytes = b"") -> bytes:
        return hashlib.sha256(self._seed + place.to_bytes(8, "big") + of).digest()


def judges_now(
    lot: Lot,
    place: int,
    validators: Sequence[PeerId],
    count: int,
    away: Collection[PeerId],
) -> list[PeerId]:
    """Who checks a drawn place while some are ``away`` (`roles.protocol.core.away`): others
    take their turns. Where all are away, it is as good as if none were."""
    present = lot.judges(place, validators, count, never=away)
    return present or lot.judges(place, validators, count)


def lot_of(window: Window, beacon: HeardLinks) -> Lot | None:
    """The lot of a window; None while its link is not out, as far as is known."""
    link = beacon.link(window.chain, window.link + DELAY)
    return None if link is None else Lot(window, link)


def is_late(window: Window, beacon: HeardLinks, now: float) -> bool:
    """Whether its worker may know the lot by now, by this node's clock."""
    return beacon.may_be_out(window.chain, window.link + DELAY, now)


def is_early(window: Window, beacon: HeardLinks) -> bool:
    """Whether it names a link that cannot be known: one may be on its way here."""
    return window.link > beacon.newest[1] + 1
