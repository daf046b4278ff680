"""Publish and subscribe by libp2p's ``/meshsub/1.1.0``: verified before it is passed on."""

from p2p.gossip.core.events import GossipConfig, Validity
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
