"""A Kademlia in which a place costs work and every record is signed.

Where to begin: `core/core.py` says how the protocol works, `core/lookup.py` is the heart of it,
`messages.py` and `record.py` are what is on the wire, docs/protocols/kad.md all of it in three
pages, and `tests/transcripts/dht/` shows it event by event.

How data flows: the host hands a message to `service.Dht`, the driver, which gives
`core.DhtCore` a `Received`. A request goes to `core/responder.py`, which answers it from the
routing table and the record store. A reply goes to `core/requester.py`, which runs gets, puts
and joins through lookups. The core returns effects; the driver passes a `Send` to the host, and
a `Found`, `Written` or `Joined` to the caller that waits for it.

What a newcomer calls: `open_dht`, then `Dht.bootstrap` once, and `Dht.put`, `Dht.get` and
`Dht.find_peer`, which wait for the outcome. `Namespace` describes which records an application
takes. Importing this package does not need the package ``kademlia``; `open_dht` does.
"""

from p2p.dht.config import DhtConfig
from p2p.dht.core.validation import Namespace, PublisherKind
from p2p.dht.record import PROTOCOL_ID, Record
from p2p.dht.service import Dht, open_dht

__all__ = [
    "PROTOCOL_ID",
    "Dht",
    "DhtConfig",
    "Namespace",
    "PublisherKind",
    "Record",
    "open_dht",
]
