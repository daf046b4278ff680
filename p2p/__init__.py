"""Shoal's peer-to-peer stack: authenticated peers, streams and messages between them, on trio.

::

    async with p2p.open_host() as host:
        host.set_handler(ECHO, serve_echo)
        peer = await host.connect_addr(p2p.Multiaddr.parse(sys.argv[1]))
        async with await host.open_stream(peer, ECHO) as stream:
            await stream.send_all(b"hello")

The wire is libp2p's, so any libp2p program with TCP, Noise and yamux can be on the other side.
Above a host, `open_gossip`, `open_dht` and `open_membership` each take a world (`open_world`)
and a host. They are imported when they are first asked for: ``import p2p`` alone costs half as
much.

The files, in the order in which to read them
---------------------------------------------
The three seams, which everything else is written against: `host` (authenticated peers,
messages, streams), `world` (clock, chance, disk, workers, signer), `network` (raw byte
streams).

`dependencies` says which package is missing, before any is imported.

Names and bytes, pure: `errors` (each says whose fault it is), `door` (what embedding programs
pass, checked), `identity` (keys and `PeerId`), `multiaddr`, `wire` (frames, msgpack read with
distrust), `protobuf`, `policy` (how versions are numbered), `naming` (files beside others),
`bounded` (the dictionary and the token buckets that bound what peers cause), `offence` (what
misbehaviour costs), `equivocation` (the proof that an author signed two different things),
`own_time` (time without that for which the process was stopped). And not pure: `concurrency`
(what tasks wait for), `patience` (deadlines in own time), `meter` (what peers that are no
members get as answers, all together).

The host of production, a package with a map of its own: `swarm`, a `Host` on any network, above
`transport`, which proves and multiplexes connections; `circuit` has connections through a
relay, `reach` finds out which addresses others can dial. `machine` is the world of production;
`worker_process` starts its processes, which `sandbox` confines.

The services, packages with a map of their own: `membership` (who is alive), `gossip` (publish
and subscribe), `dht` (who is where), `shardcast` (policies to every node), `ledger` (a node's
signed log). `driver` feeds a service's core, and `events` are what the cores of all services
ask of a host. `node` composes all services; `cast` composes three of them to send files.

How data flows
--------------
::

    in:   network -> transport (Noise, then Yamux) -> swarm -> a handler, in a task of servers
                                                            -> a message handler, at once
    out:  Host.send -> a lane of outbox ─┐
          Host.open_stream ──────────────┴-> transport -> network

A host has four kinds of methods. To speak: `Host.send` (a message: never blocks, may be lost)
and `Host.open_stream` (a stream: back-pressure), with `request` on top. To be spoken to:
`Host.serving` and `Host.receiving`, for the length of a block. To look: `Host.connected`,
`Host.addrs_of`, `Host.watching`. To judge: `Host.protect`, `Host.penalise`, `Host.ban`. A
newcomer calls `open_host`, `Host.connect_addr` and the first two kinds.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

import p2p.dependencies  # noqa: F401 - first: it says what is missing
from p2p.errors import (
    BadMessage,
    ConfigError,
    LimitExceeded,
    LocalProtocolError,
    MissingDependency,
    PeerUnreachable,
    ProtocolError,
    ProtocolNotSupported,
    RemoteProtocolError,
    ShoalError,
    StorageError,
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
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.network import Listener, Network
from p2p.swarm.swarm import SwarmConfig, SwarmHost, open_host, ping
from p2p.transport.memory import MemoryNetwork
from p2p.transport.tcp import TcpNetwork
from p2p.wire import FrameReader, frame
from p2p.world import World

if TYPE_CHECKING:
    from p2p.dht import Dht, DhtConfig, Namespace, Record, open_dht
    from p2p.gossip import Gossip, GossipConfig, Validity, open_gossip
    from p2p.machine import open_world
    from p2p.membership import Member, Membership, MembershipConfig, open_membership
    from p2p.reach.nat import Nat, NatConfig, open_nat

_SERVICES = {
    "p2p.dht": ("Dht", "DhtConfig", "Namespace", "Record", "open_dht"),
    "p2p.gossip": ("Gossip", "GossipConfig", "Validity", "open_gossip"),
    "p2p.machine": ("open_world",),
    "p2p.membership": ("Member", "Membership", "MembershipConfig", "open_membership"),
    "p2p.reach.nat": ("Nat", "NatConfig", "open_nat"),
}
"""The services that `__getattr__` imports on first use, by module."""


def __dir__() -> list[str]:
    """List also the names that are imported on first use, so that ``help(p2p)`` shows them."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import a service, or a module of this package, on first use.

    ``__version__`` is the installed version.
    """
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("shoal")
    for module, names in _SERVICES.items():
        if name in names:
            found: object = getattr(importlib.import_module(module), name)
            globals()[name] = found
            return found
    if not name.startswith("_") and importlib.util.find_spec(f"p2p.{name}"):
        return importlib.import_module(f"p2p.{name}")
    raise AttributeError(f"module 'p2p' has no attribute {name!r}")


__all__ = [
    "AddrSource", "BadMessage", "ConfigError", "Dht", "DhtConfig",
    "FrameReader", "Gossip", "GossipConfig", "Host", "KeyPair", "LimitExceeded", "Listener",
    "LocalProtocolError", "Member", "Membership", "MembershipConfig", "MemoryNetwork",
    "MessageHandler", "MissingDependency", "Multiaddr", "Namespace", "Nat", "NatConfig",
    "Network", "PeerEvent", "PeerId", "PeerState", "PeerUnreachable", "ProtocolError",
    "ProtocolId", "ProtocolNotSupported", "Record", "RemoteProtocolError", "ShoalError",
    "StorageError", "Stream", "StreamHandler", "SwarmConfig", "SwarmHost", "TcpNetwork",
    "Validity", "World", "WrongPeer", "frame", "open_dht", "open_gossip", "open_host",
    "open_membership", "open_nat", "open_world", "ping", "request", "send_frame",
    "serve_requests",
]  # fmt: skip
