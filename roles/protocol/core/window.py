"""Windows of places, to which a worker commits, and the submissions that fill the places.

A *place* is one submission: the groups that a node draws in one go under one version, numbered
from 0. A worker sends the trainer a signed *window* of consecutive places before anybody sees
their content: the digest of each content, and for each group a claim about its rewards. All
that is later said about a place (verdicts, findings, evidence) is keyed by its `Commitment`,
which names worker, run, terms, version, place and content, and never by the content alone: two
workers may have equal content. Wire tables: docs/protocols/work.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from blake3 import blake3

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
from roles.contract.core.sizes import MAX_GROUPS
from roles.rl.algorithms.base import has_spread

WINDOW_DOMAIN: Final = ProtocolId("/shoal/work/window/1.0.0")
"""Domain of a worker's signature of a window; no peer speaks it as a protocol."""
MAX_PLACES: Final = 16
"""Most places of one window."""
MAX_WINDOW: Final = 8 * KI
"""Most bytes of a signed window: 16 digests and 16 times 256 claims are 4.6 KiB."""
MAX_INDEX: Final = 2**32 - 1
"""Highest version and place: 136 years of one a second."""
DIGEST_BYTES: Final = 32
"""Bytes of a BLAKE3 digest."""


class Claim(IntEnum):
    """A worker's claim about the rewards of one group."""

    ALIKE = 0
    """All completions earn the same, so nothing is learnt from them."""
    SPREAD = 1
    UNKNOWN = 2
    """A limit of time or memory was touched while rewards were computed, so that another
    machine may find something else."""


def claim_of(rewards: Sequence[float], *, is_certain: bool = True) -> Claim:
    """Return the claim that fits the ``rewards`` of one group."""
    if not is_certain:
        return Claim.UNKNOWN
    return Claim.SPREAD if has_spread(rewards) else Claim.ALIKE


def content_digest(content: bytes) -> bytes:
    """Return the 32 bytes of BLAKE3 that a commitment binds."""
    digest: bytes = blake3(content).digest()
    return digest


@dataclass(frozen=True, slots=True)
class Commitment:
    """The commitment to one place of a window: worker, run, terms, version, place and
    content."""

    run: bytes
    terms: bytes
    """Digest of the terms that the work was made under (`roles.protocol.core.terms`)."""
    node: PeerId
    version: PolicyVersion
    policy: bytes
    """Digest of the weights, since a version number alone proves nothing."""
    index: int
    """Index of the place among the node's under this version: 0, 1, 2, ..."""
    content: bytes
    """BLAKE3 of the encoded groups."""

    def to_bytes(self) -> bytes:
        """Return the canonical form."""
        place = [self.version, self.policy, self.index, self.content]
        return pack([self.run, self.terms, self.node.digest, *place])

    @property
    def digest(self) -> bytes:
        """The key under which everything about this place is kept."""
        return content_digest(self.to_bytes())


def decode_commitment_untrusted(data: bytes) -> Commitment:
    """Decode a commitment.

    Raises:
        BadMessage: The bytes are no commitment.
    """
    run, terms, node, version, policy, index, content = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, bytes, int, bytes, int, bytes, what="commitment"
    )
    return Commitment(
        _digest_untrusted(run, "run id"),
        _digest_untrusted(terms, "digest of terms"),
        decode_peer_id_untrusted(node),
        PolicyVersion(_index_untrusted(version, "a version")),
        _digest_untrusted(policy, "policy digest"),
        _index_untrusted(index, "the index of a place"),
        _digest_untrusted(content, "content digest"),
    )


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive places of one worker under one version. A window without places only asks how
    many places are wanted."""

    run: bytes
    terms: bytes
    node: PeerId
    version: PolicyVersion
    policy: bytes
    first: int
    """Index of the first place."""
    contents: tuple[bytes, ...]
    """Digest of the content of each place."""
    claims: bytes
    """One `Claim` for each group, place after place."""

    def to_bytes(self) -> bytes:
        """Return the bytes that are signed."""
        head = [self.run, self.terms, self.node.digest, self.version, self.policy, self.first]
        return pack([*head, b"".join(self.contents), self.claims])

    @property
    def places(self) -> range:
        """Indices of the places."""
        return range(self.first, self.first + len(self.contents))

    @property
    def digest(self) -> bytes:
        """The key under which the trainer keeps the window and its answer."""
        return content_digest(self.to_bytes())

    def claims_of(self, index: int) -> tuple[Claim, ...]:
        """Return the claims about the groups of place ``index``."""
        groups = len(self.claims) // len(self.contents)
        start = (index - self.first) * groups
        return tuple(Claim(claim) for claim in self.claims[start : start + groups])

    def commitment(self, index: int) -> Commitment:
        """Return the commitment of place ``index``.

        Raises:
            ValueError: The window has no such place.
        """
        if index not in self.places:
            raise ValueError(f"place {index} is not in a window of {self.places}")
        return Commitment(
            self.run,
            self.terms,
            self.node,
            self.version,
            self.policy,
            index,
            self.contents[index - self.first],
        )


@dataclass(frozen=True, slots=True)
class SignedWindow:
    """A window and its worker's signature."""

    window: Window
    signature: bytes

    @classmethod
    def sign(cls, window: Window, signer: Signer) -> SignedWindow:
        """Sign ``window`` in the worker's name."""
        return cls(window, signer.sign(WINDOW_DOMAIN, window.to_bytes()))

    def to_bytes(self) -> bytes:
        """Return the wire form, which is also that on disk."""
        return pack([self.window.to_bytes(), self.signature])

    def has_valid_signature(self, verify: Verify) -> bool:
        """Return True if the worker that the window names has signed it."""
        return verify(self.window.node, WINDOW_DOMAIN, self.window.to_bytes(), self.signature)


def decode_window_untrusted(data: bytes, verify: Verify | None) -> SignedWindow:
    """Decode a signed window.

    Args:
        data: The bytes of a peer.
        verify: Checks the signature; None leaves that to the caller, who first asks what costs
            less (`SignedWindow.has_valid_signature`).

    Raises:
        BadMessage: The bytes are no window, or its signature is not its worker's.
    """
    if len(data) > MAX_WINDOW:
        raise BadMessage(f"a window of {len(data)} bytes is over the limit of {MAX_WINDOW}")
    body, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="window")
    run, terms, node, version, policy, first, contents, claims = fields_untrusted(
        unpack_untrusted(body),
        *(bytes, bytes, bytes, int, bytes, int, bytes, bytes),
        what="window",
    )
    places, rest = divmod(len(contents), DIGEST_BYTES)
    if rest or places > MAX_PLACES:
        raise BadMessage(f"a window has at most {MAX_PLACES} content digests")
    if not _fit(claims, places):
        raise BadMessage("the claims of a window do not fit its places")
    window = Window(
        _digest_untrusted(run, "run id"),
        _digest_untrusted(terms, "digest of terms"),
        decode_peer_id_untrusted(node),
        PolicyVersion(_index_untrusted(version, "a version")),
        _digest_untrusted(policy, "policy digest"),
        _index_untrusted(first, "the index of a place"),
        tuple(contents[at : at + DIGEST_BYTES] for at in range(0, len(contents), DIGEST_BYTES)),
        claims,
    )
    if window.first + places > MAX_INDEX:
        raise BadMessage(f"the index of a place is at most {MAX_INDEX}")
    if len(signature) != SIGNATURE_BYTES:
        raise BadMessage(f"a signature is {SIGNATURE_BYTES} bytes, not {len(signature)}")
    if window.to_bytes() != body:
        raise BadMessage("a window has one encoding, and this is another")
    signed = SignedWindow(window, signature)
    if verify is not None and not signed.has_valid_signature(verify):
        raise BadMessage("a window's signature is not its worker's")
    return signed


def _fit(claims: bytes, places: int) -> bool:
    """Return True if the number of claims is a multiple of ``places`` and all claims are
    valid."""
    if not places:
        return not claims
    groups, rest = divmod(len(claims), places)
    return not rest and 0 < groups <= MAX_GROUPS and max(claims) <= Claim.UNKNOWN


@dataclass(frozen=True, slots=True)
class Submission:
    """The content of one place, behind the window that commits to it."""

    signed: SignedWindow
    index: int
    content: bytes
    """Encoded groups (`roles.protocol.core.groups.encode_groups`)."""

    @property
    def commitment(self) -> Commitment:
        """Commitment that the worker has signed to this content."""
        return self.signed.window.commitment(self.index)

    def to_bytes(self) -> bytes:
        """Return the wire form, which is also that on disk."""
        return pack([self.signed.to_bytes(), self.index, self.content])


def decode_submission_untrusted(data: bytes, verify: Verify) -> Submission:
    """Decode a submission whose content stays encoded.

    Raises:
        BadMessage: The bytes are no submission, the window's signature is not its worker's, or
            the content is not what the window binds.
    """
    raw, index, content = fields_untrusted(
        unpack_untrusted(data), bytes, int, bytes, what="submission"
    )
    return bind_untrusted(decode_window_untrusted(raw, verify), index, content)


def bind_untrusted(signed: SignedWindow, index: int, content: bytes) -> Submission:
    """Put ``content`` behind its window.

    Raises:
        BadMessage: The window has no such place, or binds other content.
    """
    if index not in signed.window.places:
        raise BadMessage("a submission's place is not in its window")
    if content_digest(content) != signed.window.commitment(index).content:
        raise BadMessage("a submission's content is not what its window binds")
    return Submission(signed, index, content)


def _digest_untrusted(value: bytes, what: str) -> bytes:
    if len(value) != DIGEST_BYTES:
        raise BadMessage(f"a {what} is {DIGEST_BYTES} bytes, not {len(value)}")
    return value


def _index_untrusted(value: int, what: str) -> int:
    if not 0 <= value <= MAX_INDEX:
        raise BadMessage(f"{what} is from 0 to {MAX_INDEX}")
    return value
