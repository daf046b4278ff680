"""A policy version: a small signed manifest, and an index that it names by digest.

The manifest itself stays under a kilobyte whatever the size of the model, so it can be gossiped
to every node. It names the *index* (`p2p.shardcast.index`), the list of files and spans, by
digest; the index names the spans by digest. Everything below the signature is therefore
content-addressed, and any peer may serve any of it.

Per encoding the manifest says what it costs. An anchor needs nothing else: its chunk i is span
i. An encoding whose chunks are something else, a delta, names the list of them by digest.

A manifest carries the digest of the one before it. Two different manifests for one version, or
one that denies its own predecessor, are a `p2p.equivocation.Equivocation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import (
    PEER_ID_BYTES,
    SIGNATURE_BYTES,
    PeerId,
    ProtocolId,
    Signer,
    Verify,
    decode_peer_id_untrusted,
)
from p2p.policy import MAX_POLICY, NO_POLICY as NO_POLICY, PolicyVersion as PolicyVersion
from p2p.shardcast.codec import ADAPTER, ANCHOR, MAX_WIRE, PATCH
from p2p.shardcast.index import (
    DIGEST_BYTES,
    MAX_CHUNKS,
    MAX_SIZE,
    Index,
    decode_index_untrusted,
    digest_of,
)
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted

PROTOCOL_ID: Final = ProtocolId("/shoal/shardcast/1.0.0")
"""Protocol of control messages, and the domain of everything that SHARDCAST signs."""

MAX_MANIFEST: Final = 4 * KI
"""Most bytes of a signed manifest: 16 encodings of at most 150 bytes and 300 bytes of the rest,
rounded up."""
MAX_ROSTER: Final = 4 * KI
"""Most peers of one roster."""
ROSTER_ENTRY: Final = PEER_ID_BYTES + 1
"""Bytes of one peer in a roster: peer id and capacity class."""
MAX_ROSTER_BYTES: Final = MAX_ROSTER * ROSTER_ENTRY + KI
"""Most bytes of a signed roster: 157 KiB, and the rest rounded up."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One encoding of a policy: its name, base version and size."""

    name: str
    base: PolicyVersion
    """The version a receiver must hold; `NO_POLICY` for an anchor."""
    chunks: int
    wire: int
    """Bytes on the wire, by which a receiver chooses the cheapest path. For an anchor this is
    an estimate: the publisher signs before it has packed everything."""
    index: bytes = b""
    """Digest of a patch's index, by which messages name the patch. It is empty for an anchor,
    whose index is the policy's."""

    @classmethod
    def anchor(cls, index: Index, wire: int) -> Encoding:
        """Return the entry for the whole policy, which takes about ``wire`` bytes on the
        wire."""
        return cls(ANCHOR, NO_POLICY, len(index), wire)

    @classmethod
    def patch(cls, index: Index, base: PolicyVersion, name: str = PATCH) -> Encoding:
        """Return the entry for a patch on ``base`` whose index has the digest ``index``."""
        return cls(name, base, len(index), index.size, index.digest)

    @property
    def is_anchor(self) -> bool:
        """True if the encoding needs no other version."""
        return self.name == ANCHOR

    @property
    def is_adapter(self) -> bool:
        """True if the encoding needs the version that the run began with, and no other."""
        return self.name == ADAPTER


@dataclass(frozen=True, slots=True)
class Manifest:
    """A policy version, signed by the publisher that made it."""

    publisher: PeerId
    run: bytes
    version: PolicyVersion
    previous_version: PolicyVersion
    previous: bytes
    """Digest of the manifest before this one, which is the publisher's own if it signed that
    version; empty for the first."""
    weights_digest: bytes
    """Digest of the index, which fixes every byte of every file."""
    size: int
    """Bytes of all files together."""
    encodings: tuple[Encoding, ...]
    note: bytes = b""
    """Digest of 32 bytes that the publisher commits to, or empty."""
    signature: bytes = field(default=b"", repr=False)
    content: bytes = field(init=False, repr=False)
    digest: bytes = field(init=False, repr=False)
    """Digest of the signed content: the name of this policy in every message. It leaves out the
    signature, so that signing twice is no equivocation."""

    def __post_init__(self) -> None:
        before = (self.previous_version, self.previous)
        rows = [[e.name, e.base, e.chunks, e.wire, e.index] for e in self.encodings]
        what = (self.weights_digest, self.size, rows, *[self.note][: len(self.note)])
        content = pack([self.publisher.digest, self.run, self.version, *before, *what])
        object.__setattr__(self, "content", content)
        object.__setattr__(self, "digest", digest_of(content))

    def sign(self, signer: Signer) -> Manifest:
        """Return this manifest signed by its publisher. Equal fields always give equal
        bytes."""
        return replace(self, signature=signer.sign(PROTOCOL_ID, self.content))

    @property
    def author(self) -> PeerId:
        """Peer that signed this manifest."""
        return self.publisher

    @property
    def bound(self) -> Mapping[int, bytes]:
        """Maps versions to digests: this manifest's, and its predecessor's."""
        before, previous = self.previous_version, self.previous
        return {self.version: self.digest, **({before: previous} if previous else {})}

    @property
    def anchor(self) -> Encoding:
        """The encoding that needs no earlier version; every manifest has one."""
        return next(encoding for encoding in self.encodings if encoding.name == ANCHOR)

    @property
    def patches(self) -> tuple[Encoding, ...]:
        """The encodings that need another version."""
        return tuple(one for one in self.encodings if one.name in (PATCH, ADAPTER))

    @property
    def handed_out(self) -> Encoding:
        """The encoding that the origin hands out: the adapter, or the patch on the version
        before, or else the anchor. Other encodings are pulled."""
        previous = self.previous_version
        fit = (one for one in self.patches if one.is_adapter or one.base == previous)
        return next(fit, self.anchor)

    def name_of(self, encoding: Encoding) -> bytes:
        """Return the digest by which messages name an encoding of this version."""
        return self.digest if encoding.is_anchor else encoding.index

    def encoding_of(self, index: Index) -> Encoding:
        """Return the encoding that ``index`` belongs to."""
        return next((one for one in self.patches if one.index == index.digest), self.anchor)

    def index_untrusted(self, data: bytes) -> Index:
        """Decode the policy's index, or a patch's. Raise `BadMessage`, and nothing else, if
        ``data`` is another index or none."""
        digest = digest_of(data)
        for patch in self.patches:
            if patch.index == digest:
                return decode_index_untrusted(data, digest, patch.chunks, patch.wire)
        return decode_index_untrusted(data, self.weights_digest, self.anchor.chunks, self.size)

    def encode(self) -> bytes:
        """Return the signed bytes, as they are gossiped and stored."""
        return pack([self.content, self.signature])

    def __repr__(self) -> str:
        return f"Manifest(v{self.version}, {self.digest.hex()[:8]}, by {self.publisher!r})"


def decode_manifest_untrusted(data: bytes, run: bytes, verify: Verify) -> Manifest:
    """Decode a manifest of ``run``, and verify its signature.

    The caller checks whether the signer *may* publish; ``verify`` can refuse unknown signers at
    no cost.

    Raises:
        BadMessage: The bytes are not a well-signed manifest of the run. Nothing else is raised.
    """
    if len(data) > MAX_MANIFEST:
        raise BadMessage(f"a manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST}")
    content, signature = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, what="signed manifest"
    )
    kinds = (bytes, bytes, int, int, bytes, bytes, int, list)
    unpacked = unpack_untrusted(content)
    has_note = isinstance(unpacked, list) and len(unpacked) > len(kinds)
    fields = fields_untrusted(unpacked, *kinds, *[bytes] * has_note, what="manifest")
    # An anchor and patches: publishers make one patch, and older versions of Shoal up to seven.
    if len(fields[7]) > 16:
        raise BadMessage(f"a manifest with {len(fields[7])} encodings")
    encodings = tuple(map(_decode_encoding_untrusted, fields[7]))
    publisher = decode_peer_id_untrusted(fields[0])
    note = fields[8] if has_note else b""
    if has_note and len(note) != DIGEST_BYTES:
        raise BadMessage("a manifest's note is no digest")
    named, version, before, previous, weights, size = fields[1:7]
    manifest = Manifest(
        publisher, named, version, before, previous, weights, size, encodings, note, signature
    )
    _check(manifest)
    if manifest.content != content:
        raise BadMessage("a manifest is not packed as Shoal packs it")
    if manifest.run != run:
        raise BadMessage("a manifest of another run")
    if len(signature) != SIGNATURE_BYTES or not verify(
        publisher, PROTOCOL_ID, content, signature
    ):
        raise BadMessage("a manifest's signature is wrong")
    return manifest


def _decode_encoding_untrusted(value: object) -> Encoding:
    name, base, chunks, wire, index = fields_untrusted(
        value, str, int, int, int, bytes, what="encoding"
    )
    is_anchor = name == ANCHOR
    if not 0 < len(name) <= 32 or len(index) != (0 if is_anchor else DIGEST_BYTES):
        raise BadMessage("an encoding's name or index digest has the wrong length")
    if not (
        NO_POLICY <= base <= MAX_POLICY
        and 0 < chunks <= MAX_CHUNKS
        and 0 < wire <= chunks * MAX_WIRE
    ):
        raise BadMessage("an encoding is out of bounds")
    return Encoding(name, PolicyVersion(base), chunks, wire, index)


def _check(made: Manifest) -> None:
    if len(made.weights_digest) != DIGEST_BYTES:
        raise BadMessage("a manifest's weights digest has the wrong length")
    if not (
        0 <= made.version <= MAX_POLICY and NO_POLICY <= made.previous_version < made.version
    ):
        raise BadMessage("a manifest's versions do not grow")
    if len(made.previous) != (DIGEST_BYTES if made.previous_version >= 0 else 0):
        raise BadMessage("a manifest's predecessor is misnamed")
    if not 0 < made.size <= MAX_SIZE:
        raise BadMessage("a manifest's size is out of bounds")
    anchors = sum(e.name == ANCHOR and e.base == NO_POLICY for e in made.encodings)
    names = {(e.name, e.base) for e in made.encodings}
    if anchors != 1 or len(names) != len(made.encodings):
        raise BadMessage("a manifest needs one anchor and distinct encodings")
    if not all(e.base < made.version for e in made.encodings):
        raise BadMessage("a manifest's patch is on no older version")
