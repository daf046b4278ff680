"""What a policy version is: a small signed manifest, and indexes that it names by digest.

The manifest itself stays under a kilobyte whatever the size of the model, so it can be gossiped
to every node. Per encoding (an anchor today, and deltas as further entries of the same table)
it names an *index*, the flat list of the encoding's chunks, by digest; the index names the
chunks by digest. Everything below the signature is therefore content-addressed, and any peer
may serve any of it.

A manifest carries the digest of the one before it. Two different manifests for one version, or
one that denies its own predecessor, are an `Equivocation`: proof, from signatures alone,
against a trainer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from blake3 import blake3

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
from p2p.policy import (
    MAX_POLICY,
    NO_POLICY as NO_POLICY,
    PolicyVersion as PolicyVersion,
)
from p2p.wire import KI, MIB, fields_untrusted, pack, unpack_untrusted

PROTOCOL_ID: Final = ProtocolId("/shoal/shardcast/1.0.0")
"""Control messages, and the domain of everything SHARDCAST signs."""

ANCHOR: Final = "raw-zstd1"
"""The whole safetensors file, cut in spans, each a zstd frame of level 1."""

DIGEST_BYTES: Final = 32
MAX_SPAN: Final = 4 * MIB
"""Raw bytes of one chunk: the largest unit that is checked, lost or sent again as a whole."""
MAX_WIRE: Final = MAX_SPAN + MAX_SPAN // 128 + KI
"""Wire bytes of one chunk: zstd's own bound for incompressible input (1/256 and a header),
doubled."""
MAX_CHUNKS: Final = 64 * KI
"""Chunks of one encoding. With `MAX_SPAN` this bounds a policy at 256 GiB and an index at 2.5
MiB."""
MAX_ENCODINGS: Final = 16
"""An anchor, and skip deltas over 1, 2, 4 ... 2^14 versions."""
MAX_MANIFEST: Final = 4 * KI
"""Bytes of a signed manifest: 16 encodings of at most 150 bytes and 300 bytes of the rest,
rounded up."""
MAX_ROSTER: Final = 4 * KI
"""Peers of one roster."""
ROSTER_ENTRY: Final = PEER_ID_BYTES + 1
"""Bytes of one peer in a roster: its name and its capacity class."""
MAX_RUN_ID: Final = 64
MAX_ROSTER_BYTES: Final = MAX_ROSTER * ROSTER_ENTRY + KI
"""Bytes of a signed roster: 157 KiB, and the rest rounded up."""
_MAX_NAME: Final = 32
_MAX_SIZE: Final = MAX_CHUNKS * MAX_SPAN
_CHUNK: Final = struct.Struct(f">{DIGEST_BYTES}sII")
INDEX_ENTRY: Final = _CHUNK.size
"""Bytes of one chunk in an index."""


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The 32 bytes of BLAKE3 by which everything here is named."""
    return blake3(data).digest()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One unit of transfer: what it hashes to, its bytes on the wire, the raw bytes it stands
    for."""

    digest: bytes
    wire: int
    span: int


@dataclass(frozen=True, slots=True)
class Index:
    """The chunks of one encoding, in order; on the wire 40 bytes each, named by the digest of
    them all."""

    chunks: tuple[Chunk, ...]
    data: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    offsets: tuple[int, ...] = field(repr=False)
    """Where each chunk starts among the wire bytes; one more entry than chunks: the last is
    their sum."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Index:
        """The index that lists ``chunks``."""
        data = b"".join(_CHUNK.pack(chunk.digest, chunk.wire, chunk.span) for chunk in chunks)
        offsets = tuple(accumulate((chunk.wire for chunk in chunks), initial=0))
        return cls(tuple(chunks), data, digest_of(data), offsets)

    @property
    def wire(self) -> int:
        """Bytes on the wire, all chunks together."""
        return self.offsets[-1]

    @property
    def size(self) -> int:
        """Raw bytes, all chunks together."""
        return sum(chunk.span for chunk in self.chunks)

    def __len__(self) -> int:
        return len(self.chunks)


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to get a policy: its name, the version it starts from, and its index by
    digest."""

    name: str
    base: PolicyVersion
    """The version a receiver must hold; `NO_POLICY` for an anchor."""
    chunks: int
    wire: int
    """Bytes on the wire: what a receiver compares to choose the cheapest path."""
    index: bytes

    @classmethod
    def of(cls, index: Index, name: str = ANCHOR, base: PolicyVersion = NO_POLICY) -> Encoding:
        """The entry under which a manifest names ``index``."""
        return cls(name, base, len(index), index.wire, index.digest)


@dataclass(frozen=True, slots=True)
class ManifestBody:
    """What a trainer says about one version, before it is signed."""

    run: bytes
    version: PolicyVersion
    previous_version: PolicyVersion
    previous: bytes
    """Digest of the manifest before this one; empty for the first."""
    weights_digest: bytes
    """Digest of the whole safetensors file."""
    size: int
    """Bytes of the whole safetensors file."""
    header: int
    """Bytes of the safetensors length and header at its front, where the tensors' names, dtypes
    and shapes are; 0 if the file is of another kind."""
    encodings: tuple[Encoding, ...]

    def sign(self, signer: Signer) -> Manifest:
        """The manifest. Equal bodies give equal bytes, whenever and however often they are
        signed."""
        content = pack(
            [
                signer.peer_id.digest,
                self.run,
                self.version,
                self.previous_version,
                self.previous,
                self.weights_digest,
                self.size,
                self.header,
                [[e.name, e.base, e.chunks, e.wire, e.index] for e in self.encodings],
            ]
        )
        return Manifest(signer.peer_id, self, content, signer.sign(PROTOCOL_ID, content))


@dataclass(frozen=True, slots=True)
class Manifest:
    """A policy version, signed by the trainer that made it."""

    trainer: PeerId
    body: ManifestBody
    content: bytes = field(repr=False)
    signature: bytes = field(repr=False)
    digest: bytes = field(init=False, repr=False)
    """The digest of what was signed: the name of this policy in every message. It leaves the
    signature out, so that signing the same thing again does not make an honest trainer look
    like two."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_of(self.content))

    @property
    def version(self) -> PolicyVersion:
        """The version it describes."""
        return self.body.version

    @property
    def weights_digest(self) -> bytes:
        """Digest of the whole safetensors file."""
        return self.body.weights_digest

    @property
    def size(self) -> int:
        """Bytes of the whole safetensors file."""
        return self.body.size

    @property
    def anchor(self) -> Encoding:
        """The encoding that needs no earlier version; every manifest has one."""
        return next(encoding for encoding in self.body.encodings if encoding.name == ANCHOR)

    def encode(self) -> bytes:
        """The signed bytes, as they are gossiped and stored."""
        return pack([self.content, self.signature])

    def __repr__(self) -> str:
        return f"Manifest(v{self.version}, {self.digest.hex()[:8]}, by {self.trainer!r})"


def decode_manifest_untrusted(data: bytes, run: bytes, verify: Verify) -> Manifest:
    """Raise `BadMessage`, and nothing else, unless ``data`` is a well-signed manifest of
    ``run``.

    Whether its signer *may* publish is the caller's question; ``verify`` may refuse unknown
    ones for free.
    """
    if len(data) > MAX_MANIFEST:
        raise BadMessage(f"a manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST}")
    content, signature = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, what="signed manifest"
    )
    kinds = (bytes, bytes, int, int, bytes, bytes, int, int, list)
    fields = fields_untrusted(unpack_untrusted(content), *kinds, what="manifest")
    trainer = decode_peer_id_untrusted(fields[0])
    encodings = tuple(
        _decode_encoding_untrusted(item) for item in fields[8][: MAX_ENCODINGS + 1]
    )
    _, named, version, before, previous, weights_digest, size, header, _ = fields
    body = ManifestBody(
        named, version, before, previous, weights_digest, size, header, encodings
    )
    _check_body(body)
    if body.run != run:
        raise BadMessage("a manifest of another run")
    if len(signature) != SIGNATURE_BYTES or not verify(
        trainer, PROTOCOL_ID, content, signature
    ):
        raise BadMessage("a manifest's signature is wrong")
    return Manifest(trainer, body, content, signature)


def _decode_encoding_untrusted(value: object) -> Encoding:
    name, base, chunks, wire, index = fields_untrusted(
        value, str, int, int, int, bytes, what="encoding"
    )
    if not 0 < len(name) <= _MAX_NAME or len(index) != DIGEST_BYTES:
        raise BadMessage("an encoding's name or index digest has the wrong length")
    if not (
        NO_POLICY <= base <= MAX_POLICY
        and 0 < chunks <= MAX_CHUNKS
        and 0 < wire <= chunks * MAX_WIRE
    ):
        raise BadMessage("an encoding is out of bounds")
    return Encoding(name, PolicyVersion(base), chunks, wire, index)


def _check_body(body: ManifestBody) -> None:
    if not 0 < len(body.run) <= MAX_RUN_ID or len(body.weights_digest) != DIGEST_BYTES:
        raise BadMessage("a manifest's run id or weights digest has the wrong length")
    if not (
        0 <= body.version <= MAX_POLICY and NO_POLICY <= body.previous_version < body.version
    ):
        raise BadMessage("a manifest's versions do not grow")
    if len(body.previous) != (DIGEST_BYTES if body.previous_version >= 0 else 0):
        raise BadMessage("a manifest's predecessor is misnamed")
    if not (0 < body.size <= _MAX_SIZE and 0 <= body.header <= body.size):
        raise BadMessage("a manifest's sizes are out of bounds")
    anchors = sum(e.name == ANCHOR and e.base == NO_POLICY for e in body.encodings)
    names = {(e.name, e.base) for e in body.encodings}
    if anchors != 1 or len(body.encodings) > MAX_ENCODINGS or len(names) != len(body.encodings):
        raise BadMessage("a manifest needs one anchor and distinct encodings")


def decode_index_untrusted(data: bytes, encoding: Encoding, size: int) -> Index:
    """Raise `BadMessage`, and nothing else, unless ``data`` is the index that ``encoding``
    names.

    ``size`` is the raw size that the chunks of an anchor must add up to.
    """
    if len(data) != encoding.chunks * _CHUNK.size or digest_of(data) != encoding.index:
        raise BadMessage("not the index that the manifest names")
    chunks = tuple(Chunk(*fields) for fields in _CHUNK.iter_unpack(data))
    index = Index(
        chunks, data, encoding.index, tuple(accumulate((c.wire for c in chunks), initial=0))
    )
    if not all(0 < c.wire <= MAX_WIRE and 0 < c.span <= MAX_SPAN for c in chunks):
        raise BadMessage("a chunk's size is out of bounds")
    if index.wire != encoding.wire or (encoding.name == ANCHOR and index.size != size):
        raise BadMessage("an index does not add up to what the manifest says")
    return index


@dataclass(frozen=True, slots=True)
class Equivocation:
    """Two manifests that one honest trainer cannot have signed both. Any node can check it."""

    first: Manifest
    second: Manifest

    @property
    def trainer(self) -> PeerId:
        """Whom it convicts."""
        return self.first.trainer

    @property
    def is_proof(self) -> bool:
        """Whether the two really contradict each other (their signatures were judged at
        decoding)."""
        first, second = self.first, self.second
        if first.trainer != second.trainer or first.digest == second.digest:
            return False
        if first.version == second.version:
            return True
        denied = first.version == second.body.previous_version
        return denied and second.body.previous != first.digest
