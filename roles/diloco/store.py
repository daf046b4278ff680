"""A member's files on disk: records, its signed statements, states of two steps, its update.

Every file is judged by a digest before it is believed: a state by its record's, an update by
what was signed of it. What is damaged, cut off or of another run counts as not there, and is
fetched from the others again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
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
from roles.diloco.core.outer import Arithmetic
from roles.diloco.core.pieces import DIGEST_BYTES
from roles.diloco.core.round import check_record
from roles.diloco.exchange import Blob, PieceFile, Take
from roles.diloco.inner import FOLDER, InnerEngine

logger = logging.getLogger(__name__)

RECORDS: Final = f"{FOLDER}/records"
"""File of all records, one after the other."""
KEPT: Final = f"{FOLDER}/signed"
"""File of the `Keep` that was signed last."""
KINDS: Final = ("update", "mean", "state")
"""Files of pieces, by the first part of their names; then come the step and the view."""
UNFINISHED: Final = ".partial"
"""Suffix of a file that is not complete."""


class MemberStore:
    """The files of one member."""

    def __init__(
        self, world: World, run: bytes, arithmetic: Arithmetic, engine: InnerEngine
    ) -> None:
        self._disk, self._run = world.disk, run
        self._arithmetic, self._engine = arithmetic, engine
        self._size = 0
        """Bytes in the file of records."""

    async def records(
        self, first: Record, verify: Verify, anchor: PeerId | None
    ) -> list[Record]:
        """Return ``first``, which is not on disk, and all records on disk that follow it.

        Reading ends at the first record that does not follow. Records of a run that began with
        other members are put aside: only a person may delete them.
        """
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
            if len(found) == 1:
                await self._disk.rename(RECORDS, f"{RECORDS}-before")
        whole = b"".join(frame(encode_message(one)) for one in found[1:])
        if whole != data:  # a crash cut the last one off
            await self._disk.replace(RECORDS, whole)
        self._size = len(whole)
        return found

    async def add(self, records: Sequence[Record]) -> None:
        """Append records, durably. May be repeated: a full disk takes a part of them."""
        data = b"".join(frame(encode_message(one)) for one in records)
        await self._disk.write(RECORDS, data, self._size)
        await self._disk.fsync(RECORDS)
        self._size += len(data)

    async def keep(self, kept: Keep) -> None:
        """Make signed statements durable."""
        said = [[] if one is None else one.to_wire() for one in (kept.ready, kept.vote)]
        body = pack([self._run, kept.step, kept.view, kept.proposed, *said, kept.accepted])
        await self._disk.replace(KEPT, hashlib.sha256(body).digest() + body)

    async def kept(self) -> Keep | None:
        """Return the `Keep` that was signed last in this run, or None."""
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
        """Return the stored `Keep`, or None if it is of another run.

        Raises:
            BadMessage: The bytes are damaged.
        """
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

    def update_file(self, step: int) -> PieceFile:
        """Return the file of this member's update of a step."""
        return PieceFile(self._disk, f"{FOLDER}/update-{step}", self._arithmetic.grid)

    def mean_file(self, step: int, view: object) -> PieceFile:
        """Return the file of the mean that leads to a step, as it was summed in a view."""
        return PieceFile(self._disk, f"{FOLDER}/mean-{step}-{view}", self._arithmetic.grid)

    def state_file(self, step: int, view: object) -> PieceFile:
        """Return the file of the state after a step, as it was computed in a view."""
        grid = self._arithmetic.state_grid
        return PieceFile(self._disk, f"{FOLDER}/state-{step}-{view}", grid)

    async def found(self, kind: str, step: int) -> list[Blob]:
        """Return the files on disk of a kind and step, with their digests. The caller checks
        them.
        """
        is_state = kind == "state"
        grid = self._arithmetic.state_grid if is_state else self._arithmetic.grid
        found = []
        for name in await self._disk.list(FOLDER):
            if name.split("-")[:2] == [kind, str(step)] and not name.endswith(UNFINISHED):
                file = PieceFile(self._disk, f"{FOLDER}/{name}", grid)
                digests = await self._engine.digests(file.path, is_state=is_state)
                found += [Blob(tuple(digests), file)] if digests else []
        return found

    async def state(self, records: Sequence[Record]) -> tuple[int, Blob] | None:
        """Return the newest state on disk whose digest is in one of these records, and its
        step."""
        for record in reversed(records):
            for one in await self.found("state", record.step):
                if one.root == record.outcome.state_root:
                    return record.step, one
                logger.warning("diloco_state_damaged step=%d", record.step)
        return None

    async def fetched(
        self, file: PieceFile, fetch: Callable[[Take], Awaitable[tuple[bytes, ...]]]
    ) -> tuple[bytes, ...]:
        """Fetch the pieces of a file with ``fetch``, make it durable, and return the pieces'
        digests."""
        unfinished = replace(file, path=f"{file.path}{UNFINISHED}")
        digests = await fetch(unfinished.write)
        await self._disk.fsync(unfinished.path)
        await self._disk.rename(unfinished.path, file.path)
        return digests

    async def tidy(self, newest: int, state: Blob, means: int) -> None:
        """Remove files that are no longer needed once the state of the step ``newest`` is in
        force: all but this state, the state before, and the last ``means`` means."""
        keeps = {"update": 0, "state": 1, "mean": means - 1}

        def is_old(kind: str, step: int, path: str) -> bool:
            is_other = kind == "state" and step == newest and path != state.file.path
            return step < newest - keeps[kind] or is_other

        await self._remove(is_old)

    async def forget_views(self, step: int, view: int, voted: Blob | None) -> None:
        """Remove the files of earlier views of ``step``, but keep ``voted`` with its mean, and
        the mean of the previous view for members that are behind. Otherwise a member that stops
        each exchange could fill the disk with views."""
        kept = {f"mean-{step}-{view - 1}", f"mean-{step}-{view}", f"state-{step}-{view}"}
        if voted is not None:
            name = voted.file.path.removeprefix(f"{FOLDER}/")
            kept |= {name, name.replace("state", "mean")}

        def is_old(kind: str, number: int, path: str) -> bool:
            return kind != "update" and number == step and path[len(FOLDER) + 1 :] not in kept

        await self._remove(is_old)

    async def _remove(self, is_old: Callable[[str, int, str], bool]) -> None:
        for name in await self._disk.list(FOLDER):
            kind, number = (*name.split("-"), "")[:2]
            path = f"{FOLDER}/{name}"
            if kind in KINDS and number.isdecimal() and is_old(kind, int(number), path):
                await self._disk.remove(path)
