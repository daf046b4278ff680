"""Who may do what: the run document, and invites for those whom it does not name.

A run is a document that its owner signed; what is in it is the business of the package that
registered its reader under the entry point group ``shoal.runs``. The node needs a name for the
run, a version to never roll back, and answers.

An invite is a line of text that admits so many identities to a run, until a day.

The owner of a run, or one of the *inviters* that its run file names, signs what an invite is
for: run, role, uses, expiry, and the public half of a key that is made for this invite alone.
The text that a volunteer gets has the secret half besides. Its node signs its own `PeerId` with
that, once, and forgets it: the result is a `Pass`, which says by two signatures who invited
whom. Everyone judges it offline, with nothing but the run file, and it is of no use to another
identity.

    owner --run file--> inviter --invite (text, secret)--> volunteer --pass (no secret)--> all

One key an invite, and not one a use: bearers of one text would have to agree on who takes
which. So uses are counted by who judges passes (`p2p.node.guests`): the first so many
identities that a node meets are in, for good. All members hear all heartbeats, so they count
the same ones; a text that is handed to too many at a time may have each count its own first.

Delegation is one step deep: an inviter is named by the owner's signature on an edition, and
cannot name others. Editions take back, too: an invite, or all of an inviter's. And as no node
can know when a pass was made, expiry ends what the invite admitted to, not only its use.

A heartbeat shows a *credential*: a place in the DHT, an invite, work for the run.

In an open run everybody may come who pays. The stamp of the DHT (`p2p.dht.stamp`) is what a
member pays, once for all runs. A run may ask those who submit work for another, its *work
stamp*: of as many bits as its owner likes, bound to the run and the identity, so that ten fresh
names cost ten stamps in each run. Whom the run file names, or an invite admits, pays neither.

A heartbeat has one field for all of it, with the stamp of the DHT alone in the form that it
always had.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Final, Protocol

from p2p.dht.stamp import NONCE_BYTES, SECONDS_PER_TRY, find_nonce, zero_bits
from p2p.errors import BadMessage
from p2p.identity import (
    SEED_BYTES,
    SIGNATURE_BYTES,
    KeyPair,
    PeerId,
    Signer,
    Verify,
    decode_peer_id_untrusted,
)
from p2p.wire import fields_untrusted, pack, unpack_untrusted


class UnusableEdition(BadMessage):
    """The run document is of no use here, and that is not the fault of the peer that handed it
    over.
    """


class OtherRun(UnusableEdition):
    """The document is of another run than the one this node is pinned to."""


class Capability(Enum):
    """What a peer may be allowed to do in a run."""

    GOSSIP = "gossip"
    """Be a member: its heartbeats and messages are passed on, it gets a place in the forest."""
    TRAIN = "train"
    """Be a member of a run whose members all train, if it admits them by rule."""
    GENERATE = "generate"
    """Submit rollouts."""
    VALIDATE = "validate"
    """Judge rollouts; its verdicts count."""
    PUBLISH = "publish"
    """Publish policies and collect accepted rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestRules:
    """What an edition says of those whom it does not name."""

    inviters: tuple[PeerId, ...] = ()
    """Who may invite besides the owner."""
    revoked: frozenset[str] = frozenset()
    """Ids of invites that admit nobody any more."""
    stamp_bits: int = 0
    """Bits of the work stamp that those must show who submit work; 0 asks for none."""


class SignedRun(Protocol):
    """A run as the node sees it. `roles.contract.Run` is one."""

    def may(self, peer: PeerId, capability: Capability) -> bool:
        """Whether ``peer`` has ``capability``, as of the newest document."""

    def needs_stamp(self, peer: PeerId) -> bool:
        """Whether ``peer`` must bring a work stamp: every peer may join, and the document does
        not name this one.
        """

    @property
    def id(self) -> bytes:
        """32 bytes that name the run for ever: a digest of its owner and its name."""

    @property
    def name(self) -> str:
        """What its owner calls it."""

    @property
    def owner(self) -> PeerId:
        """Whose signature the document bears."""

    @property
    def epoch(self) -> int:
        """Grows with every edition of the document; a node never goes back."""

    @property
    def expiry(self) -> int:
        """Seconds since 1970 after which the document is void."""

    @property
    def words(self) -> Sequence[tuple[str, str]]:
        """What the run is for and its recipe, for people: label and text."""

    @property
    def officers(self) -> tuple[PeerId, ...]:
        """Trainers and validators: every member sends them heartbeats, and finds them."""

    @property
    def document(self) -> bytes:
        """The signed document itself: what is pinned on disk and handed to newcomers."""

    @property
    def digest(self) -> bytes:
        """32 bytes of what its owner signed, however that is signed and encoded: two editions
        of one epoch with two digests prove that their owner contradicts himself.
        """

    @property
    def guest_rules(self) -> GuestRules:
        """Who may invite, which invites are void, and what work is asked for."""

    @property
    def joins_as(self) -> tuple[str, str]:
        """The role that others join with, and in words who of them may; empty if all may."""

    @property
    def components(self) -> dict[str, dict[str, object]]:
        """Settings that must be the same on every node, by component (``shardcast``), over the
        local ones.
        """


def check_same_owner(pin: SignedRun | None, owner: PeerId) -> None:
    """Raise `OtherRun` if a document of ``owner`` cannot be of the run that this node is pinned
    to.
    """
    if pin is not None and owner != pin.owner:
        raise OtherRun(f"it is of a run of another owner, {owner}; {_pinned(pin)}")


def check_same_run(pin: SignedRun | None, run_id: bytes, owner: PeerId, name: str) -> None:
    """Raise `OtherRun` if a document of this run is not of the one that this node is pinned
    to.
    """
    if pin is not None and run_id != pin.id:
        raise OtherRun(
            f"it is of run {name!r:.80} ({run_id.hex()[:12]}) by {owner}; {_pinned(pin)}"
        )


def _pinned(pin: SignedRun) -> str:
    return (
        f"this node is pinned to {pin.name!r} ({pin.id.hex()[:12]}) by {pin.owner}: use another"
        " --data, or a member of that run"
    )


class RunReader(Protocol):
    """Opens a signed run document. Raises `BadMessage`, and nothing else, whatever the
    bytes.
    """

    def __call__(
        self, document: bytes, verify: Verify, pin: SignedRun | None = None, /
    ) -> SignedRun:
        """Of a document that is not of the run of ``pin`` (None: of any) the reader judges as
        little as will show that, at most one signature, and raises `OtherRun`
        (`admission.check_same_run`).

        `UnusableEdition` says that a document is void for a reason that its bearer could not
        know: it was signed by the owner of ``pin``, or is of a format to come.
        """


INVITE_DOMAIN: Final = "/shoal/invite/1.0.0"
"""Domain of what the owner or an inviter signs."""
PASS_DOMAIN: Final = "/shoal/pass/1.0.0"
"""Domain of what the invite's own key signs."""
PREFIX: Final = "shoal-invite-1:"
"""Beginning of the text of an invite; the rest is base64 as in URLs."""
MAX_TEXT: Final = 1_024
"""Characters of the text; an invite of an inviter takes 350."""
MAX_PASS: Final = 288
"""Bytes of a pass; one of an inviter takes 237."""
MAX_USES: Final = 1_024
"""Identities of one invite: a class, a club. More people than that are an open run."""
MAX_EXPIRY: Final = 2**37
"""Seconds since 1970: the year 6325, as of run files."""
ID_CHARS: Final = 16
"""Characters of an invite's id: the head of its public key, by which it is taken back."""
EXPIRY_TOLERANCE: Final = 300.0
"""Seconds that an honest clock may be ahead of the inviter's."""

ROLES: Final[Mapping[str, frozenset[Capability]]] = {
    "relay": frozenset({Capability.GOSSIP}),
    "inference": frozenset({Capability.GOSSIP, Capability.GENERATE}),
    "trainer": frozenset({Capability.GOSSIP, Capability.TRAIN}),
}
"""What each role that can be invited may do. ``trainer``: of a run that pre-trains and admits
members; officers are named in the run file."""


class Uninvited(BadMessage):
    """The invite, or the pass made of it, does not admit; the message says why and what to
    do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What an invite is for, signed; the part of it that everybody may see."""

    inviter: PeerId
    """The run's owner, or one whom its run file lets invite."""
    role: str
    """One of `ROLES`."""
    uses: int
    """How many identities it admits."""
    expiry: int
    """Seconds since 1970 at which all that it admitted to ends."""
    key: PeerId
    """The public half of the invite's own key."""
    signature: bytes
    """The inviter's."""

    @property
    def id(self) -> str:
        """By what it is taken back."""
        return self.key.public_key.hex()[:ID_CHARS]

    @property
    def until(self) -> str:
        """Its end, for people."""
        return f"{datetime.fromtimestamp(self.expiry, UTC):%Y-%m-%d %H:%M} UTC"

    def body(self, run: bytes) -> bytes:
        """What is signed."""
        return pack(
            [run, self.inviter.digest, self.role, self.uses, self.expiry, self.key.digest]
        )


@dataclass(frozen=True, slots=True)
class Invite:
    """A grant with the secret that makes passes of it."""

    run: bytes
    grant: Grant
    secret: bytes

    def to_text(self) -> str:
        """One line, for a volunteer."""
        one = self.grant
        terms = [one.inviter.digest, one.role, one.uses, one.expiry]
        data = pack([self.run, *terms, self.secret, one.signature])
        return PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")

    def pass_for(self, peer: PeerId) -> Pass:
        """What ``peer`` shows to others."""
        signature = KeyPair(self.secret).sign(PASS_DOMAIN, _claim(self.run, peer))
        return Pass(self.grant, signature)


@dataclass(frozen=True, slots=True)
class Pass:
    """That the bearer of an invite is one identity, and no other."""

    grant: Grant
    signature: bytes
    """Of the invite's own key, over run and identity."""

    def to_bytes(self) -> bytes:
        """The form in heartbeats and on disk."""
        one = self.grant
        terms = [one.inviter.public_key, one.role, one.uses, one.expiry, one.key.public_key]
        return pack([*terms, one.signature, self.signature])

    def check(self, run: bytes, peer: PeerId, verify: Verify) -> None:
        """Raise `Uninvited` unless the inviter signed it for ``run``, and its bearer for
        ``peer``."""
        check_grant(self.grant, run, verify)
        if not verify(self.grant.key, PASS_DOMAIN, _claim(run, peer), self.signature):
            raise Uninvited(
                f"this pass was made for another identity than {peer}: a pass is its bearer's"
                " alone; start the node with --invite and the invite itself"
            )


def check_grant(grant: Grant, run: bytes, verify: Verify) -> None:
    """Raise `Uninvited` unless its inviter signed it for this run."""
    if not verify(grant.inviter, INVITE_DOMAIN, grant.body(run), grant.signature):
        raise Uninvited(
            "the invite is forged, altered, or of another run: its signature is not that of"
            f" {grant.inviter} for run {run.hex()[:12]}; ask the run's owner for an invite"
        )


def sign_invite(
    run: bytes, role: str, uses: int, expiry: int, secret: bytes, inviter: Signer
) -> Invite:
    """An invite to ``run``. ``secret`` is 32 random bytes, of no other use. Raises
    `ValueError`."""
    if role not in ROLES:
        raise ValueError(
            f"an invite is for one of the roles {', '.join(ROLES)}, not {role!r:.40}: the run"
            " file names trainers and validators"
        )
    if not 1 <= uses <= MAX_USES or not 0 < expiry <= MAX_EXPIRY:
        raise ValueError(f"an invite has 1 to {MAX_USES} uses, and an end")
    unsigned = Grant(
        inviter=inviter.peer_id,
        role=role,
        uses=uses,
        expiry=expiry,
        key=KeyPair(secret).peer_id,
        signature=b"",
    )
    signature = inviter.sign(INVITE_DOMAIN, unsigned.body(run))
    return Invite(run, replace(unsigned, signature=signature), secret)


def decode_invite_untrusted(text: str) -> Invite:
    """Raise `BadMessage`, and nothing else, whatever the text. No signature is judged."""
    line = text.strip()
    if len(line) > MAX_TEXT or not line.startswith(PREFIX):
        raise BadMessage(f"an invite is one line that begins with {PREFIX}")
    encoded = line[len(PREFIX) :]
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadMessage("the invite is cut off or garbled: copy the whole line") from None
    run, inviter, role, uses, expiry, secret, signature = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, str, int, int, bytes, bytes, what="invite"
    )
    # Bytes of a run's id.
    if len(run) != 32 or len(secret) != SEED_BYTES:
        raise BadMessage("the invite's run or secret has the wrong length")
    key = KeyPair(secret).peer_id
    author = decode_peer_id_untrusted(inviter)
    return Invite(run, _grant_untrusted(author, role, uses, expiry, key, signature), secret)


def decode_pass_untrusted(data: bytes) -> Pass:
    """Raise `BadMessage`, and nothing else, whatever the bytes. No signature is judged."""
    if len(data) > MAX_PASS:
        raise BadMessage(f"a pass has at most {MAX_PASS} bytes")
    inviter, role, uses, expiry, key, granted, claimed = fields_untrusted(
        unpack_untrusted(data), bytes, str, int, int, bytes, bytes, bytes, what="pass"
    )
    try:
        names = PeerId.from_public_key(inviter), PeerId.from_public_key(key)
    except ValueError as error:
        raise BadMessage(str(error)) from None
    if len(claimed) != SIGNATURE_BYTES:
        raise BadMessage(f"a pass has a signature of {SIGNATURE_BYTES} bytes")
    return Pass(_grant_untrusted(names[0], role, uses, expiry, names[1], granted), claimed)


def _grant_untrusted(
    inviter: PeerId, role: str, uses: int, expiry: int, key: PeerId, signature: bytes
) -> Grant:
    if role not in ROLES:
        raise BadMessage(f"{role[:20]!r} is no role that can be invited")
    if not 1 <= uses <= MAX_USES or not 0 < expiry <= MAX_EXPIRY:
        raise BadMessage("the uses or the expiry of an invite are out of range")
    if len(signature) != SIGNATURE_BYTES:
        raise BadMessage(f"an invite has a signature of {SIGNATURE_BYTES} bytes")
    return Grant(
        inviter=inviter, role=role, uses=uses, expiry=expiry, key=key, signature=signature
    )


def _claim(run: bytes, peer: PeerId) -> bytes:
    return pack([run, peer.digest])


MAX_SHOWN: Final = MAX_PASS + 2 * NONCE_BYTES + 16
"""Bytes of a credential: a pass, two nonces and framing."""
MAX_STAMP_BITS: Final = 40
"""Beyond six days on one core a work stamp is a mistake in the run file."""
TRIES: Final = 1 << 20
"""Nonces that are tried between two looks at the clock: half a second."""

_WORK_DOMAIN: Final = b"shoal-run-stamp:1.0.0"


@dataclass(frozen=True, slots=True)
class Credential:
    """The parts that there are; each is empty if the node needs none."""

    stamp: bytes = b""
    """The nonce of the DHT's stamp."""
    invite: bytes = b""
    """A `Pass`, encoded."""
    work: bytes = b""
    """The nonce of the run's work stamp."""

    def to_bytes(self) -> bytes:
        """The form in a heartbeat."""
        if not self.invite and not self.work:
            return self.stamp
        return pack([self.stamp, self.invite, self.work])


def decode_credential_untrusted(data: bytes) -> Credential:
    """Raise `BadMessage`, and nothing else, whatever the bytes. What the parts are worth is
    judged by others."""
    if len(data) <= NONCE_BYTES:
        return Credential(stamp=data)
    if len(data) > MAX_SHOWN:
        raise BadMessage(f"a credential has at most {MAX_SHOWN} bytes")
    stamp, invite, work = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, bytes, what="credential"
    )
    if max(len(stamp), len(work)) > NONCE_BYTES or len(invite) > MAX_PASS:
        raise BadMessage("a part of a credential is too long")
    return Credential(stamp, invite, work)


def work_untrusted(data: bytes) -> bytes:
    """The work stamp in what a peer shows; empty if there is none, whatever the bytes."""
    try:
        return decode_credential_untrusted(data).work
    except BadMessage:
        return b""


def work_bits(run: bytes, peer: PeerId, nonce: bytes) -> int:
    """How many zero bits the hash of a work stamp begins with; one hash."""
    if len(nonce) != NONCE_BYTES:
        return 0
    return zero_bits(_WORK_DOMAIN + run + peer.digest, nonce)


def work_cost(bits: int, tries: int | None = None) -> float:
    """CPU seconds that a work stamp takes on average, or so many tries of it."""
    expected = 1 << bits
    return SECONDS_PER_TRY * (expected if tries is None else min(expected, tries))


def find_work(run: bytes, peer: PeerId, bits: int, first: int) -> bytes:
    """The first nonce worth ``bits`` of the `TRIES` from ``first`` on, or nothing: a pure
    function, for a worker thread."""
    return find_nonce(_WORK_DOMAIN + run + peer.digest, bits, range(first, first + TRIES))
