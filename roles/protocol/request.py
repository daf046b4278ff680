"""Requests to peers: one attempt, and the pauses between attempts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import trio

from p2p.errors import BadMessage, ProtocolNotSupported
from p2p.host import PEER_TROUBLE, request
from p2p.identity import PeerId
from p2p.node.node import Node
from p2p.offence import Offence
from p2p.wire import FrameReader, frame
from roles.protocol.core.answer import (
    MAX_REPLY,
    WORK_PROTOCOL,
    Reply,
    Request,
    Word,
    decode_reply_untrusted,
    encode_reply,
    encode_request,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 120.0
"""Most seconds that an attempt may take, including the transfer of a large submission over a
slow link."""
PATIENCE: Final = 90.0
"""Seconds after which a peer that is asked replies "later". It is less than `ANSWER_SECONDS`,
after which the asker gives up and asks again, so no answer is computed that nobody reads."""
_SEND: Final = encode_reply(Word.SEND)


async def ask(
    node: Node,
    peer: PeerId,
    asked: Request,
    accept: Callable[[Reply], T],
    *,
    content: bytes | None = None,
    note_upload: Callable[[], None] = lambda: None,
    max_reply: int = MAX_REPLY,
    raises_unsupported: bool = False,
) -> T | None:
    """Make one attempt at a request. Return None if it should be repeated.

    Whatever a peer does, it does not end this node.

    Args:
        node: This node.
        peer: Peer to ask.
        asked: The request.
        accept: Converts the reply for the caller, or raises `BadMessage`.
        content: Content to send if the first reply requests it; it has a reply of its own.
        note_upload: Called when content was sent.
        max_reply: Bytes of a reply.
        raises_unsupported: Raise `ProtocolNotSupported` if that is what is wrong.
    """

    async def talk() -> bytes:
        asks = encode_request(asked)
        if content is None:
            return await request(node.host, peer, WORK_PROTOCOL, asks, max_reply=max_reply)
        async with await node.host.open_stream(peer, WORK_PROTOCOL) as stream:
            reader = FrameReader(stream, max_reply)
            await stream.send_all(frame(asks))
            answer = await reader.receive()
            if answer == _SEND:
                note_upload()
                with suppress(trio.BrokenResourceError):  # it may have heard enough
                    await stream.send_all(frame(content))
                    await stream.send_eof()
                answer = await reader.receive()
            if answer is None:
                raise BadMessage("the peer closed the stream without an answer")
            return answer

    try:
        with trio.fail_after(ANSWER_SECONDS):
            await node.locate(peer)
            answer = await talk()
        if node.world.buggify("request/lost answer"):
            return None
        return accept(decode_reply_untrusted(answer, node.world.verify))
    except BadMessage as error:
        node.host.penalise(peer, Offence.NONSENSE.points, str(error))
    except PEER_TROUBLE as error:
        node.world.sometimes("request/no answer", True)
        logger.debug("%s did not answer on %s: %r", peer.short, WORK_PROTOCOL, error)
        if raises_unsupported and isinstance(error, ProtocolNotSupported):
            raise
    return None
