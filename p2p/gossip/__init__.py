"""Publish and subscribe by libp2p's gossipsub v1.1: verified before it is forwarded.

The files, in the order in which to read them
---------------------------------------------
Formats, pure functions of bytes: `messages` (libp2p's, to the byte) and `config` (gossipsub's
parameters, with its defaults).

Decisions, pure by contract: the folder `core`, with a map of its own. `core.core` says how the
protocol works.

Driver, ordinary trio code: `service`, which feeds the core and carries out its effects.

docs/protocols/meshsub.md is all of it in one page; `tests/transcripts/gossip/` shows it event
by event.

How data flows
--------------
::

    message:  host -> Received -> core: quota, seen? -> Validate -> the topic's validator
              Validated -> core: accepted -> Deliver -> this node's handler
                                          -> Send to each mesh peer -> host
    timer:    once a second Tick -> core: meshes, promises, penalties; IHAVE to some others

What a newcomer calls
---------------------
`open_gossip` for a scope, then `Gossip.subscribe` with a validator and a handler, and
`Gossip.publish`. None of them blocks.
"""

from p2p.gossip.config import GossipConfig
from p2p.gossip.core.events import Validity
from p2p.gossip.messages import PROTOCOL_ID
from p2p.gossip.service import Gossip, Handler, Validator, open_gossip

__all__ = [
    "PROTOCOL_ID",
    "Gossip",
    "GossipConfig",
    "Handler",
    "Validator",
    "Validity",
    "open_gossip",
]
