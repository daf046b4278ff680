"""Publish and subscribe by libp2p's gossipsub v1.1: verified before it is forwarded.

Where to begin: `core/core.py` says how the protocol works, `messages.py` what is on the wire,
docs/protocols/meshsub.md both in one page, and `tests/transcripts/gossip/` shows it event by
event.

How data flows: the host hands an RPC to `service.Gossip`, the driver, which gives
`core.GossipCore` a `Received`. The core decodes it and returns effects. `Validate` asks the
validator of the topic, the answer goes back as `Validated`, and then come a `Deliver` for this
node's handler and a `Send` for each mesh peer, which the driver passes to the host. Once a
second the driver's timer gives a `Tick`, the heartbeat.

What a newcomer calls: `open_gossip`, then `Gossip.subscribe` with a validator and a handler,
and `Gossip.publish`. None of them blocks. `GossipConfig` has the parameters, with gossipsub's
defaults.
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
