"""The signed, hash-chained log of what this node has done.

Start with `p2p.ledger.core.chain`: what an entry is, and what proves that an author forked its
log. Then `p2p.ledger.core.synced`, the file that tells a torn end from rot, and
`p2p.ledger.ledger`, which appends and recovers; `p2p.ledger.config` has what may be chosen. A
role asks `Node.ledger` for the ledger, appends, and iterates over what it finds; every other
method is for the package itself. Entries flow one way: a role's statement is signed, written,
synced, and only then acknowledged. What touches no disk is in `core`.
"""

from p2p.ledger.config import LedgerConfig
from p2p.ledger.core.chain import Entry, LedgerFork
from p2p.ledger.ledger import Ledger, OwnLedger, open_ledger

__all__ = ["Entry", "Ledger", "LedgerConfig", "LedgerFork", "OwnLedger", "open_ledger"]
