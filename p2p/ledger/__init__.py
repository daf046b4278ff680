"""The signed, hash-chained log of what this node has done.

The folder `core` touches no disk. Start there, with `p2p.ledger.core.chain`: what an entry is,
and what proves that an author forked its log; then `p2p.ledger.core.synced`, the file that
tells a torn end from rot. `ledger` is the driver: it appends, and recovers after kill -9;
`config` has what may be chosen.

Entries flow one way: a role's statement is signed, written, synced, and only then acknowledged.

A newcomer asks a node for it (``node.ledger.opened``), and calls `Ledger.append`, `Ledger.read`
and `Ledger.entries`; every other method is for the package itself.
"""

from p2p.ledger.config import LedgerConfig
from p2p.ledger.core.chain import Entry, LedgerFork
from p2p.ledger.ledger import Ledger, OwnLedger, open_ledger

__all__ = ["Entry", "Ledger", "LedgerConfig", "LedgerFork", "OwnLedger", "open_ledger"]
