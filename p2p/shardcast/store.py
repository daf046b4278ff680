"""Policies on disk: chunks as they came over the wire, and the weights they decode to.

One file per policy holds the manifest, the index and, at fixed offsets, every wire chunk.
Chunks gather in memory and are written in batches; when all are there the file is written out
and fsynced *once*, before any peer or role is told that the version is whole. A small policy
costs two writes and one fsync in all, where a file and an fsync per chunk would cost more than
moving the bytes. Nothing is lost by it: a file is believed only as far as its chunks hash
right, so after a crash a torn file simply has fewer chunks.

The assembled safetensors file is not fsynced at all: it can be made again from the chunks, its
path is given out only once it is written, and after a restart it is believed only if its digest
is the manifest's.

This node's own policies are written under another name, fsynced and renamed before they are
announced: an origin that crashes has published a version entirely or never mentioned it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import trio
from blake3 import blake3

from p2p.errors import BadMessage, StorageError
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.codec import DECODE_RATE, decode_chunks_untrusted
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.forest import Roster, decode_roster_untrusted
from p2p.shardcast.manifest import (
    INDEX_ENTRY,
    MAX_MANIFEST,
    Chunk,
    Index,
    Manifest,
    PolicyVersion,
    decode_index_untrusted,
    decode_manifest_untrusted,
    digest_of,
)
from p2p.wire import MIB
from p2p.world import OFF_LOOP, World

WRITE_BATCH: Final = 8 * MIB
"""Bytes of verified chunks that may wait in memory: what a crash costs, and two of the largest
chunks."""
HASH_RATE: Final = 3e9
"""Bytes per second of BLAKE3, one core: the modelled cost of reading chunks back."""
DECODE_BATCH: Final = 4 * MIB
"""Raw bytes decoded at a time: the largest chunk, and 6 ms of a core."""
_LENGTH: Final = 4
_INDEX_AT: Final = _LENGTH + MAX_MANIFEST
_SUFFIX: Final = ".policy"
_WEIGHTS: Final = ".safetensors"
_UNFINISHED: Final = "publishing.tmp"
_ROSTER: Final = "roster"

logger = logging.getLogger(__name__)


class StoredPolicy:
    """One policy on this disk, whole or not."""

    __slots__ = (
        "_pending", "_pins", "has_head", "index", "manifest", "path", "pending_bytes", "stored",
        "verified", "weights", "writing",
    )  # fmt: skip

    def __init__(
        self,
        manifest: Manifest,
        index: Index,
        path: str,
        weights: str,
        *,
        has_head: bool = False,
    ) -> None:
        self.manifest = manifest
        self.index = index
        self.path = path
        self.weights = weights
        """Where the assembled weights are, or will be."""
        self.verified = EMPTY
        """Chunks that were judged right, in memory or on disk."""
        self.stored = False
        """Whether it is whole, durable and assembled."""
        self.has_head = has_head
        """Whether the file begins with manifest and index."""
        self.pending_bytes = 0
        self.writing = trio.Lock()
        self._pending: dict[int, bytes] = {}
        """Verified chunks that are not yet written."""
        self._pins = 0

    def add(self, chunk: int, data: bytes) -> None:
        """A verified chunk is to be written."""
        self.verified = self.verified.including(chunk)
        self._pending[chunk] = data
        self.pending_bytes += len(data)

    @property
    def pending(self) -> dict[int, bytes]:
        """Chunks to be written, in their order."""
        return dict(sorted(self._pending.items()))

    def pending_chunk(self, chunk: int) -> bytes | None:
        """A chunk that is not yet written."""
        return self._pending.get(chunk)

    def note_written(self, chunks: Iterable[int]) -> None:
        """These pending chunks are in the file, behind its head."""
        self.has_head = True
        for chunk in chunks:
            self.pending_bytes -= len(self._pending.pop(chunk))

    def note_found(self, chunks: ChunkSet) -> None:
        """The file has these chunks from an earlier life."""
        self.verified |= chunks

    def note_damaged(self, chunk: int) -> None:
        """A chunk in the file is no longer what it was."""
        self.verified = self.verified.excluding(chunk)

    def move_weights(self, path: str) -> None:
        """The weights are at ``path`` from now on."""
        self.weights = path

    def mark_stored(self) -> None:
        """It is whole, durable and assembled."""
        self.stored = True

    @property
    def is_whole(self) -> bool:
        """Whether every chunk was judged right."""
        return len(self.verified) == len(self.index)

    @property
    def is_pinned(self) -> bool:
        """Whether a caller needs it to stay."""
        return self._pins > 0

    @contextmanager
    def pin(self) -> Iterator[None]:
        """Keep it for the length of the block."""
        self._pins += 1
        try:
            yield
        finally:
            self._pins -= 1

    @property
    def version(self) -> PolicyVersion:
        """The version it is."""
        return self.manifest.version

    @property
    def footprint(self) -> int:
        """Bytes that it occupies, assembled."""
        return self.index.wire + self.manifest.size

    def offset(self, chunk: int) -> int:
        """Where a chunk starts in the file."""
        return chunks_at(len(self.index)) + self.index.offsets[chunk]

    def head(self) -> bytes:
        """What precedes the chunks in the file."""
        manifest = self.manifest.encode()
        return (len(manifest).to_bytes(_LENGTH, "big") + manifest).ljust(
            _INDEX_AT, b"\0"
        ) + self.index.data


class PolicyStore:
    """The policies of one run on one node's disk."""

    def __init__(self, world: World, config: ShardcastConfig, run: bytes) -> None:
        self._world = world
        self._disk = world.disk
        self._config = config
        self._run = run
        self.folder = f"{config.folder}/{run.hex()[:16]}"
        """Where the policies of this run are."""
        self._entries: dict[bytes, StoredPolicy] = {}
        self._cache: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._cached = 0

    def __repr__(self) -> str:
        return f"PolicyStore({self.folder}, {len(self._entries)} policies)"

    def entry(self, policy: bytes) -> StoredPolicy | None:
        """A policy that is here, whole or not."""
        return self._entries.get(policy)

    def stored(self, version: PolicyVersion) -> StoredPolicy | None:
        """A whole and assembled version."""
        return next(
            (e for e in self._entries.values() if e.stored and e.version == version), None
        )

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Versions that are whole and assembled, newest first."""
        return tuple(
            sorted((e.version for e in self._entries.values() if e.stored), reverse=True)
        )

    # Fetching

    def begin(self, manifest: Manifest, index: Index) -> None:
        """Make room for a policy that will come chunk by chunk."""
        self._entries.setdefault(manifest.digest, self._new_entry(manifest, index))

    def _new_entry(
        self, manifest: Manifest, index: Index, *, weights: str = "", has_head: bool = False
    ) -> StoredPolicy:
        stem = f"{self.folder}/v{manifest.version:016d}-{manifest.digest.hex()[:8]}"
        path = stem + _SUFFIX
        return StoredPolicy(
            manifest, index, path, weights or stem + _WEIGHTS, has_head=has_head
        )

    def keep_nowait(self, policy: bytes, chunk: int, data: bytes) -> None:
        """Take a verified chunk into memory."""
        entry = self._entries.get(policy)
        if entry is None:
            return
        entry.add(chunk, data)
        self._remember(policy, chunk, data)

    def is_full(self, policy: bytes) -> bool:
        """Whether so much waits in memory that `flush` is due."""
        entry = self._entries.get(policy)
        return entry is not None and entry.pending_bytes > WRITE_BATCH

    async def flush(self, policy: bytes) -> None:
        """Write what waits in memory. Raises `StorageError`."""
        entry = self._entries.get(policy)
        if entry is None:
            return
        async with entry.writing:
            waiting = entry.pending
            for offset, data in _runs(entry, waiting):
                await self._disk.write(entry.path, data, offset)
            if self._world.buggify("shardcast/early sync"):
                await self._disk.fsync(entry.path)
            entry.note_written(waiting)

    async def chunk(self, policy: bytes, chunk: int) -> bytes | None:
        """The wire bytes of a chunk; None if they are no longer here. Raises `StorageError`."""
        entry = self._entries.get(policy)
        if entry is None or chunk not in entry.verified:
            return None
        pending = entry.pending_chunk(chunk)
        data = pending or self._cache.get((policy, chunk))
        if data is None or (pending is None and self._world.buggify("shardcast/read again")):
            data = await self._read(entry, chunk)
            if data is not None:
                self._remember(policy, chunk, data)
        return data

    async def _read(self, entry: StoredPolicy, chunk: int) -> bytes | None:
        expected = entry.index.chunks[chunk]
        try:
            data = await self._disk.read(entry.path, entry.offset(chunk), expected.wire)
        except FileNotFoundError:
            return None  # pruned while it waited to be sent
        if await self._is_chunk(data, expected):
            return data
        entry.note_damaged(chunk)
        logger.warning(
            "chunk_damaged path=%s index=%d: it is no longer served",
            self._disk.locate(entry.path),
            chunk,
        )
        return None

    async def _is_chunk(self, data: bytes, expected: Chunk) -> bool:
        """Whether it is what was verified once: a peer that gets another must take us for a
        liar."""
        if len(data) <= OFF_LOOP:
            return digest_of(data) == expected.digest
        cost = len(data) / HASH_RATE
        return await self._world.run_blocking(digest_of, data, cost=cost) == expected.digest

    async def check_weights(self, entry: StoredPolicy) -> None:
        """Make sure that its weights are what they were; assembled again if not. Raises
        `StorageError`."""
        if await self._check_weights(entry):
            return
        path = self._disk.locate(entry.weights)
        logger.warning("weights_damaged path=%s: they are assembled again", path)
        entry.move_weights(self._new_entry(entry.manifest, entry.index).weights)
        if not await self._assemble(entry):
            policy = self._disk.locate(entry.path)
            raise StorageError(
                f"{path} and {policy} are damaged; start the node again, and they are fetched"
                " again"
            )

    def _remember(self, policy: bytes, chunk: int, data: bytes) -> None:
        self._cached += len(data) - len(self._cache.pop((policy, chunk), b""))
        self._cache[policy, chunk] = data
        while self._cached > self._config.cache_bytes and len(self._cache) > 1:
            _, old = self._cache.popitem(last=False)
            self._cached -= len(old)

    async def finish(self, policy: bytes) -> bool:
        """Make a whole policy durable and assemble it. False if it is not what its manifest
        says.

        Raises `StorageError`.
        """
        entry = self._entries.get(policy)
        if entry is None:
            return False
        await self.flush(policy)
        await self._disk.fsync(entry.path)
        if not await self._assemble(entry):
            return False
        entry.mark_stored()
        return True

    async def _assemble(self, entry: StoredPolicy) -> bool:
        hasher, written = blake3(), 0
        for first, last in _batches(entry.index):
            wire = [
                await self.chunk(entry.manifest.digest, chunk) for chunk in range(first, last)
            ]
            chunks = list(entry.index.chunks[first:last])
            cost = sum(chunk.span for chunk in chunks) / DECODE_RATE
            try:
                data = b"".join(part for part in wire if part is not None)
                raw = await self._world.run_blocking(
                    decode_chunks_untrusted, chunks, data, cost=cost
                )
            except BadMessage:
                return False
            hasher.update(raw)
            await self._disk.write(entry.weights, raw, written)
            written += len(raw)
        return hasher.digest() == entry.manifest.weights_digest

    async def forget(self, policy: bytes) -> None:
        """Remove a policy, whole or not."""
        entry = self._entries.pop(policy, None)
        if entry is None:
            return
        for key in [key for key in self._cache if key[0] == policy]:
            self._cached -= len(self._cache.pop(key))
        await self._disk.remove(entry.path)
        if entry.weights.startswith(self.folder):
            await self._disk.remove(entry.weights)

    async def prune(self) -> list[bytes]:
        """Remove the oldest whole policies beyond the limits; returns their names."""
        kept = sorted(
            (e for e in self._entries.values() if e.stored),
            key=lambda e: e.version,
            reverse=True,
        )
        # What is being fetched takes its room before it is there: the disk holds `keep_bytes`
        # and the newest.
        total, gone = sum(e.footprint for e in self._entries.values() if not e.stored), []
        for rank, entry in enumerate(kept):
            total += entry.footprint
            full = rank >= self._config.keep_versions or total > self._config.keep_bytes
            if rank and full and not entry.is_pinned:
                total -= entry.footprint
                gone.append(entry)
        forgotten = []
        for entry in gone:
            if not entry.is_pinned:  # it may have been pinned while another was removed
                await self.forget(entry.manifest.digest)
                forgotten.append(entry.manifest.digest)
        return forgotten

    # Publishing

    async def write_draft(self, offset: int, data: bytes) -> None:
        """Write wire bytes of a policy whose manifest does not exist yet. Raises
        `StorageError`."""
        await self._disk.write(f"{self.folder}/{_UNFINISHED}", data, offset)

    async def commit_draft(
        self, manifest: Manifest, index: Index, weights: str
    ) -> StoredPolicy:
        """Put the head before what `write_draft` wrote, and make it a policy of ours,
        durably."""
        entry = self._new_entry(manifest, index, weights=weights, has_head=True)
        unfinished = f"{self.folder}/{_UNFINISHED}"
        await self._disk.write(unfinished, entry.head(), 0)
        await self._disk.fsync(unfinished)
        await self._disk.rename(unfinished, entry.path)
        entry.note_found(ChunkSet.below(len(index)))
        entry.mark_stored()
        self._entries[manifest.digest] = entry
        return entry

    def cache_nowait(self, policy: bytes, chunk: int, data: bytes) -> None:
        """Keep a chunk of our own in memory: it is about to be sent to all roots."""
        self._remember(policy, chunk, data)

    async def keep_roster(self, roster: Roster) -> None:
        """Remember durably whom we feed, for a next life. Raises `StorageError`."""
        await self._disk.replace(f"{self.folder}/{_ROSTER}", roster.encode())

    # Resuming

    async def load_roster(self) -> Roster | None:
        """The last roster that an earlier life signed."""
        try:
            data = await self._disk.read(f"{self.folder}/{_ROSTER}")
            return decode_roster_untrusted(data, self._run, self._world.verify)
        except FileNotFoundError:
            return None
        except BadMessage as error:
            logger.warning("roster_damaged, to be made again with the next policy: %s", error)
            return None

    async def load(self) -> list[StoredPolicy]:
        """Read what an earlier life left, and believe what hashes right. Oldest first."""
        found = []
        await self._disk.remove(f"{self.folder}/{_UNFINISHED}")
        for name in await self._disk.list(self.folder):
            if not name.endswith(_SUFFIX):
                continue
            entry = await self._load_entry(f"{self.folder}/{name}")
            if entry is None:
                logger.warning(
                    "policy_damaged path=%s/%s: it is fetched again", self.folder, name
                )
                await self._disk.remove(f"{self.folder}/{name}")
                continue
            self._entries[entry.manifest.digest] = entry
            found.append(entry)
            if entry.is_whole and (
                await self._check_weights(entry) or await self._try_to_assemble(entry)
            ):
                entry.mark_stored()
        await self._remove_orphans()
        return sorted(found, key=lambda entry: entry.version)

    async def _try_to_assemble(self, entry: StoredPolicy) -> bool:
        """`_assemble`, and False on a disk that is full: a node that starts there serves chunks
        meanwhile."""
        try:
            return await self._assemble(entry)
        except StorageError as error:
            logger.warning("not_assembled version=%d reason=%s", entry.version, error)
            return False

    async def _remove_orphans(self) -> None:
        """Weights whose policy file is gone or void: a crash came between the two removals."""
        weights = {entry.weights for entry in self._entries.values()}
        for name in await self._disk.list(self.folder):
            path = f"{self.folder}/{name}"
            if name.endswith(_WEIGHTS) and path not in weights:
                await self._disk.remove(path)

    async def _load_entry(self, path: str) -> StoredPolicy | None:
        front = await self._disk.read(path, 0, _INDEX_AT)
        length = int.from_bytes(front[:_LENGTH], "big")
        try:
            data = front[_LENGTH : _LENGTH + min(length, MAX_MANIFEST)]
            manifest = decode_manifest_untrusted(data, self._run, self._world.verify)
            listed = await self._disk.read(
                path, _INDEX_AT, manifest.anchor.chunks * INDEX_ENTRY
            )
            index = decode_index_untrusted(listed, manifest.anchor, manifest.size)
        except BadMessage:
            return None  # torn in its head: nothing of it can be believed
        entry = self._new_entry(manifest, index, has_head=True)
        if entry.path != path:
            return None
        for first, last in _batches(index):
            wire = await self._disk.read(
                path, entry.offset(first), index.offsets[last] - index.offsets[first]
            )
            chunks = list(index.chunks[first:last])
            good = await self._world.run_blocking(
                _good_chunks, chunks, wire, cost=len(wire) / HASH_RATE
            )
            entry.note_found(ChunkSet(good << first))
        return entry

    async def _check_weights(self, entry: StoredPolicy) -> bool:
        if await self._disk.size(entry.weights) != entry.manifest.size:
            return False
        hasher = blake3()
        for offset in range(0, entry.manifest.size, DECODE_BATCH):
            data = await self._disk.read(entry.weights, offset, DECODE_BATCH)
            await self._world.run_blocking(_hash_into, hasher, data, cost=len(data) / HASH_RATE)
        return hasher.digest() == entry.manifest.weights_digest


def chunks_at(count: int) -> int:
    """Where the chunks of a policy of ``count`` chunks start in its file."""
    return _INDEX_AT + count * INDEX_ENTRY


def _batches(index: Index) -> Iterator[tuple[int, int]]:
    """Runs of chunks (first, behind the last) of about `DECODE_BATCH` raw bytes."""
    first = size = 0
    for place, chunk in enumerate(index.chunks):
        if size and size + chunk.span > DECODE_BATCH:
            yield first, place
            first, size = place, 0
        size += chunk.span
    yield first, len(index)


def _runs(entry: StoredPolicy, waiting: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
    """What to write where: neighbouring chunks together, and the head in front of the first."""
    parts: list[bytes] = [] if entry.has_head else [entry.head()]
    start = 0
    end = entry.offset(0) if parts else -1
    for chunk, data in waiting.items():
        if entry.offset(chunk) != end:
            if parts:
                yield start, b"".join(parts)
            parts, start = [], entry.offset(chunk)
        parts.append(data)
        end = entry.offset(chunk) + len(data)
    if parts:
        yield start, b"".join(parts)


def _good_chunks(chunks: list[Chunk], wire: bytes) -> int:
    """The mask of chunks whose bytes, end to end in ``wire``, have the right digest."""
    view, offset, mask = memoryview(wire), 0, 0
    for place, chunk in enumerate(chunks):
        mask |= (digest_of(view[offset : offset + chunk.wire]) == chunk.digest) << place
        offset += chunk.wire
    return mask


def _hash_into(hasher: Any, data: bytes) -> None:
    """A function of this module, by which simulations know whose time is spent."""
    hasher.update(data)
