"""What a member keeps on disk: records, what it has signed, states of two steps, its update.

Every file is judged by a digest before it is believed: a state by its record's, an update by
what was signed of it. What is damaged, cut off or of another run counts as not there, and is
fetched from the others again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.wire import MIB, FrameParser, frame, pack, unpack_untrusted
from p2p.world import World
from roles.diloco.core.events import Keep
from roles.diloco.core.messages import (
    Ready,
    Record,
    Vote,
    decode_message_untrusted,
    decode_statement_untrusted,
    encode_message,
)
from roles.diloco.core.outer import OuterState, state_grid
from roles.diloco.core.pieces import DIGEST_BYTES, PieceGrid, digest_of
from roles.diloco.core.round import check_record
from roles.diloco.inner import FOLDER

logger = logging.getLogger(__name__)

RECORDS: Final = f"{FOLDER}/records"
"""All records, one after the other."""
KEPT: Final = f"{FOLDER}/signed"
"""What was signed last."""
UPDATE: Final = f"{FOLDER}/contribution"
"""The pieces of this step's update."""
GENERATIONS: Final = 2
"""States that are kept: while the newer is written, the older is whole."""


class MemberStore:
    """The files of one member."""

    def __init__(self, world: World, run: bytes) -> None:
        self._disk = world.disk
        self._run = run

    async def records(
        self, first: Record, verify: Verify, anchor: PeerId | None
    ) -> list[Record]:
        """All that follow ``first``, which is not on disk; up to the first that does not."""
        found = [first]
        if await self._disk.size(RECORDS) is None:
            return found
        data = await self._disk.read(RECORDS)
        try:
            for one in FrameParser(MIB).receive_data(data):
                record = decode_message_untrusted(one)
                if not isinstance(record, Record):
                    raise BadMessage("that is no record")
                check_record(record, found[-1], self._run, verify, anchor)
                found.append(record)
        except BadMessage as error:
            logger.warning("diloco_records_cut at=%d: %s", len(found), error)
        whole = b"".join(frame(encode_message(one)) for one in found[1:])
        if whole != data:  # a crash cut the last one off
            await self._disk.replace(RECORDS, whole)
        return found

    async def add(self, records: Sequence[Record]) -> None:
        """Append records, durably."""
        await self._disk.append(
            RECORDS, b"".join(frame(encode_message(one)) for one in records)
        )
        await self._disk.fsync(RECORDS)

    async def keep(self, kept: Keep) -> None:
        """Make durable what was signed."""
        said = [[] if one is None else one.to_wire() for one in (kept.ready, kept.vote)]
        body = pack([self._run, kept.step, kept.view, kept.proposed, *said, kept.accepted])
        await self._disk.replace(KEPT, hashlib.sha256(body).digest() + body)

    async def kept(self) -> Keep | None:
        """What was signed last; None if nothing was in this run."""
        if await self._disk.size(KEPT) is None:
            return None
        data = await self._disk.read(KEPT)
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            logger.warning("diloco_signed_damaged: this step is sat out")
            return None
        try:
            return self._kept_untrusted(body)
        except BadMessage as error:  # written by a version with other bounds
            logger.warning("diloco_signed_damaged: this step is sat out: %s", error)
            return None

    def _kept_untrusted(self, body: bytes) -> Keep | None:
        """What was signed, or None if it was in another run. Raise `BadMessage`."""
        match unpack_untrusted(body, max_items=4096, max_depth=9):
            case [
                self._run, int(step), int(view), int(proposed), list(ready), list(vote),
                bytes(accepted),
            ]:  # fmt: skip
                found, voted = (
                    decode_statement_untrusted(one) if one else None for one in (ready, vote)
                )
                if isinstance(found, Ready | None) and isinstance(voted, Vote | None):
                    return Keep(step, view, proposed, found, voted, accepted)
        return None

    async def save_update(self, pieces: Sequence[bytes]) -> None:
        """Keep an update, so that a next life contributes the same."""
        await self._disk.replace(UPDATE, b"".join(pieces))

    async def update(self, ready: Ready, grid: PieceGrid) -> list[bytes] | None:
        """The update of which this was signed; None if it is gone."""
        if await self._disk.size(UPDATE) is None:
            return None
        pieces = grid.cut(await self._disk.read(UPDATE))
        digests = tuple(map(digest_of, pieces))
        return pieces if digests == ready.digests else None

    async def save_state(self, step: int, state: OuterState) -> None:
        """Make a state durable, then remove all but two. Raises `StorageError`; the older one
        is whole then."""
        await self._disk.replace(_name("state", step), b"".join(state.pieces()))
        for name in await self._disk.list(FOLDER):
            kind, _, number = name.partition("-")
            if kind in {"state", "mean"} and int(number or step) <= step - GENERATIONS:
                await self._disk.remove(f"{FOLDER}/{name}")

    async def save_mean(self, step: int, pieces: Sequence[bytes]) -> None:
        """Keep the mean that leads to a step: who votes for it can give it to the others, also
        in a next life."""
        await self._disk.replace(_name("mean", step), b"".join(pieces))

    async def means(self, step: int, grid: PieceGrid) -> list[list[bytes]]:
        """The means of a step and the next, so far as they are on disk. Peers judge them."""
        found = []
        for one in (step, step + 1):
            if await self._disk.size(_name("mean", one)) == grid.total_bytes:
                found.append(grid.cut(await self._disk.read(_name("mean", one))))
        return found

    async def state(
        self, records: Sequence[Record], size: int, moments: int
    ) -> tuple[int, OuterState] | None:
        """The newest state on disk that has its record's digest, and its step."""
        grid = state_grid(size, moments)
        for record in reversed(records[1:][-2 * GENERATIONS :]):
            name = _name("state", record.step)
            if await self._disk.size(name) != grid.total_bytes:
                continue
            pieces = grid.cut(await self._disk.read(name))
            try:
                state = OuterState.joined(size, pieces, moments)
            except BadMessage as error:
                logger.warning("diloco_state_damaged step=%d: %s", record.step, error)
                continue
            if state.root == record.outcome.state_root:
                return record.step, state
            logger.warning("diloco_state_damaged step=%d", record.step)
        return None


def _name(kind: str, step: int) -> str:
    return f"{FOLDER}/{kind}-{step}"
