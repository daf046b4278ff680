"""A machine of a tree: it takes chunks from its parent and passes each on once it is whole.

The same coroutine runs over virtual streams and over sockets, so that what differs between the
two is the links alone. A stream's own back-pressure is the only window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from p2p.concurrency import Notifier
from p2p.identity import ProtocolId

PROTOCOL_ID = ProtocolId("/shoal/lab/1.0.0")


class TreeBroadcast:
    """A machine's part in a broadcast of ``chunks`` chunks."""

    def __init__(self, chunks: int, chunk_bytes: int, now: Callable[[], float]) -> None:
        self.whole_at: float | None = None
        """The time, by the clock ``now``, at which the last chunk came; at the root, at which
        it began to send.
        """
        self._chunks = chunks
        self._chunk_bytes = chunk_bytes
        self._now = now
        self._held: list[bytes] = []
        self._changed = Notifier()

    async def run(
        self,
        upstream: trio.abc.ReceiveStream | None,
        downstreams: Sequence[trio.abc.SendStream],
    ) -> None:
        """Play the part: the root has no ``upstream``. Return when everything is received and
        sent.

        Raises `trio.BrokenResourceError` if a neighbour goes away before the end.
        """
        async with trio.open_nursery() as nursery:
            for stream in downstreams:
                nursery.start_soon(self._pass_on, stream)
            if upstream is None:
                self._take(*(bytes(self._chunk_bytes) for _ in range(self._chunks)))
            else:
                await self._receive(upstream)
            self.whole_at = self._now()

    async def _receive(self, stream: trio.abc.ReceiveStream) -> None:
        for _ in range(self._chunks):
            chunk = bytearray()
            while len(chunk) < self._chunk_bytes:
                piece = await stream.receive_some(self._chunk_bytes - len(chunk))
                if not piece:
                    raise trio.BrokenResourceError(
                        "the parent ended the stream before the last chunk"
                    )
                chunk += piece
            self._take(bytes(chunk))

    async def _pass_on(self, stream: trio.abc.SendStream) -> None:
        for number in range(self._chunks):
            while len(self._held) <= number:
                await self._changed.wait()
            await stream.send_all(self._held[number])

    def _take(self, *chunks: bytes) -> None:
        self._held.extend(chunks)
        self._changed.notify_all()
