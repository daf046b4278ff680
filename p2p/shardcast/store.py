"""The policies on disk: written, checked and pruned; roles load from them, peers are served.

Theory of operation ------------------- A policy has a *head* (its manifest and index) and its
files. While spans are missing the files are in ``NAME.part``, which has its full length from
the start, so that a disk that is too small fails before anything was fetched. A verified span
is written at once. At most one span for each stream waits in memory, so a kill -9 costs each
stream one chunk. When all spans are here, files and head are fsynced and ``NAME.part`` gets its
final name. Only verified files have a final name, and peers and roles are told afterwards.

At the start the spans of an earlier life are hashed, and those that match are kept: 0.3 s of a
core for each GB. There is no bitmap of the spans on disk: it could not be trusted after a crash
of the machine, and would cost a write for each chunk.

A chunk is packed when a peer asks for it. Chunks that pass through this node stay in memory as
they came (`ShardcastConfig.cache_bytes`), so relays pack nothing.

A policy of this node's own is not copied. Its head says where its files are, they are fsynced
and the head written durably before it is announced: an origin that crashes has published a
version entirely or never mentioned it. Every span that is read of it is compared with its
digest; if the files were changed or removed, it is no longer served.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Final, TypeVar

import trio

from p2p.bounded import BoundedDict
from p2p.equivocation import Equivocation
from p2p.errors import BadMessage, NoRoom, ShoalError, StorageError, Unnameable
from p2p.identity import Verify
from p2p.shardcast.adapter import (
    LORA,
    AdapterFile,
    Piece,
    merge_run_untrusted,
    read_adapter_untrusted,
    rows_of,
)
from p2p.shardcast.chunkset import EMPTY, ChunkSet, Selection
from p2p.shardcast.codec import ENCODE_RATE, Bytes, encode_chunk
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.forest import Roster, decode_roster_untrusted
from p2p.shardcast.index import MAX_INDEX, Index, Span, digest_of, right_mask
from p2p.shardcast.layout import LENGTH_BYTES, Tensor, header_bytes, tensors_untrusted
from p2p.shardcast.manifest import (
    MAX_MANIFEST,
    NO_POLICY,
    Manifest,
    PolicyVersion,
    decode_manifest_untrusted,
)
from p2p.shardcast.patch import (
    TAIL,
    PatchRun,
    SpanRun,
    apply_run_untrusted,
    decode_table_untrusted,
    is_alike,
    patch_runs_untrusted,
    table_bytes_untrusted,
)
from p2p.wire import KI, MIB, fields_untrusted, pack, unpack_untrusted
from p2p.world import OFF_LOOP, Disk, World

HEAD: Final = ".policy"
"""Suffix of the file with a policy's manifest and index, and with its files' path if this node
published it."""
PART: Final = ".part"
"""Suffix of a policy's file or folder while spans are missing."""
WHOLE: Final = (".safetensors", ".files")
"""Suffixes of a complete policy: of one file, and of a folder."""
PATCH_FILE: Final = ".patch"
"""Suffix of the file of a complete patch."""
HASH_RATE: Final = 3e9
"""Modelled cost of reading spans back: bytes of BLAKE3 per second on one core."""
DRAFT: Final = "publishing"
"""Folder of a publisher's patches that are not yet named by a manifest."""
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class Cores:
    """Runs work in threads, at most as many at a time as there are cores.

    More would only take turns, each with 4 MiB of raw bytes and as much packed in memory. A
    simulation models one core.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._limit = trio.CapacityLimiter(world.cores)

    async def run(
        self, function: Callable[..., _T], *args: object, size: int, rate: float,
        few: int = OFF_LOOP,
    ) -> _T:  # fmt: skip
        """Call a function that works on ``size`` bytes, at ``rate`` bytes a second as modelled,
        when a core is free; at once if they are at most ``few``."""
        if size <= few:
            return function(*args)
        async with self._limit:
            return await self._world.run_blocking(function, *args, cost=size / rate)

    async def for_each(
        self, items: Iterable[_T], work: Callable[[_T], Awaitable[object]], at_once: int = 0
    ) -> None:
        """Await ``work`` for each item, for ``at_once`` items at a time; by default for two per
        core: while one reads, another computes."""
        left, errors = iter(items), []

        async def take() -> None:
            try:
                for item in left:
                    await work(item)
            except ShoalError as error:  # bare: callers know no groups of errors
                errors.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            cores = self._world.cores
            for _ in range(at_once or (1 if cores == 1 else 2 * cores)):
                nursery.start_soon(take)
        if errors:
            raise errors[0]


class StoredPolicy:
    """A policy on this disk, complete or not."""

    def __init__(self, manifest: Manifest, index: Index, folder: str, source: str = "") -> None:
        """Describe a policy. ``source`` is the path from which this node published it, if it
        did."""
        self.manifest = manifest
        self.index = index
        self.source = source
        self.encoding = manifest.encoding_of(index)
        """The stored encoding; the anchor stands for the policy itself."""
        self.stem = f"{folder}/v{manifest.version:016d}-{self.name.hex()[:8]}"
        self.verified = EMPTY
        """Spans that were verified, in memory or on disk."""
        self.stored = False
        """True if the policy is complete, durable and under its final name."""
        self.has_room = False
        """True if the head and the files are on the disk, with room for every span."""
        self.unwritten: dict[int, Bytes] = {}
        """Maps each verified span that is not yet written to its bytes."""
        self.selected: ChunkSet | None = None
        """Spans of the selected files, once they are looked up: after each write."""
        self.writing = trio.Lock()
        """Held by the task that writes its spans."""
        self.pins = 0

    def __repr__(self) -> str:
        return f"StoredPolicy(v{self.version}, {len(self.verified)} of {len(self.index)})"

    @property
    def version(self) -> PolicyVersion:
        """The version of the policy."""
        return self.manifest.version

    @property
    def name(self) -> bytes:
        """The digest by which messages name it."""
        return self.manifest.name_of(self.encoding)

    @property
    def is_patch(self) -> bool:
        """True if it is a patch or an adapter, which turns another policy into this one."""
        return not self.encoding.is_anchor

    # Where it is

    @property
    def head(self) -> str:
        """The path of the head file."""
        return self.stem + HEAD

    @property
    def part(self) -> str:
        """The path of its file or folder while spans are missing."""
        return self.stem + PART

    @property
    def final(self) -> str:
        """The path of the policy's file or folder once it is complete."""
        if self.is_patch:
            return self.stem + PATCH_FILE
        return self.source or self.stem + WHOLE[self.index.is_folder]

    @property
    def weights(self) -> str:
        """The current path of the policy's file or folder."""
        return self.final if self.stored else self.part

    def file(self, number: int, *, is_final: bool = False) -> str:
        """Return the current or final path of one of the policy's files."""
        weights, path = self.final if is_final else self.weights, self.index.files[number].path
        return f"{weights}/{path}" if path else weights

    @property
    def files(self) -> list[str]:
        """Return the current path of each file."""
        return [self.file(number) for number in range(len(self.index.files))]

    @property
    def footprint(self) -> int:
        """Return the bytes that it occupies on disk."""
        return self.index.size + len(self.index.data)

    def encode_head(self) -> bytes:
        """Return the bytes of its head."""
        return pack([self.manifest.encode(), self.index.data, self.source])

    # What is here

    @property
    def is_whole(self) -> bool:
        """True if every span was verified."""
        return len(self.verified) == len(self.index)

    def add(self, span: int, raw: Bytes) -> None:
        """Add a verified span, which is to be written."""
        self.verified = self.verified.including(span)
        self.unwritten[span] = raw

    # Who needs it

    @contextmanager
    def pin(self) -> Iterator[None]:
        """Keep the policy on disk for the length of the block."""
        self.pins += 1
        try:
            yield
        finally:
            self.pins -= 1


def decode_head_untrusted(data: bytes, run: bytes, verify: Verify, folder: str) -> StoredPolicy:
    """Decode the policy that a head describes. Raise `BadMessage`, and nothing else: the head
    may be torn, or of an older Shoal."""
    fields = fields_untrusted(unpack_untrusted(data), bytes, bytes, str, what="policy's head")
    manifest = decode_manifest_untrusted(fields[0], run, verify)
    return StoredPolicy(manifest, manifest.index_untrusted(fields[1]), folder, fields[2])


class DiskTrial:
    """Waits for a disk that refused, by trials.

    A disk is full for minutes (a log is rotated, its owner makes room) or for good (it is too
    small, or has gone read-only). Either way a node that can read goes on: it serves what it
    holds, and only what needs the disk waits. Pauses double, since a disk that refuses is often
    one that is slow to say so.
    """

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._trial = f"{folder}/trial"
        self.rest()

    def rest(self) -> None:
        """Begin the next wait with a short pause, since the disk has taken data."""
        self._pause = 5.0

    async def wait(self, needed: int = 0) -> None:
        """Pause, then return once the disk takes data and has ``needed`` bytes free."""
        while True:
            await self._world.sleep(self._pause)
            # A person who has made room waits at most this long. It means 120 trials, 120 MiB,
            # an hour.
            self._pause = min(2 * self._pause, 30.0)
            if await self.takes_data(needed):
                return

    async def takes_data(self, needed: int = 0) -> bool:
        """Return True if a trial can be written, and ``needed`` bytes are free."""
        try:
            if needed and await self._world.disk.free() < needed:
                return False
            # Bytes written to find out whether there is room: a full file system still takes a
            # few.
            await self._world.disk.replace(self._trial, bytes(MIB))
            await self._world.disk.remove(self._trial)
        except StorageError as error:
            logger.debug("disk.still_refuses reason=%s", error)
            return False
        return True


class PolicyStore:
    """The policies of one run on one node's disk."""

    def __init__(
        self,
        world: World,
        config: ShardcastConfig,
        run: bytes,
        selection: Selection | None = None,
    ) -> None:
        self._world = world
        self._selection = selection
        self._disk = world.disk
        self._config = config
        self._run = run
        self.cores = Cores(world)
        self.folder = f"{config.folder}/{run.hex()[:16]}"
        """Folder of this run's policies."""
        self._roster = f"{self.folder}/roster"
        self._convictions = f"{self.folder}/convictions"
        self._entries: dict[bytes, StoredPolicy] = {}
        self._cache: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._cached = 0
        # Damaged files that are remembered: more are not worth naming to a person.
        self.damaged: BoundedDict[str, str] = BoundedDict(64)
        """Maps the absolute path of each file that differs from what was published or fetched
        to the problem."""
        self._packing: dict[tuple[bytes, int], trio.Event] = {}
        """Chunks that a task is packing, with the event for which others that want them
        wait."""
        self._preparing = trio.Lock()

    def __repr__(self) -> str:
        return f"PolicyStore({self.folder}, {len(self._entries)} policies)"

    def holding(self) -> AbstractContextManager[None]:
        """Lock the store against other processes for the length of the block. Otherwise one
        process could rename a ``NAME.part`` that another is still writing.

        Raises:
            StorageError: Another process holds the lock.
        """
        return self._disk.holding(f"{self.folder}/lock")

    def entry(self, policy: bytes) -> StoredPolicy | None:
        """Return a policy that is here, complete or not; None if it is not here."""
        return self._entries.get(policy)

    def stored(self, version: PolicyVersion) -> StoredPolicy | None:
        """Return a complete version; None if it is not here."""
        return next((e for e in self._policies if e.stored and e.version == version), None)

    @property
    def _policies(self) -> list[StoredPolicy]:
        return [entry for entry in self._entries.values() if not entry.is_patch]

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Versions that are complete, newest first."""
        versions = dict.fromkeys(e.version for e in self._policies if e.stored)
        return tuple(sorted(versions, reverse=True))

    @property
    def newest_own(self) -> Manifest | None:
        """The newest version that this node has signed, whether or not it is here."""
        local = self._world.signer.peer_id
        own = [e.manifest for e in self._entries.values() if e.manifest.publisher == local]
        return max(own, key=lambda manifest: manifest.version, default=None)

    # Fetching

    def begin(self, manifest: Manifest, index: Index) -> None:
        """Start to store a policy that will come chunk by chunk."""
        entry = StoredPolicy(manifest, index, self.folder)
        self._entries.setdefault(entry.name, entry)

    def keep_nowait(self, policy: bytes, chunk: int, wire: bytes, raw: Bytes) -> None:
        """Keep a verified chunk in memory, packed and unpacked."""
        entry = self._entries.get(policy)
        if entry is not None:
            entry.add(chunk, raw)
            self._remember(policy, chunk, wire)

    def unwritten(self, policy: bytes) -> int:
        """Return how many spans of a policy are only in memory."""
        entry = self._entries.get(policy)
        return len(entry.unwritten) if entry is not None else 0

    async def flush(self, policy: bytes) -> None:
        """Write the spans that wait in memory to their places.

        Raises:
            StorageError: The disk refused.
            NoRoom: The whole policy would not fit.
        """
        entry = self._entries.get(policy)
        if entry is None:
            return
        async with entry.writing:
            if not entry.unwritten:
                return
            await self._make_room(entry)
            spans = dict(sorted(entry.unwritten.items()))
            for path, offset, data in _runs(entry, spans):
                await self._disk.write(path, data, offset)
                if self._world.buggify("shardcast/early sync"):
                    await self._disk.fsync(path)
            for span in spans:
                del entry.unwritten[span]
        await self._remove_if_forgotten(entry)

    async def _make_room(self, entry: StoredPolicy) -> None:
        """Write the head, and files of the final length. Raise `StorageError` if the disk
        refuses."""
        async with self._preparing:
            if entry.has_room:
                return
            # Only a head that this node has signed is fsynced, since later lives must know it;
            # for others `finish` does it, since every stream would wait.
            is_ours = entry.manifest.publisher == self._world.signer.peer_id
            write = self._disk.replace if is_ours else self._disk.write
            await write(entry.head, entry.encode_head())
            files, chosen = entry.index.files, self._selection
            numbers = range(len(files)) if chosen is None else chosen.files(entry.index)
            try:
                for number in numbers:
                    await self._disk.reserve(entry.file(number), files[number].size)
            except Unnameable:
                raise
            except StorageError as error:
                raise NoRoom(
                    f"no room for version {entry.version}, of {entry.manifest.size} bytes:"
                    f" {error}",
                    sum(files[number].size for number in numbers),
                ) from error
            entry.has_room = True

    async def selected(self, version: PolicyVersion) -> StoredPolicy | None:
        """Return a version of which all selected files are written; None if there is none.
        Raise `StorageError` if the disk refuses."""
        for entry in self._policies:
            if entry.version != version or self._selection is None:
                continue
            if entry.selected is None:
                entry.selected = self._selection.spans(entry.index)
            is_all = len(entry.selected) == len(entry.index)  # it will be whole, and move
            is_here = not (entry.selected - entry.verified or entry.unwritten)
            if not is_here or (is_all and not entry.stored):
                continue
            if not entry.stored:
                await self._make_room(entry)  # files without bytes have no spans
                for number in self._selection.files(entry.index):
                    await self._disk.fsync(entry.file(number))
            return entry
        return None

    async def finish(self, policy: bytes) -> bool:
        """Make a complete policy durable, under its final name. Return False if it is
        incomplete.

        Raise `StorageError` if the disk refuses.
        """
        entry = self._entries.get(policy)
        if entry is None or not entry.is_whole:
            return False
        if entry.stored:
            return True
        await self._make_room(entry)
        await self.flush(policy)
        for path in (entry.head, *entry.files):
            await self._disk.fsync(path)
        await self._disk.rename(entry.part, entry.final)
        entry.stored = True
        return True

    # Patching

    async def patch(self, patch: bytes) -> StoredPolicy | None:
        """Apply a patch to its base as far as the result is right. Return None if one of the
        two is gone or they do not match. Raise `StorageError` if the disk refuses."""
        entry = self._entries.get(patch)
        base = self.stored(entry.encoding.base) if entry is not None else None
        if entry is None or base is None or not entry.stored:
            return None
        with base.pin(), entry.pin():
            try:
                index, runs = await self._read_patch(entry, base)
                adapter = None
                if entry.encoding.is_adapter:
                    room = sum(row.wire for row in runs)
                    adapter = await self.read_adapter(entry.weights, room, base)
            except (BadMessage, FileNotFoundError) as error:
                logger.warning("patch_wrong version=%d reason=%s", entry.version, error)
                return None
            self.begin(entry.manifest, index)
            made = self._entries[entry.manifest.digest]
            if made.is_whole:
                return made
            await self._make_room(made)
            await self.cores.for_each(
                runs, partial(self._patch_run, entry, base, made, adapter)
            )
        await self._remove_if_forgotten(made)
        return made

    async def _read_patch(
        self, entry: StoredPolicy, base: StoredPolicy
    ) -> tuple[Index, list[PatchRun]]:
        """Return the index that a patch leads to, and its runs. Raise `BadMessage` if it is
        malformed."""
        size = entry.index.size
        tail = await self._disk.read(entry.weights, max(0, size - TAIL.size), TAIL.size)
        room = size - table_bytes_untrusted(tail, size)
        table = decode_table_untrusted(await self._disk.read(entry.weights, room, size - room))
        index = entry.manifest.index_untrusted(table.index)
        if index.digest != entry.manifest.weights_digest or not is_alike(index, base.index):
            raise BadMessage("it leads to something that is laid out otherwise")
        if table.base != base.index.digest:
            raise BadMessage("it is for another policy of that version")
        return index, patch_runs_untrusted(table, index, room)

    async def read_adapter(self, path: str, size: int, base: StoredPolicy) -> AdapterFile:
        """Read the adapter in the first ``size`` bytes at ``path``, and check it against the
        policy that it adds to.

        Raises:
            BadMessage: The adapter is malformed or does not fit the policy.
            FileNotFoundError: A file is gone.
        """
        found = await tensors_of(self._disk, path, size)
        terms = b""
        for one in found:
            if one.name == LORA:
                terms = await self._disk.read(path, one.start, min(one.end - one.start, 9))
        policy = [
            await tensors_of(self._disk, base.file(number), file.size)
            for number, file in enumerate(base.index.files)
        ]
        return read_adapter_untrusted(path, found, terms, policy)

    async def merge_run(
        self, adapter: AdapterFile, base: StoredPolicy, index: Index, run: SpanRun
    ) -> tuple[bytes, int]:
        """Return the bytes of a run of the policy ``index``, and the mask of its spans that are
        right."""
        place = index.place(run.first)
        first, end = place.offset, place.offset + run.size
        try:
            old = await self._disk.read(base.file(place.file), first, run.size)
            pieces = []
            for one in adapter.targets:
                if one.file != place.file or one.place.end <= first or end <= one.place.start:
                    continue
                start, stop, skip, low, high = rows_of(one, first, end, adapter.rank)
                down = await self._disk.read(
                    adapter.path, one.down.start, one.down.end - one.down.start
                )
                up = await self._disk.read(adapter.path, low, high - low)
                pieces.append(Piece(start - first, stop - first, skip, down, up, one, adapter))
        except FileNotFoundError:
            return b"", 0
        if len(old) != run.size:
            return b"", 0
        spans = index.spans[run.first : run.end]
        return await self.cores.run(
            # on one core, at rank 16
            merge_run_untrusted,
            run,
            spans,
            old,
            pieces,
            size=run.size,
            rate=180e6,
        )

    async def _patch_run(
        self,
        entry: StoredPolicy,
        base: StoredPolicy,
        made: StoredPolicy,
        adapter: AdapterFile | None,
        row: PatchRun,
    ) -> None:
        run, place = row.run, made.index.place(row.run.first)
        if adapter is not None:
            raw, mask = await self.merge_run(adapter, base, made.index, run)
        else:
            wire = await self._disk.read(entry.weights, row.offset, row.wire)
            try:
                old = await self._disk.read(base.file(place.file), place.offset, run.size)
            except FileNotFoundError:
                return
            if len(old) != run.size:
                return
            spans = made.index.spans[run.first : run.end]
            raw, mask = await self.cores.run(
                apply_run_untrusted, run, spans, old, wire, size=run.size, rate=1200e6
            )
        # What came as chunks stays: it is right, and may be where this is wrong.
        right = ChunkSet(mask << run.first) - made.verified
        view, offsets = memoryview(raw), made.index.offsets
        for start, count in chain.from_iterable(right.ranges()):
            first, end = (offsets[n] - offsets[run.first] for n in (start, start + count))
            path = made.file(place.file)
            await self._disk.write(path, view[first:end], place.offset + first)
        made.verified |= right

    # Serving

    async def chunk(self, policy: bytes, chunk: int) -> bytes | None:
        """Return the wire bytes of a chunk; None if they are no longer here. Raise
        `StorageError` if the disk cannot be read."""
        key = policy, chunk
        while key in self._packing:
            await self._packing[key].wait()
        entry = self._entries.get(policy)
        if entry is None or chunk not in entry.verified:
            return None
        wire = self._cache.get(key)
        if wire is not None and not self._world.buggify("shardcast/read again"):
            self._cache.move_to_end(key)
            return wire
        done = self._packing[key] = trio.Event()
        try:
            wire = await self._pack(entry, chunk)
        finally:
            del self._packing[key]
            done.set()
        if wire is not None:
            self._remember(policy, chunk, wire)
        return wire

    async def _pack(self, entry: StoredPolicy, chunk: int) -> bytes | None:
        """Pack a span that is here. The bytes are compared with the digest first, since a peer
        that received wrong ones would convict this node of lying."""
        span, raw = entry.index.spans[chunk], entry.unwritten.get(chunk)
        path = self._disk.locate(entry.file(entry.index.place(chunk).file))
        try:
            raw = raw if raw is not None else await self._read(entry, chunk)
        except FileNotFoundError:
            raw = b""
        except StorageError as error:
            self.damaged[path] = f"cannot be read ({error})"
            raise
        wire = await self.cores.run(
            _encode_if_right, span, raw, size=span.size, rate=ENCODE_RATE
        )
        if wire is None and self._entries.get(entry.name) is entry:
            entry.verified -= ChunkSet.of([chunk])
            if path not in self.damaged:  # of a large file thousands of spans may be wrong
                self.damaged[path] = "changed"
                logger.warning(
                    "chunk_damaged path=%s index=%d: what is wrong there is no longer served",
                    path,
                    chunk,
                )
        return wire

    async def _read(self, entry: StoredPolicy, span: int) -> bytes:
        place, size = entry.index.place(span), entry.index.spans[span].size
        try:
            return await self._disk.read(entry.file(place.file), place.offset, size)
        except FileNotFoundError:  # `finish` has renamed it, and waits until that is durable
            final = entry.file(place.file, is_final=True)
            return await self._disk.read(final, place.offset, size)

    def _remember(self, policy: bytes, chunk: int, data: bytes) -> None:
        self._cached += len(data) - len(self._cache.pop((policy, chunk), b""))
        self._cache[policy, chunk] = data
        while self._cached > self._config.cache_bytes and len(self._cache) > 1:
            _, old = self._cache.popitem(last=False)
            self._cached -= len(old)

    async def check_weights(self, entry: StoredPolicy) -> None:
        """Check that the files of a version are unchanged. Raise `StorageError` if they are
        not."""
        if len(await self._good_spans(entry)) == len(entry.index):
            return
        raise StorageError(
            f"{self._disk.locate(entry.weights)} is damaged; start the node again, and what is"
            " wrong in it is fetched again"
        )

    async def _good_spans(self, entry: StoredPolicy) -> ChunkSet:
        """Return the spans that are written and match their digests."""
        good = EMPTY

        async def judge(batch: tuple[int, int]) -> None:
            nonlocal good
            first, last = batch
            place, spans = entry.index.place(first), entry.index.spans[first:last]
            size = sum(span.size for span in spans)
            try:
                raw = await self._disk.read(entry.file(place.file), place.offset, size)
            except FileNotFoundError:
                return
            right = await self.cores.run(right_mask, spans, raw, size=size, rate=HASH_RATE)
            good |= ChunkSet(right << first)

        await self.cores.for_each(batches(entry.index), judge)
        return good

    async def forget(self, policy: bytes) -> None:
        """Remove a policy, complete or not. Files that this node published it from stay."""
        entry = self._entries.pop(policy, None)
        if entry is None:
            return
        for key in [key for key in self._cache if key[0] == policy]:
            self._cached -= len(self._cache.pop(key))
        await self._remove_if_forgotten(entry)

    async def _remove_if_forgotten(self, entry: StoredPolicy) -> None:
        async with self._preparing:
            if entry.name in self._entries:
                return  # it is fetched anew
            await self._disk.remove(entry.head)
            await self._disk.remove(entry.part)
            if entry.stored and not entry.source:
                await self._disk.remove(entry.final)

    async def prune(self) -> list[bytes]:
        """Remove the oldest complete policies beyond the limits; return their names."""
        kept = sorted(
            (e for e in self._policies if e.stored), key=lambda e: e.version, reverse=True
        )
        # What is being fetched takes its room before it is there: the disk holds `keep_bytes`
        # and the newest.
        bases = {e.encoding.base for e in self._entries.values() if e.encoding.is_adapter}
        total, gone = sum(e.footprint for e in self._entries.values() if not e.stored), []
        patches: Counter[bytes] = Counter()
        for patch in self._entries.values():
            if patch.is_patch and patch.stored:
                patches[patch.manifest.digest] += patch.footprint
        for rank, entry in enumerate(kept):
            size = entry.footprint + patches[entry.manifest.digest]
            total += size
            full = rank >= self._config.keep_versions or total > self._config.keep_bytes
            if rank and full and not entry.pins and entry.version not in bases:
                total -= size
                gone.append(entry)
        # A patch stays as long as what it leads to: peers that are behind take it from here.
        left = (e.version for e in kept if e not in gone and e.version not in bases)
        oldest = min(left, default=NO_POLICY)
        gone += [
            e
            for e in self._entries.values()
            if e.is_patch and e.version < oldest and e not in gone
        ]
        forgotten = []
        for entry in gone:
            if not entry.pins:  # it may have been pinned while another was removed
                await self.forget(entry.name)
                forgotten.append(entry.name)
        return forgotten

    # Publishing

    async def commit_own(
        self,
        manifest: Manifest,
        index: Index,
        wires: Mapping[int, bytes],
        *,
        source: str = "",
        draft: str = "",
    ) -> None:
        """Store, durably, a policy whose files are at ``source``, or a patch of our own whose
        file is at ``draft``. Raise `StorageError` if the disk refuses.

        The packed chunks ``wires`` are kept in memory, since they are about to be sent to all
        roots.
        """
        entry = StoredPolicy(manifest, index, self.folder, source)
        entry.verified |= ChunkSet.below(len(index))
        entry.stored = True
        for path in [draft] if draft else entry.files:
            await self._disk.fsync(path)
        if draft:
            await self._disk.rename(draft, entry.final)
        await self._disk.replace(entry.head, entry.encode_head())
        self._entries[entry.name] = entry
        await self._disk.remove(entry.part)  # of a version whose files had been lost
        for chunk, wire in wires.items():
            self._remember(entry.name, chunk, wire)

    async def keep_roster(self, roster: Roster) -> None:
        """Store our roster durably for the next life. Raise `StorageError` if the disk
        refuses."""
        await self._disk.replace(self._roster, roster.encode())

    async def keep_convictions(self, convictions: Iterable[Equivocation[Manifest]]) -> None:
        """Store durably which publishers equivocated. Raise `StorageError` if the disk
        refuses."""
        pairs = [[one.first.encode(), one.second.encode()] for one in convictions]
        await self._disk.replace(self._convictions, pack(pairs))

    # Resuming

    async def load_convictions(self) -> list[Equivocation[Manifest]]:
        """Return the publishers that an earlier life convicted. The proofs are verified again,
        since the disk is trusted no more than a peer."""
        found: list[Equivocation[Manifest]] = []
        try:
            # Two manifests of 4 KiB each for 128 publishers; a run names a handful.
            pairs = unpack_untrusted(await self._disk.read(self._convictions, 0, MIB))
            for pair in pairs if isinstance(pairs, list) else ():
                first, second = (
                    decode_manifest_untrusted(data, self._run, self._world.verify)
                    for data in fields_untrusted(pair, bytes, bytes, what="conviction")
                )
                found.append(Equivocation(first, second))
        except FileNotFoundError:
            return []
        except BadMessage as error:
            logger.warning(
                "convictions_damaged path=%s reason=%s: %d are believed, of the others peers"
                " tell again",
                self._disk.locate(self._convictions),
                error,
                len(found),
            )
        return found

    async def load_roster(self) -> Roster | None:
        """Return the last roster that an earlier life signed."""
        try:
            data = await self._disk.read(self._roster)
            return decode_roster_untrusted(data, self._run, self._world.verify)
        except FileNotFoundError:
            return None
        except BadMessage as error:
            logger.warning("roster_damaged, to be made again with the next policy: %s", error)
            return None

    async def load(self) -> list[StoredPolicy]:
        """Read what an earlier life left, and keep the spans that match their digests. Return
        the policies, oldest first."""
        found = []
        for name in await self._disk.list(self.folder):
            if not name.endswith(HEAD):
                continue
            path = f"{self.folder}/{name}"
            entry = await self._load_entry(path)
            if entry is None:
                logger.warning("policy_damaged path=%s: it is fetched again", path)
                await self._disk.remove(path)
                continue
            self._entries[entry.name] = entry
            found.append(entry)
        # Files whose head is gone or void, because a crash came between two removals, and
        # drafts that a killed node left behind.
        known = {path for e in self._entries.values() for path in (e.weights, e.head)}
        ends = (PART, *WHOLE, PATCH_FILE, "publishing.tmp", DRAFT)
        for name in await self._disk.list(self.folder):
            path = f"{self.folder}/{name}"
            if name.endswith(ends) and path not in known:
                await self._disk.remove(path)
        # Patches first: an origin hands its newest version out as the patch that it was.
        return sorted(found, key=lambda entry: (entry.version, not entry.is_patch))

    async def _load_entry(self, path: str) -> StoredPolicy | None:
        data = await self._disk.read(path, 0, MAX_MANIFEST + MAX_INDEX + 4 * KI)
        try:
            entry = decode_head_untrusted(data, self._run, self._world.verify, self.folder)
        except BadMessage:
            return None  # torn, or of an older Shoal: nothing of it can be believed
        if entry.head != path:
            return None
        if entry.source or await self._disk.walk(entry.final, 1):
            entry.stored = True
        entry.verified |= await self._good_spans(entry)
        if entry.stored and not entry.is_whole:
            await self._demote(entry)
        return entry

    async def _demote(self, entry: StoredPolicy) -> None:
        """Give a policy that is no longer complete its temporary name: no file with a final
        name may be wrong."""
        path = self._disk.locate(entry.weights)
        if entry.source:  # its owner has changed it since, which is no damage
            logger.info("source_changed path=%s: it is version %d no more", path, entry.version)
            entry.source, entry.stored, entry.verified = "", False, EMPTY  # fetched like others
            return
        logger.warning(
            "weights_damaged path=%s: %d of %d spans are right, the rest is fetched again",
            path,
            len(entry.verified),
            len(entry.index),
        )
        await self._disk.remove(entry.part)
        await self._disk.rename(entry.final, entry.part)
        entry.stored = False


async def tensors_of(disk: Disk, path: str, size: int) -> list[Tensor]:
    """Return the tensors of a safetensors file; none of any other file. Raise `BadMessage` if
    it is cut short."""
    length = header_bytes(await disk.read(path, 0, LENGTH_BYTES + 1), size)
    return (
        tensors_untrusted(await disk.read(path, LENGTH_BYTES, length), size) if length else []
    )


def batches(index: Index) -> Iterator[tuple[int, int]]:
    """Group spans of one file into batches (first, one beyond the last) of about 4 Mi bytes."""
    first = size = 0
    starts = set(index.starts)
    for span, row in enumerate(index.spans):
        # Raw bytes read and hashed in one go: the largest span, and 1 ms of a core.
        if size and (size + row.size > 4 * MIB or index.offsets[span] in starts):
            yield first, span
            first, size = span, 0
        size += row.size
    if index.spans:
        yield first, len(index)


def _runs(entry: StoredPolicy, spans: dict[int, Bytes]) -> Iterator[tuple[str, int, Bytes]]:
    """Group spans into writes: neighbours in one file are written together."""
    parts: list[Bytes] = []
    path, start, end = "", 0, -1
    for span, raw in spans.items():
        place = entry.index.place(span)
        if (entry.file(place.file), place.offset) != (path, end):
            if parts:
                yield path, start, _joined(parts)
            parts, path, start = [], entry.file(place.file), place.offset
        parts.append(raw)
        end = place.offset + len(raw)
    if parts:
        yield path, start, _joined(parts)


def _joined(parts: list[Bytes]) -> Bytes:
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _encode_if_right(span: Span, raw: Bytes) -> bytes | None:
    """Return the chunk of a span; None if ``raw`` does not match the span."""
    return encode_chunk(span, raw) if digest_of(raw) == span.digest else None
