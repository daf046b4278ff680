"""libp2p's identify and ping: a peer's protocols, the address at which it sees us, the round
trip."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.host import Stream
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.protobuf import as_bytes_untrusted, as_text_untrusted, field, fields_untrusted
from p2p.transport.core.negotiate import MAX_LINE
from p2p.wire import KI, FrameReader, frame

PROTOCOL_ID: Final = ProtocolId("/ipfs/id/1.0.0")
PUSH_ID: Final = ProtocolId("/ipfs/id/push/1.0.0")
PING_ID: Final = ProtocolId("/ipfs/ping/1.0.0")


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A peer's claims about itself. Only the connection proves anything."""

    agent: str
    protocols: tuple[ProtocolId, ...]
    listen_addrs: tuple[Multiaddr, ...]
    observed_addr: Multiaddr | None
    """This node's address as the peer sees it."""

    def updated(self, news: PeerInfo) -> PeerInfo:
        """Return this info with the fields that ``news`` contains replaced."""
        return PeerInfo(
            news.agent or self.agent,
            news.protocols or self.protocols,
            news.listen_addrs or self.listen_addrs,
            news.observed_addr or self.observed_addr,
        )


def encode_info(
    peer: PeerId,
    protocols: Sequence[ProtocolId],
    listen_addrs: Sequence[Multiaddr],
    observed: Multiaddr | None,
) -> bytes:
    """Encode our own identify message."""
    public_key = field(1, 1) + field(2, peer.public_key)
    parts = [field(1, public_key)]
    parts += [field(2, addr.transport.to_bytes()) for addr in listen_addrs]
    parts += [field(3, protocol) for protocol in protocols]
    if observed is not None:
        parts.append(field(4, observed.transport.to_bytes()))
    return b"".join([*parts, field(5, "ipfs/0.1.0"), field(6, "shoal/0.1")])


def decode_info_untrusted(data: bytes) -> PeerInfo:
    """Decode an identify message. Raise `BadMessage`, and nothing else, whatever the bytes.

    What no host can use is left out: addresses that cannot be dialled, and protocols that are
    not ASCII (one character from another plane makes Python hold four bytes for each of the
    others).
    """
    agent = ""
    protocols: list[ProtocolId] = []
    listen_addrs: list[Multiaddr] = []
    observed = None
    for number, value in fields_untrusted(data):
        # Addresses read from one message: four times those that a peer of ours has (IPv4 and
        # IPv6, inside and outside). A peer may claim any address, and each may be dialled.
        if number == 2 and len(listen_addrs) < 16:
            addr = _dialable(as_bytes_untrusted(value, "a listen address"))
            listen_addrs += [addr] if addr else []
        # Protocols remembered of one peer; a busy kubo node speaks about 40. All of them are at
        # most 8 KiB of ASCII, so 1,024 peers that tell as much as they can cost 24
        # MiB.
        elif number == 3 and len(protocols) < 128:
            protocol = as_text_untrusted(value, "a protocol")
            if protocol.isascii() and len(protocol) <= MAX_LINE:
                # Interned: a thousand peers speak the same few dozen. Freed with the last of
                # them.
                protocols.append(ProtocolId(sys.intern(protocol)))
        elif number == 4:
            observed = _dialable(as_bytes_untrusted(value, "an observed address"))
        elif number == 6:
            text = as_text_untrusted(value, "an agent version")[:MAX_LINE]
            agent = text if text.isprintable() else ""
    return PeerInfo(agent, tuple(protocols), tuple(listen_addrs), observed)


def _dialable(data: bytes) -> Multiaddr | None:
    """Return the address; None if it cannot be dialled or is of another kind (QUIC, WebRTC,
    circuits)."""
    try:
        return decode_multiaddr_untrusted(data)
    except BadMessage:
        return None


async def receive_info(stream: Stream) -> PeerInfo:
    """Read the peer's message. Raise `BadMessage` if it is malformed,
    `trio.BrokenResourceError` if the peer goes away."""
    # Most bytes of an identify message, as in go-libp2p.
    data = await FrameReader(stream, 8 * KI).receive()
    if data is None:
        raise BadMessage("the peer did not identify itself")
    return decode_info_untrusted(data)


async def send_info(stream: Stream, info: bytes) -> None:
    """Answer an identify request."""
    await stream.send_all(frame(info))


async def serve_ping(stream: Stream) -> None:
    """Echo pings for as long as they come.

    In the pieces in which it comes: cut into 32 bytes, 3 MB/s of pings took a core. A piece is
    let go before the next is waited for: the stream counts what its application has until that
    comes back for more, and 4,096 streams that kept the last 32 KiB of their peers while they
    waited made 130 MiB that no account knew of.
    """
    while data := await stream.receive_some():
        await stream.send_all(data)
        del data
