"""Kademlia with work stamps and signed records. Importing it does not need the package ``kademlia``."""

from p2p.dht.config import DhtConfig
from p2p.dht.record import PROTOCOL_ID, Namespace, PublisherKind, Record
from p2p.dht.service import Dht, open_dht

__all__ = ["PROTOCOL_ID", "Dht", "DhtConfig", "Namespace", "PublisherKind", "Record", "open_dht"]
