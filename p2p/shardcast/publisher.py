"""A publisher turns files into a version, which is durable before it is announced.

Its patch from the version before is coded on all cores, some runs at a time, and written as
they are done: neither version is ever in memory as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from p2p.errors import BadMessage, LimitExceeded, LocalProtocolError, StorageError
from p2p.identity import PeerId
from p2p.shardcast.codec import ADAPTER, ENCODE_RATE, encode_chunk
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
from p2p.shardcast.layout import Tensor, cut_files, span_for
from p2p.shardcast.manifest import NO_POLICY, Encoding, Manifest, PolicyVersion
from p2p.shardcast.patch import SpanRun, encode_run, encode_table, is_alike, runs_of
from p2p.shardcast.store import (
    DRAFT,
    HASH_RATE,
    Cores,
    PolicyStore,
    StoredPolicy,
    batches,
    tensors_of,
)
from p2p.wire import MIB
from p2p.world import DiskEntry, World

PACKED_AHEAD: Final = 16 * MIB
"""Raw bytes at the front of a version that are packed before it is signed. From them the
manifest estimates the bytes on the wire, and the first chunks wait for no core."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Digested:
    """A version or patch to be published: its index, and the chunks that are packed already."""

    index: Index
    wires: dict[int, bytes]

    @property
    def wire(self) -> int:
        """Estimated bytes of all chunks, if the others pack as well as these."""
        packed = sum(map(len, self.wires.values()))
        raw = sum(self.index.spans[chunk].size for chunk in self.wires)
        return max(1, packed * self.index.size // raw)

    def is_worth(self, patch: int) -> bool:
        """Return True if a patch of this many bytes, instead of the whole, is worth the work
        that it costs its receivers, and the room on their disks."""
        return patch <= 0.8 * self.wire


def encode_spans(
    raw: bytes, cuts: Sequence[Span], packed: int
) -> list[tuple[Span, bytes | None]]:
    """Hash the spans that lie end to end in ``raw``, and pack the first ``packed`` of them.
    Return both."""
    made: list[tuple[Span, bytes | None]] = []
    view, at = memoryview(raw), 0
    for number, cut in enumerate(cuts):
        piece = view[at : at + cut.size]
        span = Span(digest_of(piece), cut.size, cut.kind)
        made.append((span, encode_chunk(span, piece) if number < packed else None))
        at += cut.size
    return made


def _join(root: str, path: str) -> str:
    return f"{root}/{path}" if path else root


class Digester:
    """Makes the index of files to be published. The files stay where they are."""

    def __init__(self, world: World, config: ShardcastConfig, cores: Cores) -> None:
        self._disk = world.disk
        self._config = config
        self._cores = cores

    async def digest(self, path: str) -> Digested:
        """Cut the files at ``path`` into spans and hash them. The first spans are also packed,
        so that a hand-out can begin at once.

        Raises:
            LocalProtocolError: The files cannot be a version, or change meanwhile.
            LimitExceeded: There are too many files or bytes.
        """
        found = await self._list(path)
        files = [PolicyFile(entry.path, entry.size) for entry in found]
        size = sum(file.size for file in files)
        cuts = cut_files(
            [(one.size, await self._tensors(_join(path, one.path), one.size)) for one in found],
            self._config.chunk_bytes or span_for(size),
        )
        if cuts is None:
            raise LimitExceeded(
                f"{self._disk.locate(path)}: {size} bytes in {len(files)} files are over the"
                f" limit of {MAX_CHUNKS} spans of {MAX_SPAN} bytes"
            )
        digested = await self.hash(path, files, cuts)
        if await self._list(path) != found:
            raise LocalProtocolError(
                f"{self._disk.locate(path)} was changed while it was published"
            )
        return digested

    async def hash(
        self, root: str, files: Sequence[PolicyFile], cuts: Sequence[Sequence[Span]]
    ) -> Digested:
        draft = Index.of(files, [span for row in cuts for span in row])
        spans, wires = list(draft.spans), {}

        async def do(batch: tuple[int, int]) -> None:
            first, end = batch
            place = draft.place(first)
            path = _join(root, files[place.file].path)
            size = draft.offsets[end] - draft.offsets[first]
            try:
                raw = await self._disk.read(path, place.offset, size)
            except FileNotFoundError:
                raw = b""
            if len(raw) != size:
                raise LocalProtocolError(
                    f"{self._disk.locate(path)} was changed while it was published"
                )
            packed = sum(draft.offsets[number] < PACKED_AHEAD for number in range(first, end))
            cost = size / HASH_RATE
            cost += (draft.offsets[first + packed] - draft.offsets[first]) / ENCODE_RATE
            made = await self._cores.run(
                encode_spans, raw, draft.spans[first:end], packed,
                size=size, rate=size / cost, few=0,
            )  # fmt: skip
            for number, (span, wire) in enumerate(made, first):
                spans[number] = span
                if wire is not None:
                    wires[number] = wire

        await self._cores.for_each(batches(draft), do)
        return Digested(Index.of(files, spans), wires)

    async def _list(self, path: str) -> Sequence[DiskEntry]:
        """Return the files to publish. Raise `LocalProtocolError` if they cannot be a
        version."""
        found = await self._disk.walk(path, MAX_FILES + 1)
        where = self._disk.locate(path)
        if not sum(entry.size for entry in found):
            raise LocalProtocolError(
                f"there are no weights in {where}: its files are empty or hidden"
            )
        if len(found) > MAX_FILES:
            raise LimitExceeded(f"{where} has more files than the limit of {MAX_FILES}")
        for entry in found:
            if not entry.is_plain:
                raise LocalProtocolError(
                    f"{self._disk.locate(_join(path, entry.path))} is a link to a folder or"
                    " out of this one, or no file: publish a folder of plain files (cp -rL"
                    " makes one)"
                )
        try:
            check_paths_untrusted(sorted(entry.path for entry in found))
        except BadMessage as error:
            raise LocalProtocolError(f"{where} cannot be published: {error}") from None
        return sorted(found, key=lambda entry: entry.path)

    async def _tensors(self, path: str, size: int) -> list[Tensor]:
        try:
            return await tensors_of(self._disk, path, size)
        except BadMessage as error:
            raise LocalProtocolError(
                f"{self._disk.locate(path)} cannot be published: {error}"
            ) from None


class PolicyPublisher:
    """Digests, signs and stores our own versions, and keeps the roster of whom to feed."""

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
        """Publish for one node. ``roster`` returns the peers and their claims; ``believe``
        returns the claims that are believed."""
        self._statements = statements
        self._world = world
        self._disk = world.disk
        self._config = config
        self._run = run
        self._store = store
        self._digester = Digester(world, config, store.cores)
        self._roster = roster
        self._believe = believe
        self._told: dict[PeerId, tuple[int, bool]] | None = None
        self._told_at = 0.0
        self._turn = trio.Lock()

    async def prepare(
        self,
        version: PolicyVersion,
        path: str,
        newest_out: Callable[[], Manifest | None],
        note: bytes = b"",
        adapter: tuple[str, PolicyVersion] | None = None,
    ) -> ev.Publish | Manifest:
        """Make a version durable; a `Manifest` if just this was published before. With an
        ``adapter``, a file and the version that it adds to, that travels if it leads there.

        ``newest_out`` is asked when it is our turn: the publication before this one has told
        the core by then. Raises `LocalProtocolError` rather than contradict what is out.
        """
        async with self._turn:
            digested = await self._digester.digest(path)
            index = digested.index
            newest = max(
                # Of one version our own comes first: to name another's for our predecessor
                # would contradict what we signed.
                (one for one in (self._store.newest_own, newest_out()) if one is not None),
                key=lambda manifest: manifest.version,
                default=None,
            )
            patch, draft = None, f"{self._store.folder}/{DRAFT}/patch"
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
            else:
                encodings = [Encoding.anchor(index, digested.wire)]
                if adapter is not None:
                    patch = await self._make_adapter(*adapter, digested, draft)
                    if patch is not None:
                        encodings.append(Encoding.patch(patch.index, adapter[1], ADAPTER))
                if patch is None:
                    patch = await self._make_patch(newest, digested, path, draft)
                    if patch is not None and newest is not None:
                        encodings.append(Encoding.patch(patch.index, newest.version))
                before = (NO_POLICY, b"") if newest is None else (newest.version, newest.digest)
                unsigned = Manifest(
                    self._world.signer.peer_id, self._run, version, *before, index.digest,
                    index.size, tuple(encodings), note,
                )  # fmt: skip
                manifest = unsigned.sign(self._world.signer)
            await self._store.commit_own(manifest, index, digested.wires, source=path)
            if patch is not None:
                await self._store.commit_own(manifest, patch.index, patch.wires, draft=draft)
            # A new epoch for a new version, if the last one is old enough or was empty.
            early = self._world.now() < self._told_at + self._config.roster_interval
            is_kept = self._told and early and not self._world.buggify("shardcast/early roster")
            roster = None if is_kept else await self._make_roster()
            return ev.Publish(
                manifest, index, roster, patch.index if patch is not None else None
            )

    async def regroup(self) -> Roster | None:
        """Return a new, durable roster in the middle of a hand-out; None if it equals the old
        one."""
        async with self._turn:
            return await self._make_roster()

    async def _make_roster(self) -> Roster | None:
        local = self._world.signer.peer_id
        entries = self._believe([entry for entry in self._roster() if entry.peer != local])
        ranks = {
            entry.peer: (capacity_class(entry.upload), entry.is_closed) for entry in entries
        }
        if ranks == self._told:
            return None
        last = self._statements.roster(local)
        self._told, self._told_at = ranks, self._world.now()
        epoch = max(int(self._world.wall() * 1000), last.epoch + 1 if last is not None else 0)
        roster = Roster.sign(self._world.signer, self._run, epoch, entries)
        try:
            await self._store.keep_roster(roster)
        except StorageError as error:  # it costs the next life some pulls
            logger.warning("roster_not_kept reason=%s", error)
        return roster

    async def _make_patch(
        self, newest: Manifest | None, digested: Digested, path: str, draft: str
    ) -> Digested | None:
        """Make the patch from the version before, if that version is here and the patch saves
        enough."""
        base, index = self._store.stored(newest.version) if newest else None, digested.index
        if (
            newest is None
            or base is None
            or base.manifest.publisher != newest.publisher
            or not is_alike(base.index, index)
        ):
            return None
        deltas: dict[int, bytes | None] = {}

        async def encode(run: SpanRun) -> None:
            place = index.place(run.first)
            paths = base.file(place.file), _join(path, index.files[place.file].path)
            try:
                old, new = [await self._disk.read(p, place.offset, run.size) for p in paths]
            except FileNotFoundError:
                old = new = b""
            deltas[run.first] = await self._store.cores.run(
                encode_run,
                run,
                base.index.spans[run.first : run.end],
                old,
                new,
                size=run.size,
                rate=900e6,
                few=0,
            )

        runs, wires = runs_of(index), list[int]()
        step = 2 * self._world.cores
        await self._disk.remove(f"{self._store.folder}/{DRAFT}")
        with base.pin():
            for first in range(0, len(runs), step):
                some = runs[first : first + step]
                await self._store.cores.for_each(some, encode)
                made = [delta for run in some if (delta := deltas.pop(run.first)) is not None]
                wires += map(len, made)
                if len(made) < len(some) or not digested.is_worth(sum(wires)):
                    return None
                await self._disk.append(draft, b"".join(made))
        table = encode_table(base.index, index, runs, wires)
        size = sum(wires) + len(table)
        if not digested.is_worth(size):
            return None
        await self._disk.append(draft, table)
        return await self._digest_draft(draft, size)

    async def _digest_draft(
        self, draft: str, size: int, tensors: Sequence[Tensor] = ()
    ) -> Digested | None:
        cuts = cut_files([(size, tensors)], self._config.chunk_bytes or span_for(size))
        return await self._digester.hash(draft, [PolicyFile("", size)], cuts) if cuts else None

    async def _make_adapter(
        self, path: str, version: PolicyVersion, digested: Digested, draft: str
    ) -> Digested | None:
        """Take the adapter at ``path`` as what travels, if it leads to the published weights
        and saves enough."""
        base, index = self._store.stored(version), digested.index
        entries = await self._disk.walk(path, 1)
        if base is None or not entries or not is_alike(base.index, index):
            return None
        size = entries[0].size
        runs = runs_of(index)
        table = encode_table(base.index, index, runs, [size, *[0] * (len(runs) - 1)])
        if not digested.is_worth(size + len(table)):
            return None
        right = 0

        async def judge(run: SpanRun) -> None:
            nonlocal right
            _, mask = await self._store.merge_run(read, base, index, run)
            right += mask.bit_count()

        with base.pin():
            try:
                read = await self._store.read_adapter(path, size, base)
            except BadMessage as error:
                raise LocalProtocolError(
                    f"{self._disk.locate(path)} is no adapter of version {version}: {error}"
                ) from None
            await self._store.cores.for_each(runs, judge)
        if right < len(index):
            logger.warning("adapter_differs version=%d: a patch is published", version)
            return None
        await self._disk.remove(f"{self._store.folder}/{DRAFT}")
        for offset in range(0, size, PACKED_AHEAD):
            await self._disk.append(draft, await self._disk.read(path, offset, PACKED_AHEAD))
        await self._disk.append(draft, table)
        tensors = await tensors_of(self._disk, path, size)
        return await self._digest_draft(draft, size + len(table), tensors)


async def publish_next(
    publish: Callable[[PolicyVersion], Awaitable[PolicyVersion]], last: PolicyVersion
) -> PolicyVersion:
    """Publish the present files: again as the ``last`` version if they are unchanged, else as
    the next. ``publish`` raises `LocalProtocolError` if they have changed."""
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
    """Sign the files at ``path`` as `publish_next` does, for a program without a swarm. The
    store stays open for the length of the block.

    Raises what `PolicyPublisher.prepare` raises.
    """
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
