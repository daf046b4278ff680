"""Trying again: one attempt at a question, and the pauses between attempts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import trio

from p2p.errors import BadMessage, ProtocolNotSupported
from p2p.host import MAX_MESSAGE, request
from p2p.identity import PeerId, ProtocolId
from p2p.node.node import Node
from p2p.node.trouble import PEER_TROUBLE
from p2p.offence import Offence
from p2p.wire import FrameReader

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 120.0
"""How long an attempt may take, the transfer of a large submission over a slow link
included."""
PATIENCE: Final = 90.0
"""Seconds after which a peer that is asked says "later": before the asker gives up at
`ANSWER_SECONDS` and asks again, so that no answer is computed that is not read any more."""


async def offer(
    node: Node,
    peer: PeerId,
    protocol: ProtocolId,
    parts: tuple[bytes, bytes],
    is_sent_for: Callable[[bytes], bool],
    max_reply: int,
) -> bytes | None:
    """As `ask`, of a frame in two ``parts``: the second goes out if the answer to the first
    sends for it, and has an answer of its own."""

    async def talk() -> bytes:
        stream = await node.host.open_stream(peer, protocol)
        async with stream:
            reader = FrameReader(stream, max_reply)
            await stream.send_all(parts[0])
            answer = await reader.receive()
            if answer is not None and is_sent_for(answer):
                with suppress(trio.BrokenResourceError):  # it may have heard enough
                    await stream.send_all(parts[1])
                    await stream.send_eof()
                answer = await reader.receive()
            if answer is None:
                raise BadMessage("the peer closed the stream without an answer")
            return answer

    return await _attempt(node, peer, protocol, talk)


async def ask(
    node: Node,
    peer: PeerId,
    protocol: ProtocolId,
    payload: bytes,
    *,
    max_reply: int = MAX_MESSAGE,
    raises_unsupported: bool = False,
) -> bytes | None:
    """One attempt, answered with at most ``max_reply`` bytes; None when it should be repeated.

    Whatever a peer does, it does not end this node. With ``raises_unsupported`` it raises
    `ProtocolNotSupported` if the peer does not speak ``protocol``.
    """

    async def talk() -> bytes:
        return await request(node.host, peer, protocol, payload, max_reply=max_reply)

    return await _attempt(node, peer, protocol, talk, raises_unsupported=raises_unsupported)


async def _attempt(
    node: Node,
    peer: PeerId,
    protocol: ProtocolId,
    talk: Callable[[], Awaitable[bytes]],
    *,
    raises_unsupported: bool = False,
) -> bytes | None:
    try:
        with trio.fail_after(ANSWER_SECONDS):
            await node.locate(peer)
            answer = await talk()
            return None if node.world.buggify("request/lost answer") else answer
    except BadMessage as error:
        node.host.penalise(peer, Offence.NONSENSE.points, str(error))
    except PEER_TROUBLE as error:
        node.world.sometimes("request/no answer", True)
        logger.debug("%s did not answer on %s: %r", peer.short, protocol, error)
        if raises_unsupported and isinstance(error, ProtocolNotSupported):
            raise
    return None
