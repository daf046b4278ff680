"""How a trainer turns a file into a published version: durable first, then told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio
from blake3 import blake3

from p2p.errors import LimitExceeded, LocalProtocolError, StorageError
from p2p.identity import PeerId
from p2p.shardcast.codec import COMPRESS_RATE, encode_spans, header_span, span_for
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import Roster, RosterEntry, capacity_class
from p2p.shardcast.manifest import (
    MAX_CHUNKS,
    MAX_SPAN,
    NO_POLICY,
    Chunk,
    Encoding,
    Index,
    Manifest,
    ManifestBody,
    PolicyVersion,
)
from p2p.shardcast.store import DECODE_BATCH, PolicyStore, chunks_at
from p2p.world import World

logger = logging.getLogger(__name__)


class PolicyPublisher:
    """Encodes, signs and stores our own policies, and keeps the roster of whom to feed."""

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
        self._roster = roster
        self._believe = believe
        self._told: dict[PeerId, int] | None = None
        self._told_at = 0.0
        self._turn = trio.Lock()

    async def prepare(
        self,
        version: PolicyVersion,
        weights_path: str,
        newest_out: Callable[[], Manifest | None],
    ) -> ev.Publish | Manifest:
        """Make a version durable; a `Manifest` if just this was published before.

        ``newest_out`` is asked when it is our turn: the publication before this one has told
        the core by then. Raises `LocalProtocolError` rather than contradict what is out.
        """
        async with self._turn:
            index, weights_digest, header, wires = await self._encode(weights_path)
            size, newest = index.size, newest_out()
            if newest is not None and newest.version >= version:
                if newest.version == version and newest.weights_digest == weights_digest:
                    return newest
                raise LocalProtocolError(
                    f"version {version} cannot be published: version {newest.version} is out"
                )
            body = ManifestBody(
                self._run,
                version,
                newest.version if newest is not None else NO_POLICY,
                newest.digest if newest is not None else b"",
                weights_digest,
                size,
                header,
                (Encoding.of(index),),
            )
            manifest = body.sign(self._world.signer)
            await self._store.commit_draft(manifest, index, weights_path)
            for chunk, wire in enumerate(wires):
                self._store.cache_nowait(manifest.digest, chunk, wire)
            roster = self._next_roster()
            if roster is not None:
                await self._keep_roster(roster)
            return ev.Publish(manifest, index, roster)

    async def regroup(self) -> Roster | None:
        """A new roster in the middle of a hand-out, durable; None if it would be the old
        one."""
        async with self._turn:
            roster = self._sign_roster()
            if roster is not None:
                await self._keep_roster(roster)
            return roster

    async def _keep_roster(self, roster: Roster) -> None:
        """A roster that is not on disk only costs the next life some pulls: the version goes
        out without."""
        try:
            await self._store.keep_roster(roster)
        except StorageError as error:
            logger.warning("roster_not_kept reason=%s", error)

    async def _encode(self, path: str) -> tuple[Index, bytes, int, list[bytes]]:
        """Compress a file into the draft; returns index, weights digest, header bytes and wires
        to cache."""
        size = await self._world.disk.size(path)
        if not size:
            raise LocalProtocolError(f"there are no weights in {path}")
        span = self._config.chunk_bytes or span_for(size)
        count = -(-size // span)
        if count > MAX_CHUNKS:
            raise LimitExceeded(
                f"a policy of {size} bytes is over the limit of {MAX_CHUNKS * MAX_SPAN}"
            )
        hasher, header = blake3(), header_span(await self._world.disk.read(path, 0, 8), size)
        chunks: list[Chunk] = []
        wires: list[bytes] = []
        written = 0
        batch = max(1, DECODE_BATCH // span) * span
        for offset in range(0, size, batch):
            raw = await self._world.disk.read(path, offset, batch)
            encoded = await self._world.run_blocking(
                encode_spans, raw, span, cost=len(raw) / COMPRESS_RATE
            )
            hasher.update(raw)
            data = b"".join(wire for _, wire in encoded)
            await self._store.write_draft(chunks_at(count) + written, data)
            written += len(data)
            chunks += [chunk for chunk, _ in encoded]
            if written <= self._config.cache_bytes:
                wires += [wire for _, wire in encoded]
        return Index.of(chunks), hasher.digest(), header, wires

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
