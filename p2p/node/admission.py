"""Admission: what each peer may do, by the run document, invites and work stamps.

A run document is signed by its owner. Its content belongs to the package that registered its
reader under the entry point group ``shoal.runs``. The node needs a name for the run, a version
that never goes back, and answers.

An invite is a line of text that admits a number of identities to a run until a day. The owner,
or one of the *inviters* that the run file names, signs its purpose: run, role, uses, expiry,
and the public half of a key that is made for this invite alone. The text for the volunteer also
has the secret half. The volunteer's node signs its own `PeerId` with the secret once and
forgets it. The result is a `Pass`: two signatures that say who invited whom. Everybody judges
it offline with the run file, and it is useless to another identity.

    owner --run file--> inviter --invite (text, secret)--> volunteer --pass (no secret)--> all

An invite has one key, not one for each use: bearers of one text would have to agree on who
takes which. Therefore each judge of passes counts uses (`p2p.node.guests`): the first
identities that a node meets are in for good. All members hear all heartbeats and so count the
same ones; if a text is handed to too many at a time, nodes may count different ones first.

Delegation is one step deep: inviters are named by the owner's signature on an edition, and
cannot name others. A later edition can revoke an invite, or all invites of an inviter. Nobody
can know when a pass was made, so expiry ends what the invite admitted to, not only its use.

A heartbeat shows a *credential*: the stamp of the DHT, a pass, and a work stamp, each of which
may be missing. In an open run every peer may join that pays. A member pays with the stamp of
the DHT (`p2p.dht.stamp`), once for all runs. A run may demand a *work stamp* from those who
submit work, with the number of bits that its owner chose, bound to run and identity: ten fresh
names cost ten stamps in each run. Peers that the run file names or an invite admits pay
neither. A credential of a DHT stamp alone has the form that it always had.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Final, Protocol

from p2p.dht.stamp import NONCE_BYTES, find_nonce, zero_bits
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
    """The run document cannot be used here, through no fault of the peer that sent it."""


class OtherRun(UnusableEdition):
    """The document belongs to another run than the one this node is pinned to."""


class Capability(Enum):
    """Permissions of a peer in a run."""

    GOSSIP = "gossip"
    """Be a member: its heartbeats and messages are passed on, and the forest has a place for
    it."""
    TRAIN = "train"
    """Train in a run whose members all train, if the run admits them by rule."""
    GENERATE = "generate"
    """Submit rollouts."""
    VALIDATE = "validate"
    """Judge rollouts with verdicts that count."""
    PUBLISH = "publish"
    """Publish policies and collect accepted rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestRules:
    """Rules of a run document for peers that it does not name."""

    inviters: tuple[PeerId, ...] = ()
    """Peers that may invite besides the owner."""
    revoked: frozenset[str] = frozenset()
    """Ids of revoked invites."""
    stamp_bits: int = 0
    """Bits of the work stamp that peers need to submit work; 0 if they need none."""


class SignedRun(Protocol):
    """Run as the node sees it. `roles.contract.Run` implements it."""

    def may(self, peer: PeerId, capability: Capability) -> bool:
        """Return True if ``peer`` has ``capability`` in the newest run document."""

    def needs_stamp(self, peer: PeerId) -> bool:
        """Return True if ``peer`` must show a work stamp. Peers that the document names need
        none, nor does any peer in a run that not every peer may join."""

    @property
    def id(self) -> bytes:
        """Id of the run, 32 bytes: a digest of its owner and its name."""

    @property
    def name(self) -> str:
        """Name of the run."""

    @property
    def owner(self) -> PeerId:
        """Peer id of the owner, who signs the document."""

    @property
    def epoch(self) -> int:
        """Epoch of the document. A node never returns to a lower one."""

    @property
    def expiry(self) -> int:
        """Seconds since 1970 after which the document is void."""

    @property
    def words(self) -> Sequence[tuple[str, str]]:
        """Pairs of label and text that describe the run's purpose and recipe to people."""

    @property
    def officers(self) -> tuple[PeerId, ...]:
        """Trainers and validators. Every member finds them and sends them heartbeats."""

    @property
    def document(self) -> bytes:
        """Signed document as pinned on disk and sent to newcomers."""

    @property
    def digest(self) -> bytes:
        """Digest of the signed content, 32 bytes, whatever its encoding. Two documents of one
        epoch with different digests prove equivocation."""

    @property
    def guest_rules(self) -> GuestRules:
        """Rules for peers that the document does not name."""

    @property
    def joins_as(self) -> tuple[str, str]:
        """Role with which others join, and a description of who may; the latter is empty if all
        may."""

    @property
    def components(self) -> dict[str, dict[str, object]]:
        """Settings that are equal on every node, by component (``shardcast``). They override
        local ones."""


def check_same_owner(pin: SignedRun | None, owner: PeerId) -> None:
    """Raise `OtherRun` if a document of ``owner`` cannot belong to the run of ``pin``."""
    if pin is not None and owner != pin.owner:
        raise OtherRun(f"it is of a run of another owner, {owner}; {_pinned(pin)}")


def check_same_run(pin: SignedRun | None, run_id: bytes, owner: PeerId, name: str) -> None:
    """Raise `OtherRun` if a document does not belong to the run of ``pin``."""
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
    """Opens a signed run document. Raises only `BadMessage`, whatever the bytes."""

    def __call__(
        self, document: bytes, verify: Verify, pin: SignedRun | None = None, /
    ) -> SignedRun:
        """Open a document, which must belong to the run of ``pin`` if that is given.

        For a document of another run the reader verifies at most one signature and raises
        `OtherRun` (`admission.check_same_run`). It raises `UnusableEdition` for a document that
        is void for a reason that its bearer could not know: the owner of ``pin`` signed it, or
        it has a future format.
        """


INVITE_DOMAIN: Final = "/shoal/invite/1.0.0"
"""Signature domain of grants."""
PASS_DOMAIN: Final = "/shoal/pass/1.0.0"
"""Signature domain of passes."""
PREFIX: Final = "shoal-invite-1:"
"""Beginning of the text of an invite; the rest is base64 as in URLs."""
MAX_PASS: Final = 288
"""Maximum bytes of a pass. That of an inviter takes 237."""
MAX_USES: Final = 1_024
"""Maximum number of identities that one invite admits: a class or a club. Larger groups should
use an open run."""
ID_CHARS: Final = 16
"""Number of characters in an invite's id. The id is the beginning of its public key, and is
used to revoke it."""
EXPIRY_TOLERANCE: Final = 300.0
"""Seconds by which an honest clock may be ahead of that of an owner or inviter."""

ROLES: Final[Mapping[str, frozenset[Capability]]] = {
    "relay": frozenset({Capability.GOSSIP}),
    "inference": frozenset({Capability.GOSSIP, Capability.GENERATE}),
    "trainer": frozenset({Capability.GOSSIP, Capability.TRAIN}),
}
"""Capabilities of each role that an invite can give. ``trainer`` is for pre-training runs that
admit members; other trainers and validators are named in the run file."""


class Uninvited(BadMessage):
    """The invite or pass does not admit its bearer. The message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Public, signed part of an invite."""

    inviter: PeerId
    """The run's owner, or an inviter that the run file names."""
    role: str
    """Name of a role in `ROLES`."""
    uses: int
    """Number of identities that the invite admits."""
    expiry: int
    """Time in seconds since 1970 at which admissions by the invite end."""
    key: PeerId
    """Public half of the invite's own key."""
    signature: bytes
    """Signature of the inviter."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(
                f"an invite is for one of the roles {', '.join(ROLES)}, not {self.role!r:.40}:"
                " the run file names trainers and validators"
            )
        # The end is before the year 6325, as in run files.
        if not 1 <= self.uses <= MAX_USES or not 0 < self.expiry <= 2**37:
            raise ValueError(f"an invite has 1 to {MAX_USES} uses, and an end")

    @property
    def id(self) -> str:
        """Id used to revoke the invite."""
        return self.key.public_key.hex()[:ID_CHARS]

    @property
    def until(self) -> str:
        """Expiry as text for people."""
        return f"{datetime.fromtimestamp(self.expiry, UTC):%Y-%m-%d %H:%M} UTC"

    def body(self, run: bytes) -> bytes:
        """Return the bytes that are signed."""
        return pack(
            [run, self.inviter.digest, self.role, self.uses, self.expiry, self.key.digest]
        )


@dataclass(frozen=True, slots=True)
class Invite:
    """Grant with the secret that makes passes from it."""

    run: bytes
    grant: Grant
    secret: bytes

    def to_text(self) -> str:
        """Return the line of text for a volunteer."""
        one = self.grant
        terms = [one.inviter.digest, one.role, one.uses, one.expiry]
        data = pack([self.run, *terms, self.secret, one.signature])
        return PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")

    def pass_for(self, peer: PeerId) -> Pass:
        """Make the pass of ``peer``."""
        signature = KeyPair(self.secret).sign(PASS_DOMAIN, _claim(self.run, peer))
        return Pass(self.grant, signature)


@dataclass(frozen=True, slots=True)
class Pass:
    """Proof that one identity holds an invite."""

    grant: Grant
    signature: bytes
    """Signature of the invite's own key over run and identity."""

    def to_bytes(self) -> bytes:
        """Return the pass as sent in heartbeats and kept on disk."""
        one = self.grant
        terms = [one.inviter.public_key, one.role, one.uses, one.expiry, one.key.public_key]
        return pack([*terms, one.signature, self.signature])

    def check(self, run: bytes, peer: PeerId, verify: Verify) -> None:
        """Verify the inviter's signature over the grant for ``run``, and the signature of the
        invite's key over ``run`` and ``peer``.

        Raises:
            Uninvited: A signature is wrong.
        """
        check_grant(self.grant, run, verify)
        if not verify(self.grant.key, PASS_DOMAIN, _claim(run, peer), self.signature):
            raise Uninvited(
                f"this pass was made for another identity than {peer}: a pass is its bearer's"
                " alone; start the node with --invite and the invite itself"
            )


def check_grant(grant: Grant, run: bytes, verify: Verify) -> None:
    """Verify that the inviter signed the grant for this run.

    Raises:
        Uninvited: The signature is wrong.
    """
    if not verify(grant.inviter, INVITE_DOMAIN, grant.body(run), grant.signature):
        raise Uninvited(
            "the invite is forged, altered, or of another run: its signature is not that of"
            f" {grant.inviter} for run {run.hex()[:12]}; ask the run's owner for an invite"
        )


def sign_invite(
    run: bytes, role: str, uses: int, expiry: int, secret: bytes, inviter: Signer
) -> Invite:
    """Make an invite to ``run``. ``secret`` is 32 random bytes with no other use.

    Raises:
        ValueError: The role, the uses or the expiry are not allowed.
    """
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
    """Decode the text of an invite without verifying signatures.

    Raises:
        BadMessage: The text is not an invite. Nothing else is raised, whatever the text.
    """
    line = text.strip()
    if len(line) > 1_024 or not line.startswith(PREFIX):  # that of an inviter takes 350
        raise BadMessage(f"an invite is one line that begins with {PREFIX}")
    encoded = line[len(PREFIX) :]
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
        value = unpack_untrusted(data)
    except (binascii.Error, ValueError, BadMessage):
        raise BadMessage("the invite is cut off or garbled: copy the whole line") from None
    run, inviter, role, uses, expiry, secret, signature = fields_untrusted(
        value, bytes, bytes, str, int, int, bytes, bytes, what="invite"
    )
    # Bytes of a run's id.
    if len(run) != 32 or len(secret) != SEED_BYTES:
        raise BadMessage("the invite's run or secret has the wrong length")
    key = KeyPair(secret).peer_id
    author = decode_peer_id_untrusted(inviter)
    return Invite(run, _grant_untrusted(author, role, uses, expiry, key, signature), secret)


def decode_pass_untrusted(data: bytes) -> Pass:
    """Decode a pass without verifying signatures.

    Raises:
        BadMessage: The bytes are not a pass. Nothing else is raised, whatever the bytes.
    """
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
    if len(signature) != SIGNATURE_BYTES:
        raise BadMessage(f"an invite has a signature of {SIGNATURE_BYTES} bytes")
    try:
        return Grant(
            inviter=inviter, role=role, uses=uses, expiry=expiry, key=key, signature=signature
        )
    except ValueError as error:
        raise BadMessage(str(error)) from None


def _claim(run: bytes, peer: PeerId) -> bytes:
    return pack([run, peer.digest])


MAX_SHOWN: Final = MAX_PASS + 2 * NONCE_BYTES + 16
"""Maximum bytes of a credential: a pass, two nonces and framing."""

_WORK_DOMAIN: Final = b"shoal-run-stamp:1.0.0"


@dataclass(frozen=True, slots=True)
class Credential:
    """Parts of a credential. A part that the node does not need is empty."""

    stamp: bytes = b""
    """Nonce of the DHT's stamp."""
    invite: bytes = b""
    """Encoded `Pass`."""
    work: bytes = b""
    """Nonce of the run's work stamp."""

    def to_bytes(self) -> bytes:
        """Return the credential as sent in a heartbeat."""
        if not self.invite and not self.work:
            return self.stamp
        return pack([self.stamp, self.invite, self.work])


def decode_credential_untrusted(data: bytes) -> Credential:
    """Decode a credential without checking its parts.

    Raises:
        BadMessage: The bytes are not a credential. Nothing else is raised, whatever the bytes.
    """
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


def work_bits(run: bytes, peer: PeerId, nonce: bytes) -> int:
    """Return the number of leading zero bits of a work stamp's hash. This costs one hash."""
    if len(nonce) != NONCE_BYTES:
        return 0
    return zero_bits(_WORK_DOMAIN + run + peer.digest, nonce)


def find_work(run: bytes, peer: PeerId, bits: int, tries: range = range(1 << 20)) -> bytes:
    """Return the first nonce worth ``bits`` among ``tries``, by default half a second's work,
    or empty bytes. It is a pure function, for a worker thread."""
    return find_nonce(_WORK_DOMAIN + run + peer.digest, bits, tries)
