"""A Kademlia in which a place costs work and every record is signed.

The files, in the order in which to read them
---------------------------------------------
Formats, pure functions of bytes: `record` (what the DHT holds: signed by its publisher),
`stamp` (the proof of work that a place costs), `messages`, `config`.

Decisions, pure by contract: the folder `core`, with a map of its own. `core.core` says how the
protocol works, and `core.lookup` is the heart of it.

Driver, ordinary trio code: `service`, which feeds the core and carries out its effects.

docs/protocols/kad.md is all of it in three pages; `tests/transcripts/dht/` shows it event by
event.

How data flows
--------------
::

    request:  host -> Received -> core -> responder: routing table, records -> Send -> host
    reply:    host -> Received -> core -> requester -> its lookup -> Send to the next contacts
                                                    -> Found, Written or Joined -> the caller

What a newcomer calls
---------------------
`open_dht` for a scope, and on the `Dht` that it gives:

- to enter: `Dht.bootstrap`, once;
- to publish: `Dht.put`; to look up: `Dht.get` and `Dht.find_peer`, all of which wait for the
  outcome.

`Namespace` describes which records an application takes. Importing this package does not need
the package ``kademlia``; `open_dht` does.
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
