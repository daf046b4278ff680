"""Shoal's peer-to-peer stack: authenticated peers, streams and messages between them, on trio.

::

    async with p2p.open_host() as host:
        host.set_handler(ECHO, serve_echo)
        peer = await host.connect_addr(p2p.Multiaddr.parse(sys.argv[1]))
        async with await host.open_stream(peer, ECHO) as stream:
            await stream.send_all(b"hello")

The wire is libp2p's, so any libp2p program with TCP, Noise and yamux can be on the other side.
"""

from p2p.errors import (
    BadMessage,
    ConfigError,
    LimitExceeded,
    LocalProtocolError,
    PeerUnreachable,
    ProtocolError,
    ProtocolNotSupported,
    RemoteProtocolError,
    ShoalError,
    WrongPeer,
)
from p2p.host import (
    AddrSource,
    Host,
    MessageHandler,
    PeerEvent,
    PeerState,
    Stream,
    StreamHandler,
    request,
    send_frame,
    serve_requests,
)
from p2p.identify import ping
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.network import Listener, Network
from p2p.swarm import SwarmConfig, SwarmHost, open_host
from p2p.transport.connection import ConnectionConfig
from p2p.transport.memory import MemoryNetwork
from p2p.transport.tcp import TcpNetwork
from p2p.wire import FrameReader, frame
from p2p.world import World

__all__ = [
    "AddrSource",
    "BadMessage",
    "ConfigError",
    "ConnectionConfig",
    "FrameReader",
    "Host",
    "KeyPair",
    "LimitExceeded",
    "Listener",
    "LocalProtocolError",
    "MemoryNetwork",
    "MessageHandler",
    "Multiaddr",
    "Network",
    "PeerEvent",
    "PeerId",
    "PeerState",
    "PeerUnreachable",
    "ProtocolError",
    "ProtocolId",
    "ProtocolNotSupported",
    "RemoteProtocolError",
    "ShoalError",
    "Stream",
    "StreamHandler",
    "SwarmConfig",
    "SwarmHost",
    "TcpNetwork",
    "World",
    "WrongPeer",
    "frame",
    "open_host",
    "ping",
    "request",
    "send_frame",
    "serve_requests",
]
