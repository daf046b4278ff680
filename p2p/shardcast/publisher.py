"""How a trainer turns files into a published version: durable first, then told."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import trio

from p2p.errors import BadMessage, LimitExceeded, LocalProtocolError, StorageError
from p2p.identity import PeerId
from p2p.shardcast.codec import ENCODE_RATE, encode_chunk
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import Roster, RosterEntry, capacity_class
from p2p.shardcast.index import (
    MAX_CHUNKS,
    MAX_FILES,
    MAX_SPAN,
    Index,
    PolicyFile,
    Span,
    check_paths_untrusted,
    digest_of,
)
from p2p.shardcast.layout import (
    LENGTH_BYTES,
    CutSpan,
    Tensor,
    cut_files,
    header_bytes,
    span_for,
    tensors_untrusted,
)
from p2p.shardcast.manifest import (
    NO_POLICY,
    Encoding,
    Manifest,
    ManifestBody,
    PolicyVersion,
)
from p2p.shardcast.patcher import WORTH, Patcher
from p2p.shardcast.store import DRAFT, HASH_RATE, READ_BATCH, Cores, PolicyStore
from p2p.shardcast.stored import StoredPolicy
from p2p.wire import MIB
from p2p.world import Disk, DiskEntry, World

PACKED_AHEAD: Final = 16 * MIB
"""Raw bytes at the front of a policy that are packed before it is signed, so that the manifest
says what a policy weighs on its way, and the first chunks wait for no core."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Digested:
    """A published version: its index, and the chunks that are packed already."""

    index: Index
    wires: dict[int, bytes]

    @property
    def wire(self) -> int:
        """Bytes that all chunks will have, if the others pack like these."""
        packed = sum(map(len, self.wires.values()))
        raw = sum(self.index.spans[chunk].size for chunk in self.wires)
        return max(1, packed * self.index.size // raw)


@dataclass(frozen=True, slots=True)
class _PatchDraft:
    """A patch that no manifest names yet."""

    base: PolicyVersion
    path: str
    digested: Digested


@dataclass(frozen=True, slots=True)
class _SpanBatch:
    """Consecutive spans of one file, read at once."""

    path: str
    offset: int
    first: int
    cuts: tuple[CutSpan, ...]
    packed: int
    """How many of the spans, counted from the first, are packed."""


class _SpanWork:
    """Reads batches, hashes their spans, packs some; on all cores, so in any order."""

    def __init__(self, disk: Disk, cores: Cores, root: str) -> None:
        self._disk = disk
        self._cores = cores
        self._root = root
        self._spans: dict[int, Span] = {}
        self.wires: dict[int, bytes] = {}

    async def do(self, batch: _SpanBatch) -> None:
        """Hash and pack one batch. Raises `LocalProtocolError` if the files are gone."""
        size = sum(cut.size for cut in batch.cuts)
        path = _join(self._root, batch.path)
        try:
            raw = await self._disk.read(path, batch.offset, size)
        except FileNotFoundError:
            raw = b""
        if len(raw) != size:
            raise LocalProtocolError(
                f"{self._disk.locate(path)} was changed while it was published"
            )
        packed = sum(cut.size for cut in batch.cuts[: batch.packed])
        cost = size / HASH_RATE + packed / ENCODE_RATE
        made = await self._cores.run(encode_spans, raw, batch.cuts, batch.packed, cost=cost)
        for number, (span, wire) in enumerate(made, batch.first):
            self._spans[number] = span
            if wire is not None:
                self.wires[number] = wire

    def spans(self, count: int) -> list[Span]:
        """All of them, in order."""
        return [self._spans[number] for number in range(count)]


def encode_spans(
    raw: bytes, cuts: Sequence[CutSpan], packed: int
) -> list[tuple[Span, bytes | None]]:
    """The spans that lie end to end in ``raw``, and the chunks of the first ``packed``."""
    made: list[tuple[Span, bytes | None]] = []
    view, at = memoryview(raw), 0
    for number, cut in enumerate(cuts):
        piece = view[at : at + cut.size]
        span = Span(digest_of(piece), cut.size, cut.kind)
        made.append((span, encode_chunk(span, piece) if number < packed else None))
        at += cut.size
    return made


def _batches(
    files: Sequence[PolicyFile], cuts: Sequence[Sequence[CutSpan]]
) -> Iterator[_SpanBatch]:
    """All spans, in batches of about `READ_BATCH` bytes."""
    first = seen = 0
    for file, spans in zip(files, cuts, strict=True):
        offset = 0
        batch: list[CutSpan] = []
        for number, cut in enumerate(spans):
            batch.append(cut)
            size = sum(one.size for one in batch)
            last = number + 1 == len(spans)
            if not last and size + spans[number + 1].size <= READ_BATCH:
                continue
            packed = sum(
                seen + before < PACKED_AHEAD
                for before in accumulate((one.size for one in batch[:-1]), initial=0)
            )
            yield _SpanBatch(file.path, offset, first, tuple(batch), packed)
            first, offset, seen, batch = first + len(batch), offset + size, seen + size, []


def _join(root: str, path: str) -> str:
    return f"{root}/{path}" if path else root


class Digester:
    """From files to their index. What is published stays where it is."""

    def __init__(self, world: World, config: ShardcastConfig) -> None:
        self._world = world
        self._config = config
        self._cores = Cores(world)

    async def digest(self, path: str) -> Digested:
        """Cut what is at ``path`` in spans and hash them; pack those at the front. Raises
        `LocalProtocolError`, `LimitExceeded`."""
        found = await self._list(path)
        files = [PolicyFile(entry.path, entry.size) for entry in found]
        size = sum(file.size for file in files)
        cuts = cut_files(
            [(one.size, await self._tensors(_join(path, one.path), one.size)) for one in found],
            self._config.chunk_bytes or span_for(size),
        )
        if cuts is None:
            raise LimitExceeded(
                f"{self._locate(path)}: {size} bytes in {len(files)} files are over the limit"
                f" of {MAX_CHUNKS} spans of {MAX_SPAN} bytes"
            )
        digested = await self._hash(path, files, cuts)
        if await self._list(path) != found:
            raise LocalProtocolError(f"{self._locate(path)} was changed while it was published")
        return digested

    async def digest_patch(self, path: str, size: int) -> Digested | None:
        """The same for a file of our own making, cut blindly; None if it is too large."""
        cuts = cut_files([(size, ())], self._config.chunk_bytes or span_for(size))
        return await self._hash(path, [PolicyFile("", size)], cuts) if cuts else None

    async def _hash(
        self, path: str, files: Sequence[PolicyFile], cuts: Sequence[Sequence[CutSpan]]
    ) -> Digested:
        work = _SpanWork(self._world.disk, self._cores, path)
        await self._cores.for_each(_batches(files, cuts), work.do)
        return Digested(Index.of(files, work.spans(sum(map(len, cuts)))), work.wires)

    async def _list(self, path: str) -> Sequence[DiskEntry]:
        """The files to publish. Raises `LocalProtocolError` if they can be no policy."""
        found = await self._world.disk.walk(path, MAX_FILES + 1)
        if not sum(entry.size for entry in found):
            raise LocalProtocolError(
                f"there are no weights in {self._locate(path)}: its files are empty or hidden"
            )
        if len(found) > MAX_FILES:
            raise LimitExceeded(
                f"{self._locate(path)} has more files than the limit of {MAX_FILES}"
            )
        for entry in found:
            if not entry.is_plain:
                raise LocalProtocolError(
                    f"{self._locate(_join(path, entry.path))} is a symbolic link, or no file:"
                    " publish a folder of plain files (cp -rL makes one)"
                )
        paths = sorted(entry.path for entry in found)
        try:
            check_paths_untrusted(paths)
        except BadMessage as error:
            raise LocalProtocolError(
                f"{self._locate(path)} cannot be published: {error}"
            ) from None
        return sorted(found, key=lambda entry: entry.path)

    def _locate(self, path: str) -> str:
        """The path that a person knows."""
        return self._world.disk.locate(path)

    async def _tensors(self, path: str, size: int) -> list[Tensor]:
        """The tensors of a safetensors file; none of any other."""
        read = self._world.disk.read
        try:
            length = header_bytes(await read(path, 0, LENGTH_BYTES + 1), size)
            if not length:
                return []
            return tensors_untrusted(await read(path, LENGTH_BYTES, length), size)
        except BadMessage as error:
            raise LocalProtocolError(
                f"{self._locate(path)} cannot be published: {error}"
            ) from None


class PolicyPublisher:
    """Digests, signs and stores our own policies, and keeps the roster of whom to feed."""

    def __init__(
        self,
        world: World,
        config: ShardcastConfig,
        run: bytes,
        statements: Statements,
        store: PolicyStore,
        roster: Callable[[], Sequence[RosterEntry]],
        believe: Callable[[Sequence[RosterEntry]], Sequence[RosterEntry]],
    ) -> None:
        """``roster`` tells who is there and what each claims; ``believe`` what to think of
        that."""
        self._statements = statements
        self._world = world
        self._config = config
        self._run = run
        self._store = store
        self._digester = Digester(world, config)
        self._patcher = Patcher(world, store.cores)
        self._roster = roster
        self._believe = believe
        self._told: dict[PeerId, int] | None = None
        self._told_at = 0.0
        self._turn = trio.Lock()

    async def prepare(
        self,
        version: PolicyVersion,
        path: str,
        newest_out: Callable[[], Manifest | None],
        note: bytes = b"",
    ) -> ev.Publish | Manifest:
        """Make a version durable; a `Manifest` if just this was published before.

        ``newest_out`` is asked when it is our turn: the publication before this one has told
        the core by then. Raises `LocalProtocolError` rather than contradict what is out.
        """
        async with self._turn:
            digested = await self._digester.digest(path)
            index, wires = digested.index, digested.wires
            newest = max(
                # Of one version our own comes first: to name another's for our predecessor
                # would contradict what we signed.
                (one for one in (self._store.newest_own, newest_out()) if one is not None),
                key=lambda manifest: manifest.version,
                default=None,
            )
            if newest is not None and newest.version >= version:
                is_same = newest.version == version and newest.weights_digest == index.digest
                if is_same and self._store.stored(version) is not None:
                    return newest
                if not is_same:
                    raise LocalProtocolError(
                        f"version {version} cannot be published: version {newest.version} is"
                        " out"
                    )
                manifest = newest  # signed before, and its files were gone since
                patch = None
            else:
                patch = await self._make_patch(newest, digested, path)
                manifest = self._sign(version, digested, newest, patch, note)
            await self._store.commit_own(manifest, index, path)
            self._cache(manifest.digest, wires)
            if patch is not None:
                await self._store.commit_patch(manifest, patch.digested.index, patch.path)
                self._cache(patch.digested.index.digest, patch.digested.wires)
            roster = self._next_roster()
            if roster is not None:
                await self._keep_roster(roster)
            return ev.Publish(
                manifest, index, roster, patch.digested.index if patch is not None else None
            )

    def _cache(self, name: bytes, wires: dict[int, bytes]) -> None:
        for chunk, wire in wires.items():
            self._store.cache_nowait(name, chunk, wire)

    async def _make_patch(
        self, newest: Manifest | None, digested: Digested, path: str
    ) -> _PatchDraft | None:
        """Make the patch from the version before, if that is here and the patch is worth it."""
        entry = self._store.stored(newest.version) if newest is not None else None
        if newest is None or entry is None or entry.manifest.trainer != newest.trainer:
            return None
        folder = f"{self._store.folder}/{DRAFT}"
        await self._world.disk.remove(folder)
        draft, most = f"{folder}/{newest.version}.patch", int(WORTH * digested.wire)
        with entry.pin():
            size = await self._patcher.write(entry, digested.index, path, draft, most=most)
        patch = await self._digester.digest_patch(draft, size) if size else None
        return _PatchDraft(newest.version, draft, patch) if patch is not None else None

    async def regroup(self) -> Roster | None:
        """A new roster in the middle of a hand-out, durable; None if it would be the old
        one."""
        async with self._turn:
            roster = self._sign_roster()
            if roster is not None:
                await self._keep_roster(roster)
            return roster

    def _sign(
        self,
        version: PolicyVersion,
        digested: Digested,
        newest: Manifest | None,
        patch: _PatchDraft | None,
        note: bytes,
    ) -> Manifest:
        index = digested.index
        patches = [Encoding.patch(patch.digested.index, patch.base)] if patch else []
        body = ManifestBody(
            self._run,
            version,
            newest.version if newest is not None else NO_POLICY,
            newest.digest if newest is not None else b"",
            index.digest,
            index.size,
            (Encoding.anchor(index, digested.wire), *patches),
            note,
        )
        return body.sign(self._world.signer)

    async def _keep_roster(self, roster: Roster) -> None:
        """A roster that is not on disk only costs the next life some pulls: the version goes
        out without."""
        try:
            await self._store.keep_roster(roster)
        except StorageError as error:
            logger.warning("roster_not_kept reason=%s", error)

    def _next_roster(self) -> Roster | None:
        """A new epoch for a new version, if the last one is old enough or was empty."""
        early = self._world.now() < self._told_at + self._config.roster_interval
        if self._told and early and not self._world.buggify("shardcast/early roster"):
            return None
        return self._sign_roster()

    def _sign_roster(self) -> Roster | None:
        """A new epoch if those to feed have changed."""
        local = self._world.signer.peer_id
        entries = self._believe([entry for entry in self._roster() if entry.peer != local])
        ranks = {entry.peer: capacity_class(entry.upload) for entry in entries}
        if ranks == self._told:
            return None
        last = self._statements.roster(local)
        self._told, self._told_at = ranks, self._world.now()
        epoch = max(int(self._world.wall() * 1000), last.epoch + 1 if last is not None else 0)
        return Roster.sign(self._world.signer, self._run, epoch, entries)


async def publish_next(
    publish: Callable[[PolicyVersion], Awaitable[PolicyVersion]], last: PolicyVersion
) -> PolicyVersion:
    """Publish what is there: as the ``last`` version that it was, or as the next one if it has
    changed. ``publish`` raises `LocalProtocolError` if it has."""
    if last != NO_POLICY:
        try:
            return await publish(last)
        except LocalProtocolError:
            pass  # it has changed since
    return await publish(PolicyVersion(last + 1))


@asynccontextmanager
async def publish_alone(
    world: World, config: ShardcastConfig, run: bytes, path: str
) -> AsyncIterator[StoredPolicy]:
    """Sign what is at ``path`` as `publish_next` does, for a program without a swarm; hold the
    store for the length of the block. Raises what `PolicyPublisher.prepare` does."""
    local = world.signer.peer_id
    store = PolicyStore(world, config, run)
    statements = Statements(run, local.__eq__, world.verify)
    publisher = PolicyPublisher(world, config, run, statements, store, tuple, tuple)

    async def publish(version: PolicyVersion) -> PolicyVersion:
        await publisher.prepare(version, path, lambda: store.newest_own)
        return version

    with store.holding():
        await store.load()
        last = store.newest_own
        version = await publish_next(publish, last.version if last is not None else NO_POLICY)
        await store.prune()
        entry = store.stored(version)
        assert entry is not None, "it was just published"
        yield entry
