"""Shoal's peer-to-peer stack: authenticated peers, streams and messages between them, on trio.

::

    async with p2p.open_host() as host:
        host.set_handler(ECHO, serve_echo)
        peer = await host.connect_addr(p2p.Multiaddr.parse(sys.argv[1]))
        async with await host.open_stream(peer, ECHO) as stream:
            await stream.send_all(b"hello")

The wire is libp2p's, so any libp2p program with TCP, Noise and yamux can be on the other side.
Above a host, `open_gossip`, `open_dht` and `open_membership` each take a world (`open_world`)
and a host. They are imported when they are first asked for: ``import p2p`` alone is half as
dear.
"""

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from p2p.dht import Dht, DhtConfig, Namespace, Record, open_dht
    from p2p.gossip import Gossip, GossipConfig, Validity, open_gossip
    from p2p.machine import open_world
    from p2p.membership import Member, Membership, MembershipConfig, open_membership

_SERVICES = {
    "p2p.dht": ("Dht", "DhtConfig", "Namespace", "Record", "open_dht"),
    "p2p.gossip": ("Gossip", "GossipConfig", "Validity", "open_gossip"),
    "p2p.machine": ("open_world",),
    "p2p.membership": ("Member", "Membership", "MembershipConfig", "open_membership"),
}
"""What `__getattr__` imports when it is asked for."""


def __getattr__(name: str) -> object:
    """A name of a service, from its module."""
    for module, names in _SERVICES.items():
        if name in names:
            found: object = getattr(importlib.import_module(module), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'p2p' has no attribute {name!r}")


__all__ = [
    "AddrSource",
    "BadMessage",
    "ConfigError",
    "ConnectionConfig",
    "Dht",
    "DhtConfig",
    "FrameReader",
    "Gossip",
    "GossipConfig",
    "Host",
    "KeyPair",
    "LimitExceeded",
    "Listener",
    "LocalProtocolError",
    "Member",
    "Membership",
    "MembershipConfig",
    "MemoryNetwork",
    "MessageHandler",
    "Multiaddr",
    "Namespace",
    "Network",
    "PeerEvent",
    "PeerId",
    "PeerState",
    "PeerUnreachable",
    "ProtocolError",
    "ProtocolId",
    "ProtocolNotSupported",
    "Record",
    "RemoteProtocolError",
    "ShoalError",
    "Stream",
    "StreamHandler",
    "SwarmConfig",
    "SwarmHost",
    "TcpNetwork",
    "Validity",
    "World",
    "WrongPeer",
    "frame",
    "open_dht",
    "open_gossip",
    "open_host",
    "open_membership",
    "open_world",
    "ping",
    "request",
    "send_frame",
    "serve_requests",
]
