"""The content of work that was rejected, kept so that others may repeat the rejection.

It lies in the folder of the validator that rejected it, one file a submission, and is handed to
any member that asks for it by its digest (``/shoal/evidence/1.0.0``: a frame with the digest, a
frame with the submission, empty if it is not here). What comes is bound by its worker's
signature and its digest, so it matters little of whom it comes.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import trio

from p2p.bounded import BoundedDict, RateLimit
from p2p.errors import BadMessage, StorageError
from p2p.host import Stream, send_frame
from p2p.identity import PeerId, ProtocolId
from p2p.node.node import Node
from p2p.wire import FrameReader
from roles.protocol.core.messages import (
    DIGEST_BYTES,
    SignedVerdict,
    Submission,
    decode_submission_untrusted,
)
from roles.protocol.request import ask
from roles.shared.durable import Durable
from roles.shared.sizes import MAX_HEAD, MAX_SUBMISSION

EVIDENCE_PROTOCOL: Final = ProtocolId("/shoal/evidence/1.0.0")
FOLDER: Final = "validator/evidence"
MAX_KEPT: Final = 256
"""Submissions that are kept, the newest: two gibibytes of the longest kind, 25 MB of the
demo's. Who wants to repeat an older ban finds its verdict, and no content."""
EVIDENCE_SECONDS: Final = 60.0
"""For a question and its answer: 8 MiB at 1 Mbit/s."""
ASKS: Final = 0.1
"""Questions a second that one member may ask: it repeats what it gets, which takes longer."""
ASKS_AT_ONCE: Final = 6.0
"""Of them after a pause: two bans by strikes."""
OFFICER: Final = 16.0
"""So many times as much for officers of the run: bans rest on what they repeat, and a wave of
names brings 32 of them at once, of three submissions each."""
MAX_ASKING: Final = 1024
"""Members whose questions are counted: as many as are connected."""


class EvidenceStore:
    """What one validator keeps, and hands out."""

    def __init__(self, node: Node, durable: Durable) -> None:
        self._node = node
        self._durable = durable
        self._asking: BoundedDict[PeerId, RateLimit] = BoundedDict(MAX_ASKING)
        self._kept: dict[str, None] = {}

    async def recall(self) -> None:
        """What an earlier life kept; its order is lost."""
        self._kept = dict.fromkeys(await self._node.world.disk.list(FOLDER))

    async def keep(self, submission: Submission) -> None:
        """On disk when this returns; the oldest goes if there are too many."""
        disk, name = self._node.world.disk, submission.commitment.content.hex()
        path = f"{FOLDER}/{name}"
        await self._durable.insist(partial(disk.replace, path, submission.to_bytes()))
        self._kept[name] = None
        while len(self._kept) > MAX_KEPT:
            oldest = next(iter(self._kept))
            await self._durable.insist(partial(disk.remove, f"{FOLDER}/{oldest}"))
            del self._kept[oldest]

    async def serve(self, stream: Stream) -> None:
        """A `StreamHandler`: one digest in, one submission out."""
        with trio.move_on_after(EVIDENCE_SECONDS):
            digest = await FrameReader(stream, DIGEST_BYTES).receive()
            if digest is None:
                return
            data = b""
            if digest.hex() in self._kept and self._may_ask(stream.peer):
                try:
                    data = await self._node.world.disk.read(f"{FOLDER}/{digest.hex()}")
                except (FileNotFoundError, StorageError):
                    data = b""
            if not self._node.meter.allows(stream.peer, len(data)):
                data = b""
            await send_frame(stream, data)

    def _may_ask(self, peer: PeerId) -> bool:
        """Who asks too often is told that nothing is here, and asks again."""
        part = OFFICER if peer in self._node.run.officers else 1.0
        limit = self._asking.get(peer) or RateLimit(part * ASKS, part * ASKS_AT_ONCE)
        self._asking.renew(peer, limit)
        return limit.allows(1.0, self._node.world.now())


async def fetch_evidence(node: Node, peer: PeerId, verdict: SignedVerdict) -> Submission | None:
    """The submission that ``verdict`` is about, from who keeps it; None if it does not come, or
    is another."""
    most = MAX_SUBMISSION + MAX_HEAD
    data = await ask(node, peer, EVIDENCE_PROTOCOL, verdict.commitment.content, max_reply=most)
    if not data:
        return None
    try:
        submission = decode_submission_untrusted(data, node.world.verify)
    except BadMessage:
        return None
    return submission if submission.commitment == verdict.commitment else None
