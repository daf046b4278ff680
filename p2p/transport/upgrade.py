"""Upgrade of raw bytes to a secured, multiplexed connection: negotiate, Noise, muxer.

A dialer pipelines: its first packet carries the negotiation header, the proposal of Noise and
the first Noise message; with a peer that names yamux in its Noise extensions, streams may be
opened one round trip later. There is no unauthenticated path, whatever a peer offers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from p2p.errors import ProtocolNotSupported, RemoteProtocolError
from p2p.identity import PeerId
from p2p.transport.core import noise, yamux
from p2p.transport.core.negotiate import Chooser, Proposer
from p2p.transport.core.noise import NoiseHandshake, NoiseSession, StaticKey


@dataclass(frozen=True, slots=True)
class Secured:
    """An authenticated byte stream, ready for `p2p.transport.connection.Connection`."""

    session: NoiseSession
    early: bytes
    """Decrypted bytes that came behind the handshake: the first of the muxer."""

    @property
    def peer(self) -> PeerId:
        """The proven identity of the other side."""
        return self.session.hello.peer


async def secure(
    raw: trio.abc.HalfCloseableStream,
    static: StaticKey,
    entropy: Callable[[int], bytes],
    *,
    dialer: bool,
    expected: PeerId | None = None,
    first: bytes | bytearray = b"",
) -> Secured:
    """Perform the handshake on ``raw``, of which ``first`` was read already.

    The caller sets the deadline, and closes ``raw`` on any error.

    Raises `RemoteProtocolError` (`WrongPeer` among them), `ProtocolNotSupported` when the peer
    speaks no Noise or no yamux, `trio.BrokenResourceError` when it goes away.
    """
    muxers = (yamux.PROTOCOL_ID,)
    handshake = NoiseHandshake(
        static, entropy(32), initiator=dialer, muxers=muxers, expected=expected
    )
    negotiation = Proposer(noise.PROTOCOL_ID) if dialer else Chooser(noise.PROTOCOL_ID.__eq__)
    await _send(raw, negotiation.data_to_send() + handshake.data_to_send())
    while negotiation.chosen is None:
        negotiation.receive_data(first or await _receive(raw))
        first = b""
        await _send(raw, negotiation.data_to_send())
        _check_listens(negotiation)
    handshake.receive_data(negotiation.leftover)
    await _send(raw, handshake.data_to_send())
    while (session := handshake.session) is None:
        handshake.receive_data(await _receive(raw))
        await _send(raw, handshake.data_to_send())
    early = b"".join(session.receive_data(handshake.leftover))
    if handshake.muxer is None:
        early = await _negotiate_muxer(raw, session, early, dialer=dialer)
    return Secured(session, early)


async def _negotiate_muxer(
    raw: trio.abc.HalfCloseableStream, session: NoiseSession, early: bytes, *, dialer: bool
) -> bytes:
    """Negotiate the muxer with peers without the Noise extension, such as py-libp2p."""
    wanted = yamux.PROTOCOL_ID
    negotiation = Proposer(wanted) if dialer else Chooser(wanted.__eq__)
    await _send(raw, session.seal(negotiation.data_to_send()))
    negotiation.receive_data(early)
    while negotiation.chosen is None:
        for plaintext in session.receive_data(await _receive(raw)):
            negotiation.receive_data(plaintext)
        await _send(raw, session.seal(negotiation.data_to_send()))
        _check_listens(negotiation)
    await _send(raw, session.seal(negotiation.data_to_send()))
    return negotiation.leftover


def _check_listens(negotiation: Proposer | Chooser) -> None:
    """End the connection of a dialer that continues in a protocol that was refused. Nothing
    that it sends is read."""
    if negotiation.is_deaf:
        raise ProtocolNotSupported("the peer wants to go on in a protocol that was refused")


async def _send(raw: trio.abc.SendStream, data: bytes) -> None:
    if data:
        await raw.send_all(data)


async def _receive(raw: trio.abc.ReceiveStream) -> bytes | bytearray:
    # Bytes read at once; a whole handshake has about 500, so one read has all that a peer sends
    # before it waits for us.
    data = await raw.receive_some(4096)
    if not data:
        raise RemoteProtocolError("the peer hung up during the handshake")
    return data
